// Collectives between the ranks of one host, over a segment that all of them have mapped.
//
// The segment: a header page with one line per rank, then two buffers of `capacity` bytes per rank.
// A rank publishes its data in the buffer of the operation's parity and raises its counter; data is
// read once the counters of all ranks have got there. A rank that raises its counter for operation
// k + 1 has read all of operation k: hence a buffer is free when its turn comes again.
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "plait.h"

#define HEADER_BYTES 4096
#define MAX_RANKS 32

struct line {
    _Alignas(64) _Atomic uint64_t arrived;
};

struct segment {
    char *base;
    int64_t rank, size, capacity;
};

INLINE struct line *line_of(const struct segment *s, int64_t rank) {
    return (struct line *)s->base + rank;
}
INLINE void *buffer_of(const struct segment *s, int64_t rank, uint64_t operation) {
    return s->base + HEADER_BYTES + ((int64_t)(operation & 1) * s->size + rank) * s->capacity;
}
INLINE void arrive(const struct segment *s, uint64_t count) {
    atomic_store_explicit(&line_of(s, s->rank)->arrived, count, memory_order_release);
}

INLINE void relax(void) {
#ifdef __x86_64__
    _mm_pause();
#endif
}
static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

// Wait until every rank has raised its counter to `count`. Spins while peers are likely at work on
// cores of their own, then lets them have this one. False after `timeout_us`.
static bool wait_for_all(const struct segment *s, uint64_t count, int64_t timeout_us) {
    int64_t deadline = 0;
    for (int64_t rank = 0; rank < s->size; rank++) {
        struct line *line = line_of(s, rank);
        for (int64_t tries = 0;
             atomic_load_explicit(&line->arrived, memory_order_acquire) < count; tries++) {
            if (tries < 2000) {
                relax();
            } else if (tries < 4000) {
                sched_yield();
            } else {
                struct timespec pause = {0, 50000};
                nanosleep(&pause, NULL);
            }
            if (tries % 512 == 511 || tries >= 4000) {
                if (deadline == 0) deadline = now_us() + timeout_us;
                if (now_us() > deadline) return false;
            }
        }
    }
    return true;
}

// out[first .. stop) = sum over ranks, in their order, rounded once.
INLINE void sum_ranks(const struct segment *s, uint64_t operation, enum dtype dtype, void *out,
                      int64_t first, int64_t stop) {
    const void *parts[MAX_RANKS];
    for (int64_t rank = 0; rank < s->size; rank++) parts[rank] = buffer_of(s, rank, operation);
    for (int64_t i = first; i < stop; i += LANES) {
        vf sum = load_upto(parts[0], dtype, i, stop - i);
        for (int64_t rank = 1; rank < s->size; rank++)
            sum += load_upto(parts[rank], dtype, i, stop - i);
        store_upto(out, dtype, i, stop - i, sum);
    }
}
static void sum_ranks_as(const struct segment *s, uint64_t operation, int64_t dtype, void *out,
                         int64_t first, int64_t stop) {
    if (dtype == FLOAT32) sum_ranks(s, operation, FLOAT32, out, first, stop);
    if (dtype == BFLOAT16) sum_ranks(s, operation, BFLOAT16, out, first, stop);
    if (dtype == FLOAT16) sum_ranks(s, operation, FLOAT16, out, first, stop);
}

// The part of `count` elements that `rank` sums up; ends on a vector, so that parts are as the whole.
INLINE int64_t part_start(const struct segment *s, int64_t count, int64_t rank) {
    int64_t vectors = (count + 15) / 16;
    return min64(count, vectors * rank / s->size * 16);
}

// Both collectives return 0 when done, else the stage to go on from: some rank was not there within
// `timeout_us`. `counter` is 2 * operation, with room for two arrivals.

// x = sum over ranks. Few elements: every rank sums all. Many: each sums a part and copies the rest.
EXPORT int64_t all_reduce(void *base, int64_t rank, int64_t size, int64_t capacity, void *x,
                          int64_t dtype, int64_t count, int64_t operation, int64_t in_parts,
                          int64_t stage, int64_t timeout_us) {
    struct segment s = {base, rank, size, capacity};
    uint64_t counter = 2 * (uint64_t)operation;
    int64_t bytes = dtype_bytes((enum dtype)dtype);
    char *mine = buffer_of(&s, rank, operation);
    if (stage == 0) {
        memcpy(mine, x, (size_t)(count * bytes));
        arrive(&s, counter + 1);
        stage = 1;
    }
    if (stage == 1) {
        if (!wait_for_all(&s, counter + 1, timeout_us)) return 1;
        if (!in_parts) {
            sum_ranks_as(&s, operation, dtype, x, 0, count);
            return 0;
        }
        // Nobody else reads this rank's part of its own buffer: the sum takes its place.
        sum_ranks_as(&s, operation, dtype, mine, part_start(&s, count, rank),
                     part_start(&s, count, rank + 1));
        arrive(&s, counter + 2);
    }
    if (!wait_for_all(&s, counter + 2, timeout_us)) return 2;
    for (int64_t r = 0; r < size; r++) {
        int64_t first = part_start(&s, count, r) * bytes;
        int64_t stop = part_start(&s, count, r + 1) * bytes;
        memcpy((char *)x + first, (char *)buffer_of(&s, r, operation) + first,
               (size_t)(stop - first));
    }
    return 0;
}

// out (rows, size * row_bytes) = the rows of every rank side by side, from x (rows, row_bytes).
EXPORT int64_t all_gather(void *base, int64_t rank, int64_t size, int64_t capacity, const void *x,
                          int64_t rows, int64_t row_bytes, void *out, int64_t operation,
                          int64_t stage, int64_t timeout_us) {
    struct segment s = {base, rank, size, capacity};
    uint64_t counter = 2 * (uint64_t)operation;
    if (stage == 0) {
        memcpy(buffer_of(&s, rank, operation), x, (size_t)(rows * row_bytes));
        arrive(&s, counter + 1);
    }
    if (!wait_for_all(&s, counter + 1, timeout_us)) return 1;
    for (int64_t r = 0; r < size; r++) {
        const char *part = buffer_of(&s, r, operation);
        for (int64_t row = 0; row < rows; row++)
            memcpy((char *)out + (row * size + r) * row_bytes, part + row * row_bytes,
                   (size_t)row_bytes);
    }
    return 0;
}

// Whether `rank` has not got as far as `arrivals` arrivals of the operation.
EXPORT int64_t is_missing(void *base, int64_t rank, int64_t operation, int64_t arrivals) {
    struct segment s = {base, 0, 0, 0};
    return atomic_load(&line_of(&s, rank)->arrived) < 2 * (uint64_t)operation + (uint64_t)arrivals;
}
