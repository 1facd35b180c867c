// Decode of paged_attention: one query per row and head.
//
// Keys and values are read where they are, once for all heads that share them. Long rows are cut
// into pieces, always at the same positions, whose results are merged: a few rows keep many threads
// busy, and the result does not depend on their number.
#pragma once

#include "attention.h"

// Positions of a piece, and those that go through the softmax at a time.
#define PIECE 1024
#define STEP 64
// Queries that meet a key at a time, and vectors of y that are summed at a time.
#define MAX_QUERIES 4
#define MAX_VECTORS 4

// Positions of a step.
struct positions {
    int64_t count, k_at[STEP], v_at[STEP];
};

// The queries of a kv head and a step of keys.
struct group {
    const int64_t *heads;
    int64_t queries;
    // Scratch.
    float *q, *y;             // (queries, D')
    float *scores;            // (queries, STEP)
    struct softmax *softmax;  // by query
};

struct pieces {
    const int32_t *seq_lens;
    int64_t most;    // pieces of a row
    int64_t floats;  // of a result: y (D'), the total of the weights and the largest score
    float *results;  // (rows, H, most), only of rows with two or more
};

static void locate_step(const struct attention *a, const int64_t *table, int64_t kv_head,
                        int64_t first, int64_t end, struct positions *step) {
    step->count = min64(STEP, max64(0, end - first));
    locate(a, table, kv_head, first, step->count, step->k_at, step->v_at);
    // The last vector of scores is filled up with a key that exists.
    for (int64_t j = step->count; j % LANES; j++) step->k_at[j] = step->k_at[step->count - 1];
}

// Positions are far apart in memory: those of the next step come while this one is at work.
INLINE void prefetch_positions(const struct attention *a, const struct positions *step, int64_t j) {
    for (int64_t end = min64(j + LANES, step->count); j < end; j++) {
        const char *k = at(a->k.data, a->k.dtype, step->k_at[j]);
        const char *v = at(a->v.data, a->v.dtype, step->v_at[j]);
        for (int64_t i = 0; i < a->dim * dtype_bytes(a->k.dtype); i += 64) prefetch(k + i);
        for (int64_t i = 0; i < a->dim * dtype_bytes(a->v.dtype); i += 64) prefetch(v + i);
    }
}

// ---- scores -----------------------------------------------------------------------------------

// Halves the number of vectors, 2 count, by sums of neighbouring lanes, or of whole fours of them.
INLINE void add_neighbours(vf *v, int count, int unit) {
    vi lanes = (LANE_NUMBERS & ~3) + 2 * (LANE_NUMBERS & 1) + (LANE_NUMBERS & 2) * (LANES / 2);
    vi fours = 2 * (LANE_NUMBERS & ~3) + (LANE_NUMBERS & 3);
    vi first = unit == 1 ? lanes : fours;
#pragma GCC unroll 8
    for (int i = 0; i < count; i++)
        v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], first) +
               __builtin_shuffle(v[2 * i], v[2 * i + 1], first + unit);
}
// The sum of each of LANES vectors, which are overwritten.
static __attribute__((noinline)) vf sums_of(vf v[LANES]) {
    add_neighbours(v, LANES / 2, 1);
    add_neighbours(v, LANES / 4, 1);
    if (LANES > 4) add_neighbours(v, LANES / 8, 4);
    if (LANES > 8) add_neighbours(v, 1, 4);
    return v[0];
}

// sums[query][key] += q k for `count` elements from d on, at most a vector.
INLINE void multiply_part(const struct attention *a, vf sums[MAX_QUERIES][LANES], int queries,
                          int keys, const float *q, enum dtype dtype, const int64_t *k_at,
                          int64_t d, int64_t count) {
    vf query[MAX_QUERIES];
#pragma GCC unroll 8
    for (int r = 0; r < queries; r++) query[r] = load(q, FLOAT32, r * a->padded_dim + d);
#pragma GCC unroll 8
    for (int j = 0; j < keys; j++) {
        vf key = load_part(a->k.data, dtype, k_at[j] + d, count);
#pragma GCC unroll 8
        for (int r = 0; r < queries; r++) sums[r][j] += query[r] * key;
    }
}

// Scores of queries i to i + queries - 1 for LANES keys from j on.
INLINE void score_keys(const struct attention *a, struct group *g, enum dtype dtype, int64_t i,
                       int queries, const int64_t *k_at, int64_t j) {
    // As many sums as registers hold, of as many keys as divide LANES.
    const int most = queries == 1 ? 8 : queries <= 3 ? 4 : 2, keys = most < LANES ? most : LANES;
    const float *q = g->q + i * a->padded_dim;
    vf products[MAX_QUERIES][LANES];
    for (int first = 0; first < LANES; first += keys) {
        vf sums[MAX_QUERIES][LANES] = {{{0}}};
        int64_t d = 0;
        for (; d + LANES <= a->dim; d += LANES)
            multiply_part(a, sums, queries, keys, q, dtype, k_at + j + first, d, LANES);
        if (d < a->dim)
            multiply_part(a, sums, queries, keys, q, dtype, k_at + j + first, d, a->dim - d);
#pragma GCC unroll 8
        for (int r = 0; r < queries; r++)
#pragma GCC unroll 8
            for (int key = 0; key < keys; key++) products[r][first + key] = sums[r][key];
    }
    for (int r = 0; r < queries; r++)
        store(g->scores, FLOAT32, (i + r) * STEP + j, sums_of(products[r]) * a->scale);
}

INLINE void score_step(const struct attention *a, struct group *g, enum dtype dtype, int64_t i,
                       int queries, const struct positions *step, const struct positions *next) {
    for (int64_t j = 0; j < step->count; j += LANES) {
        if (i == 0) prefetch_positions(a, next, j);
        score_keys(a, g, dtype, i, queries, step->k_at, j);
    }
}

// ---- values -----------------------------------------------------------------------------------

// y = y shrink + weights V for `count` elements from d on, in at most `vectors` vectors.
INLINE void add_values(const struct attention *a, struct group *g, enum dtype dtype, int64_t i,
                       int queries, int64_t d, int vectors, int64_t count,
                       const struct positions *step, const float shrink[MAX_QUERIES]) {
    float *y = g->y + i * a->padded_dim + d;
    vf sums[MAX_QUERIES][MAX_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < queries; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sums[r][v] = load(y, FLOAT32, r * a->padded_dim + v * LANES) * shrink[r];
    for (int64_t j = 0; j < step->count; j++) {
        vf weight[MAX_QUERIES];
#pragma GCC unroll 8
        for (int r = 0; r < queries; r++) weight[r] = splat(g->scores[(i + r) * STEP + j]);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            vf value = load_part(a->v.data, dtype, step->v_at[j] + d + v * LANES,
                                 count - v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < queries; r++) sums[r][v] += weight[r] * value;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < queries; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store(y, FLOAT32, r * a->padded_dim + v * LANES, sums[r][v]);
}

INLINE void value_step(const struct attention *a, struct group *g, enum dtype dtype, int64_t i,
                       int queries, const struct positions *step,
                       const float shrink[MAX_QUERIES]) {
    const int vectors = queries <= 3 || LANES == 16 ? 4 : 2;
    int64_t d = 0;
    for (; d + vectors * LANES <= a->dim; d += vectors * LANES)
        add_values(a, g, dtype, i, queries, d, vectors, vectors * LANES, step, shrink);
    for (; d + LANES <= a->dim; d += LANES)
        add_values(a, g, dtype, i, queries, d, 1, LANES, step, shrink);
    if (d < a->dim) add_values(a, g, dtype, i, queries, d, 1, a->dim - d, step, shrink);
}

// ---- pieces -----------------------------------------------------------------------------------

// RUN with the constant QUERIES that equals `queries`, 1 to MAX_QUERIES.
#define FOR_QUERIES(queries, RUN)                                              \
    switch (queries) {                                                         \
    case 1: { enum { QUERIES = 1 }; RUN; break; }                              \
    case 2: { enum { QUERIES = 2 }; RUN; break; }                              \
    case 3: { enum { QUERIES = 3 }; RUN; break; }                              \
    default: { enum { QUERIES = 4 }; RUN; break; }                             \
    }

static void attend_step(const struct attention *a, struct group *g, const struct positions *step,
                        const struct positions *next) {
    for (int64_t i = 0, queries; i < g->queries; i += queries) {
        // Evenly: 5 queries are 3 and 2.
        int64_t left = g->queries - i, parts = (left + MAX_QUERIES - 1) / MAX_QUERIES;
        queries = (left + parts - 1) / parts;
        FOR_DTYPE(a->k.dtype,
                  FOR_QUERIES(queries, score_step(a, g, DTYPE, i, QUERIES, step, next)))
        float shrink[MAX_QUERIES];
        for (int64_t r = 0; r < queries; r++) {
            float *scores = g->scores + (i + r) * STEP;
            int64_t stop = round_up(step->count, LANES);
            hide(scores, step->count, stop);
            shrink[r] = weigh(&g->softmax[i + r], scores, 0, stop);
        }
        FOR_DTYPE(a->v.dtype,
                  FOR_QUERIES(queries, value_step(a, g, DTYPE, i, QUERIES, step, shrink)))
    }
}

static void take_group(const struct attention *a, struct group *g) {
    int64_t vectors = g->queries * a->padded_dim * 4, scores = g->queries * STEP * 4;
    int64_t softmax = g->queries * (int64_t)sizeof *g->softmax;
    char *next = scratch(2 * vectors + scores + softmax + 4 * 64);
    g->q = take(&next, vectors);
    g->y = take(&next, vectors);
    g->scores = take(&next, scores);
    g->softmax = take(&next, softmax);
}

static void attend_piece(const struct attention *a, const struct pieces *p, int64_t row,
                         int64_t kv_head, int64_t piece) {
    int64_t first_head = a->head_bounds[kv_head], stop = p->seq_lens[row];
    struct group g = {.heads = a->head_of + first_head,
                      .queries = a->head_bounds[kv_head + 1] - first_head};
    int64_t begin = max64(0, stop - a->window), first = begin + piece * PIECE;
    if (first >= stop || g.queries == 0) return;
    take_group(a, &g);
    for (int64_t i = 0; i < g.queries; i++) {
        load_query(a, row, g.heads[i], g.q + i * a->padded_dim);
        g.softmax[i] = empty_softmax();
    }
    memset(g.y, 0, (size_t)(g.queries * a->padded_dim) * sizeof *g.y);

    const int64_t *table = a->tables + row * a->table_stride;
    struct positions steps[2], *step = &steps[0], *next = &steps[1];
    int64_t end = min64(first + PIECE, stop);
    for (locate_step(a, table, kv_head, first, end, step); step->count > 0; first += STEP) {
        locate_step(a, table, kv_head, first + STEP, end, next);
        attend_step(a, &g, step, next);
        struct positions *done = step;
        step = next;
        next = done;
    }
    for (int64_t i = 0; i < g.queries; i++) {
        const float *y = g.y + i * a->padded_dim;
        float total = hsum(g.softmax[i].total);
        if (stop - begin <= PIECE) {
            store_output(a, row, g.heads[i], y, total);
            continue;
        }
        int64_t index = (row * a->heads + g.heads[i]) * p->most + piece;
        float *result = p->results + index * p->floats;
        memcpy(result, y, (size_t)a->padded_dim * sizeof *y);
        result[a->padded_dim] = total;
        result[a->padded_dim + 1] = g.softmax[i].largest;
    }
}

// Adds up the pieces of a row and head in the first one.
static void merge_pieces(const struct attention *a, const struct pieces *p, int64_t row,
                         int64_t head) {
    int64_t padded = a->padded_dim;
    int64_t count = (min64(p->seq_lens[row], a->window) + PIECE - 1) / PIECE;
    if (count < 2) return;
    float *y = p->results + (row * a->heads + head) * p->most * p->floats;
    float total = y[padded], largest = y[padded + 1];
    for (int64_t i = 1; i < count; i++) {
        const float *other = y + i * p->floats;
        float before = largest;
        if (other[padded + 1] > largest) largest = other[padded + 1];
        float old = exp_nonpositive(splat(before - largest))[0];
        float new = exp_nonpositive(splat(other[padded + 1] - largest))[0];
        for (int64_t d = 0; d < padded; d += LANES)
            store(y, FLOAT32, d, load(y, FLOAT32, d) * old + load(other, FLOAT32, d) * new);
        total = total * old + other[padded] * new;
    }
    store_output(a, row, head, y, total);
}
