// selective_state_update; arguments as in op.py.
//
// B batch, H heads, G groups, P head dim, N state dim, S slots. A line is the N elements of a state
// that make one output; the lines of a row follow one another in memory, as their inputs and
// outputs (H, P) do. The states are most of what a decode step moves: each is read and written
// once, in the order of memory. Lines go one by one, for a few at a time are a few streams, which
// memory serves at half the speed; the sums of LANES lines are added up together.
#include <stdlib.h>

#include "decay.h"
#include "rounding.h"

#define BLOCK 64           // lines that are a unit of work, unless a head has more
#define BYTES_AHEAD 1024   // of what is prefetched
#define PARALLEL_WORK (1 << 15)

struct rows {
    const void *data;
    int64_t stride;  // elements between rows of the batch
};

struct update {
    struct rows x, dt, B, C, z;
    const float *A, *D, *dt_bias;
    void *state, *out;
    int64_t slot_stride;
    const int64_t *read_slots, *write_slots, *group_of_head;
    int64_t batch, heads, groups, head_dim, state_dim;
    enum dtype dtype, state_dtype;
    bool A_by_state;  // A is (H, N), not (H)
    bool softplus;
    float least_step, greatest_step;
    struct rounding rounding;
};

// Scratch of one thread. Heads are those of a block, lines a piece of their lines.
struct work {
    float *B, *C;  // (N) of `group` of `row`, filled up with zeros to whole vectors
    int64_t row, group;
    // By head: the step size, and what multiplies the state; the step again where A has N rates.
    float head_steps[BLOCK], head_factors[BLOCK];
    // By line.
    float inputs[BLOCK], factors[BLOCK], skips[BLOCK], y[BLOCK];
};

// The constants of a compiled variant.
struct variant {
    enum dtype state;
    bool is_stochastic, A_by_state;
};

static vf load_any(const void *base, enum dtype dtype, int64_t index, int64_t count) {
    if (dtype == FLOAT32) return load_upto(base, FLOAT32, index, count);
    if (dtype == BFLOAT16) return load_upto(base, BFLOAT16, index, count);
    return load_upto(base, FLOAT16, index, count);
}
static void store_any(void *base, enum dtype dtype, int64_t index, int64_t count, vf x) {
    if (dtype == FLOAT32)
        store_upto(base, FLOAT32, index, count, x);
    else if (dtype == BFLOAT16)
        store_upto(base, BFLOAT16, index, count, x);
    else
        store_upto(base, FLOAT16, index, count, x);
}

// ---- lines ------------------------------------------------------------------------------------

// The slots that a row reads and writes, and what its rounding starts from.
struct slots {
    const void *old;
    void *new;
    uint32_t key;
    int64_t first_element;
};

// LANES elements of a line from `element` of the slot on, of which `count` are there.
INLINE vf advance_vector(struct variant v, struct slots s, int64_t element, int64_t count,
                         vf factor, const float *rates, vf input, vf B, vf C, vf sum) {
    vf decay = factor;
    if (v.A_by_state)
        decay = vdecay(factor, load_upto(rates, FLOAT32, 0, count) * LOG2E, false);
    vf h = decay * load_upto(s.old, v.state, element, count) + input * B;
    store_state_upto(s.new, v.state, element, count, h, v.is_stochastic, s.key,
                     s.first_element + element);
    return sum + h * C;
}

// `lines` lines, at most LANES, one by one: long ones are the only stream that way. The sum of the
// lanes of each of `sums` is the output of a line.
INLINE void advance_long(struct variant v, struct slots s, int64_t element, int64_t lines,
                         int64_t N, const float *factors, const float *inputs, const float *B,
                         const float *C, vf sums[LANES]) {
    for (int64_t i = 0; i < lines; i++) {
        vf factor = splat(factors[i]), input = splat(inputs[i]), even = {0}, odd = {0};
        int64_t n = 0;
        for (; n + 2 * LANES <= N; n += 2 * LANES, element += 2 * LANES) {
            const char *ahead = (const char *)at(s.old, v.state, element) + BYTES_AHEAD;
            for (int64_t byte = 0; byte < 2 * LANES * dtype_bytes(v.state); byte += 64)
                prefetch(ahead + byte);
            int64_t m = n + LANES;
            even = advance_vector(v, s, element, LANES, factor, NULL, input, load(B, FLOAT32, n),
                                  load(C, FLOAT32, n), even);
            odd = advance_vector(v, s, element + LANES, LANES, factor, NULL, input,
                                 load(B, FLOAT32, m), load(C, FLOAT32, m), odd);
        }
        for (int64_t count; (count = min64(LANES, N - n)) > 0; n += count, element += count)
            even = advance_vector(v, s, element, count, factor, NULL, input, load(B, FLOAT32, n),
                                  load(C, FLOAT32, n), even);
        sums[i] = even + odd;
    }
}

// `count` elements of each line, from the same one on, with a rate of each element.
INLINE void advance_columns(struct variant v, struct slots s, int64_t element, int64_t lines,
                            int64_t N, int64_t count, const float *factors, const float *inputs,
                            const float *rates, int64_t rates_step, vf B, vf C, vf sums[LANES]) {
    for (int64_t i = 0; i < lines; i++, element += N, rates += rates_step) {
        prefetch((const char *)at(s.old, v.state, element) + BYTES_AHEAD);
        sums[i] = advance_vector(v, s, element, count, splat(factors[i]), rates, splat(inputs[i]),
                                 B, C, sums[i]);
    }
}
// All lines together: those with rates are short, and what they share is loaded once.
INLINE void advance_short(struct variant v, struct slots s, int64_t element, int64_t lines,
                          int64_t N, const float *factors, const float *inputs, const float *rates,
                          int64_t rates_step, const float *B, const float *C, vf sums[LANES]) {
    int64_t n = 0;
    for (; n + LANES <= N; n += LANES)
        advance_columns(v, s, element + n, lines, N, LANES, factors, inputs, rates + n, rates_step,
                        load(B, FLOAT32, n), load(C, FLOAT32, n), sums);
    if (n < N)
        advance_columns(v, s, element + n, lines, N, N - n, factors, inputs, rates + n, rates_step,
                        load(B, FLOAT32, n), load(C, FLOAT32, n), sums);
}

INLINE vf lane_sums(vf square[LANES]) {
    transpose(square);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) square[i] += square[i + width];
    return square[0];
}

// The values of heads, from that of line `first` on, as values of `count` lines.
static void spread(float *lines, const float *heads, int64_t first, int64_t count, int64_t P) {
    if (P == 1) {
        memcpy(lines, heads + first, (size_t)count * sizeof *lines);
        return;
    }
    int64_t head = first / P, p = first % P;
    for (int64_t i = 0; i < count; i++) {
        lines[i] = heads[head];
        if (++p == P) p = 0, head++;
    }
}
// What the update of `count` lines from `line` on needs.
static void load_lines(const struct update *u, struct work *w, int64_t row, int64_t block,
                       int64_t line, int64_t count) {
    int64_t P = u->head_dim, first = line - block * P;
    spread(w->factors, w->head_factors, first, count, P);
    spread(w->inputs, w->head_steps, first, count, P);
    if (u->D) spread(w->skips, u->D + block, first, count, P);
    for (int64_t i = 0; i < count; i += LANES) {
        vf x = load_any(u->x.data, u->dtype, row * u->x.stride + line + i, count - i);
        vf skip = u->D ? load(w->skips, FLOAT32, i) * x : (vf){0};
        store(w->skips, FLOAT32, i, skip);
        store(w->inputs, FLOAT32, i, load(w->inputs, FLOAT32, i) * x);
    }
}
static void store_lines(const struct update *u, const struct work *w, int64_t row, int64_t line,
                        int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        vf y = load(w->y, FLOAT32, i) + load(w->skips, FLOAT32, i);
        if (u->z.data)
            y *= silu(load_any(u->z.data, u->dtype, row * u->z.stride + line + i, count - i));
        store_any(u->out, u->dtype, row * u->heads * u->head_dim + line + i, count - i, y);
    }
}

// Heads `first` to `first` + heads of a row: of one group, and of one head or one line each if A
// has rates of elements.
INLINE void advance_heads(const struct update *u, struct variant v, struct work *w, int64_t row,
                          int64_t block, int64_t first, int64_t heads) {
    int64_t P = u->head_dim, N = u->state_dim, begin = first * P, end = (first + heads) * P;
    struct slots s = {
        .old = at(u->state, v.state, u->read_slots[row] * u->slot_stride),
        .new = at_mut(u->state, v.state, u->write_slots[row] * u->slot_stride),
        .first_element = u->rounding.first_element,
    };
    if (u->read_slots[row] == 0) {
        int64_t bytes = (end - begin) * N * dtype_bytes(v.state);
        memset(at_mut(s.new, v.state, begin * N), 0, (size_t)bytes);
        s.old = s.new;
    }
    if (v.is_stochastic)
        s.key = row_key(u->rounding.seeds[row], u->rounding.positions[row], u->rounding.layer);
    for (int64_t line = begin, lines; line < end; line += lines) {
        lines = min64(BLOCK, end - line);
        load_lines(u, w, row, block, line, lines);
        for (int64_t i = 0; i < lines; i += LANES) {
            int64_t count = min64(LANES, lines - i), element = (line + i) * N;
            vf sums[LANES];
#pragma GCC unroll 16
            for (int64_t j = 0; j < LANES; j++) sums[j] = (vf){0};
            if (v.A_by_state)
                advance_short(v, s, element, count, N, w->factors + i, w->inputs + i,
                              u->A + (P == 1 ? line + i : first) * N, P == 1 ? N : 0, w->B, w->C,
                              sums);
            else
                advance_long(v, s, element, count, N, w->factors + i, w->inputs + i, w->B, w->C,
                             sums);
            store(w->y, FLOAT32, i, lane_sums(sums));
        }
        store_lines(u, w, row, line, lines);
    }
}

static void advance_any(const struct update *u, struct work *w, int64_t row, int64_t block,
                        int64_t first, int64_t heads) {
    bool is_stochastic = u->rounding.seeds && u->state_dtype != FLOAT32;
#define CASE(STATE, STOCHASTIC, BY_STATE)                                                      \
    if (u->state_dtype == STATE && is_stochastic == STOCHASTIC && u->A_by_state == BY_STATE)   \
        return advance_heads(u, (struct variant){STATE, STOCHASTIC, BY_STATE}, w, row, block,  \
                             first, heads);
#define CASES(STATE, STOCHASTIC) CASE(STATE, STOCHASTIC, false) CASE(STATE, STOCHASTIC, true)
    CASES(FLOAT32, false)
    CASES(BFLOAT16, false)
    CASES(BFLOAT16, true)
    CASES(FLOAT16, false)
    CASES(FLOAT16, true)
}

// ---- blocks of heads --------------------------------------------------------------------------

static void load_steps(const struct update *u, struct work *w, int64_t row, int64_t block,
                       int64_t heads) {
    for (int64_t h = 0; h < heads; h += LANES) {
        int64_t first = block + h, count = heads - h;
        vf step = load_any(u->dt.data, u->dtype, row * u->dt.stride + first, count);
        if (u->dt_bias) step += load_upto(u->dt_bias, FLOAT32, first, count);
        if (u->softplus) step = vsoftplus(step);
        step = vclamp(step, splat(u->least_step), splat(u->greatest_step));
        vf factor = step;
        if (!u->A_by_state) factor = vexp(step * load_upto(u->A, FLOAT32, first, count));
        store(w->head_steps, FLOAT32, h, step);
        store(w->head_factors, FLOAT32, h, factor);
    }
}

static void load_group(const struct update *u, struct work *w, int64_t row, int64_t group) {
    if (w->row == row && w->group == group) return;
    w->row = row;
    w->group = group;
    int64_t N = u->state_dim, B = row * u->B.stride + group * N, C = row * u->C.stride + group * N;
    for (int64_t n = 0; n < N; n += LANES) {
        store(w->B, FLOAT32, n, load_any(u->B.data, u->dtype, B + n, N - n));
        store(w->C, FLOAT32, n, load_any(u->C.data, u->dtype, C + n, N - n));
    }
}

static int64_t group_of(const struct update *u, int64_t head) {
    return u->group_of_head ? u->group_of_head[head] : head / (u->heads / u->groups);
}

static void advance_block(const struct update *u, struct work *w, int64_t row, int64_t block,
                          int64_t heads) {
    if (u->write_slots[row] == 0) {
        int64_t P = u->head_dim, bytes = heads * P * dtype_bytes(u->dtype);
        memset(at_mut(u->out, u->dtype, (row * u->heads + block) * P), 0, (size_t)bytes);
        return;
    }
    load_steps(u, w, row, block, heads);
    bool one_by_one = u->A_by_state && u->head_dim > 1;
    for (int64_t first = block, last; first < block + heads; first = last) {
        int64_t group = group_of(u, first);
        last = first + 1;
        if (!one_by_one)
            while (last < block + heads && group_of(u, last) == group) last++;
        load_group(u, w, row, group);
        advance_any(u, w, row, block, first, last - first);
    }
}

EXPORT void selective_state_update(
    const void *x, int64_t x_stride, const void *dt, int64_t dt_stride, const float *A,
    int64_t A_by_state, const void *B, int64_t B_stride, const void *C, int64_t C_stride,
    const void *z, int64_t z_stride, const float *D, const float *dt_bias, void *state,
    int64_t slot_stride, const int64_t *read_slots, const int64_t *write_slots,
    const int64_t *group_of_head, int64_t batch, int64_t heads, int64_t groups, int64_t head_dim,
    int64_t state_dim, int64_t softplus, float least_step, float greatest_step, void *out,
    int64_t dtype, int64_t state_dtype, const int64_t *seeds, const int64_t *positions,
    int64_t layer, int64_t first_element) {
    struct update u = {
        .x = {x, x_stride}, .dt = {dt, dt_stride}, .B = {B, B_stride}, .C = {C, C_stride},
        .z = {z, z_stride}, .A = A, .D = D, .dt_bias = dt_bias, .state = state, .out = out,
        .slot_stride = slot_stride, .read_slots = read_slots, .write_slots = write_slots,
        .group_of_head = group_of_head, .batch = batch, .heads = heads, .groups = groups,
        .head_dim = head_dim, .state_dim = state_dim, .dtype = (enum dtype)dtype,
        .state_dtype = (enum dtype)state_dtype, .A_by_state = A_by_state, .softplus = softplus,
        .least_step = least_step, .greatest_step = greatest_step,
        .rounding = {seeds, positions, layer, first_element},
    };
    int64_t block_heads = max64(1, BLOCK / max64(1, head_dim)), padded = round_up(state_dim, LANES);
#pragma omp parallel if (batch * heads * head_dim * state_dim > PARALLEL_WORK)
    {
        float *scratch = aligned_alloc(64, (size_t)round_up(2 * padded * 4, 64));
        struct work w = {.B = scratch, .C = scratch + padded, .row = -1};
#pragma omp for collapse(2) schedule(static)
        for (int64_t row = 0; row < batch; row++)
            for (int64_t head = 0; head < heads; head += block_heads)
                advance_block(&u, &w, row, head, min64(block_heads, heads - head));
        free(scratch);
    }
}
