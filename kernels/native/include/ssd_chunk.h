// One chunk of one head of ssd_scan: its operands in floats, and their products.
//
// T packed tokens, R rows, H heads, G groups, P head dim, N state dim, S slots, E checkpoints.
// y_i = sum_{j<=i} exp(decay_{j+1..i}) step_j (C_i . B_j) x_j + exp(decay_{1..i}) C_i h over the
// tokens of the chunk: products of small float matrices. Operands whose columns are tokens lie in
// panels of PANEL tokens; registers hold tokens, and the state keeps its (P, N) order.
#pragma once

#include "rounding.h"
#include "tile.h"

#define CHUNK 32
// Vectors of one panel: more would multiply more of what lies ahead of the diagonal.
#define PANEL_VECTORS 2
#define PANEL (PANEL_VECTORS * LANES)
// Chunks of so few tokens are faster token by token.
#define FEW_TOKENS 4

struct strided {
    const void *data;
    enum dtype dtype;
    int64_t token, inner;  // elements between tokens, and between heads or groups
};

struct scan {
    int64_t tokens, rows, heads, groups, head_dim, state_dim, checkpoints;
    int64_t padded_head_dim, padded_state_dim;
    struct strided x, dt, B, C, z;
    void *out, *state;
    enum dtype state_dtype;
    int64_t slot_stride;
    const float *A, *D, *dt_bias;
    const int32_t *cu_seqlens;
    const int64_t *read_slots, *write_slots, *group_of_head, *checkpoint_tokens, *checkpoint_slots;
    const bool *has_initial_state;
    struct rounding rounding;
    bool softplus;
    float least_step, greatest_step;
};

// Scratch of one thread. P' and N' are P and N rounded up to whole vectors, filled with zeros.
struct work {
    float *B;    // (CHUNK, N')
    float *C;    // panels of (N', PANEL)
    float *CB;   // panels of (CHUNK, PANEL): C_i . B_j at (j, i)
    float *mix;  // the same, times the decay from j to i and step_j, 0 ahead of the diagonal
    float *x;    // (CHUNK, P')
    float *inputs;  // (CHUNK, P'): x step, times the decay to the end of the chunk
    float *y;    // (P', CHUNK)
    float *h;    // (heads, P', N')
    // By token of the chunk. Log decays are summed from its start in double precision and kept as
    // two floats: differences near 0 of sums in the hundreds must not lose digits.
    float step[CHUNK], log_decay[CHUNK], sum_high[CHUNK], sum_low[CHUNK];
    float from_start[CHUNK], to_end[CHUNK];
};

// ---- what the heads of a group share ----------------------------------------------------------

INLINE void widen_as(float *to, const void *from, enum dtype dtype, int64_t first, int64_t count) {
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) store(to, FLOAT32, n, load(from, dtype, first + n));
    if (n < count) store(to, FLOAT32, n, load_some(from, dtype, first + n, count - n));
}
// `count` elements as floats, filled up with zeros to whole vectors.
INLINE void widen(float *to, const void *from, enum dtype dtype, int64_t first, int64_t count) {
    if (dtype == BFLOAT16)
        widen_as(to, from, BFLOAT16, first, count);
    else if (dtype == FLOAT16)
        widen_as(to, from, FLOAT16, first, count);
    else
        widen_as(to, from, FLOAT32, first, count);
}
INLINE int64_t first_of(const struct strided *tensor, int64_t token, int64_t inner) {
    return token * tensor->token + inner * tensor->inner;
}
INLINE void prefetch_run(const void *address, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch((const char *)address + i);
}

static void load_group(const struct scan *s, struct work *w, int64_t group, int64_t begin,
                       int64_t tokens) {
    int64_t dim = s->state_dim, padded = s->padded_state_dim;
    for (int64_t j = 0; j < tokens; j++)
        widen(w->B + j * padded, s->B.data, s->B.dtype, first_of(&s->B, begin + j, group), dim);
    if (tokens <= FEW_TOKENS) {
        for (int64_t i = 0; i < tokens; i++)
            widen(w->C + i * padded, s->C.data, s->C.dtype, first_of(&s->C, begin + i, group), dim);
        return;
    }
    for (int64_t i = 0; i < tokens; i += LANES)
        for (int64_t n = 0; n < dim; n += LANES) {
            vf columns[LANES] = {{0}};
            for (int64_t r = 0; r < min64(LANES, tokens - i); r++)
                columns[r] = load_upto(s->C.data, s->C.dtype,
                                       (begin + i + r) * s->C.token + group * s->C.inner + n,
                                       dim - n);
            transpose(columns);
            float *target = w->C + i / PANEL * PANEL * padded + n * PANEL + i % PANEL;
            for (int r = 0; r < LANES; r++) store(target, FLOAT32, r * PANEL, columns[r]);
        }
    for (int64_t i = 0; i < tokens; i += PANEL)
        for (int64_t j = 0, rows; j < min64(tokens, i + PANEL); j += rows) {
            rows = min64(TILE_ROWS, tokens - j);
            FOR_ROWS(rows, {
                vf sums[TILE_ROWS][TILE_VECTORS] = {{{0}}};
                tile_multiply(sums, ROWS, PANEL_VECTORS, w->B + j * padded, padded, 1,
                              w->C + i * padded, PANEL, dim);
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < PANEL_VECTORS; v++)
                        store(w->CB, FLOAT32, i * CHUNK + (j + r) * PANEL + v * LANES,
                              sums[r][v]);
            })
        }
}

// ---- one head ---------------------------------------------------------------------------------

static void load_steps(const struct scan *s, struct work *w, int64_t head, int64_t begin,
                       int64_t tokens) {
    float bias = s->dt_bias ? s->dt_bias[head] : 0.0f;
    int64_t padded = round_up(tokens, LANES);
    for (int64_t i = 0; i < padded; i++)
        w->step[i] = load_one(s->dt.data, s->dt.dtype,
                              (begin + min64(i, tokens - 1)) * s->dt.token + head) + bias;
    for (int64_t i = 0; i < padded; i += LANES) {
        vf step = load(w->step, FLOAT32, i);
        if (s->softplus) step = vsoftplus(step);
        // In this order NaN stays NaN.
        step = vmin(splat(s->greatest_step), vmax(splat(s->least_step), step));
        store(w->step, FLOAT32, i, step);
        store(w->log_decay, FLOAT32, i, step * s->A[head]);
    }
}

static void sum_decays(struct work *w, int64_t tokens) {
    double sum = 0.0;
    int64_t padded = round_up(tokens, LANES);
    for (int64_t i = 0; i < padded; i++) {
        if (i < tokens) sum += w->log_decay[i];
        w->sum_high[i] = (float)sum;
        w->sum_low[i] = (float)(sum - w->sum_high[i]);
    }
    float end_high = w->sum_high[tokens - 1], end_low = w->sum_low[tokens - 1];
    for (int64_t i = 0; i < padded; i += LANES) {
        vf high = load(w->sum_high, FLOAT32, i), low = load(w->sum_low, FLOAT32, i);
        store(w->from_start, FLOAT32, i, vexp(high));
        store(w->to_end, FLOAT32, i, vexp((end_high - high) + (end_low - low)));
    }
}

static void decay_by_token(struct work *w) {
    store(w->from_start, FLOAT32, 0, vexp(load(w->log_decay, FLOAT32, 0)));
    store(w->to_end, FLOAT32, 0, splat(1.0f));
}

static void mix_tokens(const struct scan *s, struct work *w, int64_t head, int64_t tokens) {
    float skip = s->D ? s->D[head] : 0.0f;
    for (int64_t i = 0; i < tokens; i += LANES) {
        vf high = load(w->sum_high, FLOAT32, i), low = load(w->sum_low, FLOAT32, i);
        int64_t panel = i / PANEL * PANEL, first = panel * CHUNK + i % PANEL;
        int64_t diagonal = min64(i + LANES, tokens), end = min64(panel + PANEL, tokens);
        for (int64_t j = 0; j < diagonal; j++) {
            vf decay = vexp((high - w->sum_high[j]) + (low - w->sum_low[j]));
            vf value = load(w->CB, FLOAT32, first + j * PANEL) * decay * w->step[j];
            if (j >= i) {
                vi distance = LANE_NUMBERS + (int32_t)(i - j);
                value = choose(distance >= 0, value, (vf){0});
                value += choose(distance == 0, splat(skip), (vf){0});
            }
            store(w->mix, FLOAT32, first + j * PANEL, value);
        }
        for (int64_t j = diagonal; j < end; j++)
            store(w->mix, FLOAT32, first + j * PANEL, (vf){0});
    }
}

static void load_inputs(const struct scan *s, struct work *w, int64_t head, int64_t begin,
                        int64_t tokens) {
    int64_t dim = s->head_dim, padded = s->padded_head_dim;
    int64_t row_bytes = dim * dtype_bytes(s->x.dtype);
    for (int64_t j = 0; j < tokens; j++) {
        float *x = w->x + j * padded, factor = w->step[j] * w->to_end[j];
        int64_t first = first_of(&s->x, begin + j, head);
        widen(x, s->x.data, s->x.dtype, first, dim);
        for (int64_t p = 0; p < padded; p += LANES)
            store(w->inputs, FLOAT32, j * padded + p, load(x, FLOAT32, p) * factor);
        // Tokens are far apart in memory: of the next head by the time that it is its turn.
        prefetch_run(at(s->x.data, s->x.dtype, first + s->x.inner), row_bytes);
        prefetch_run(at(s->out, s->x.dtype, ((begin + j) * s->heads + head) * dim), row_bytes);
    }
}

// ---- products ---------------------------------------------------------------------------------

// One tile of y: what the tokens of a panel see of h, if it is not 0, and of their chunk.
INLINE void output_tile(const struct scan *s, struct work *w, const float *h, int64_t p, int rows,
                        int64_t i, int vectors, int64_t tokens) {
    int64_t padded = s->padded_state_dim;
    vf sums[TILE_ROWS][TILE_VECTORS] = {{{0}}};
    if (h) {
        tile_multiply(sums, rows, vectors, h + p * padded, padded, 1, w->C + i * padded, PANEL,
                      s->state_dim);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            vf decay = load(w->from_start, FLOAT32, i + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sums[r][v] *= decay;
        }
    }
    tile_multiply(sums, rows, vectors, w->x + p, 1, s->padded_head_dim, w->mix + i * CHUNK, PANEL,
                  tokens);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store(w->y, FLOAT32, (p + r) * CHUNK + i + v * LANES, sums[r][v]);
}

// One tile of h: decayed over the chunk, plus the inputs of its tokens.
INLINE void state_tile(const struct scan *s, struct work *w, float *h, int64_t p, int rows,
                       int64_t n, int vectors, int64_t tokens) {
    int64_t padded = s->padded_state_dim;
    float decay = w->from_start[tokens - 1];
    vf sums[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sums[r][v] = load(h, FLOAT32, (p + r) * padded + n + v * LANES) * decay;
    tile_multiply(sums, rows, vectors, w->inputs + p, 1, s->padded_head_dim, w->B + n, padded,
                  tokens);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store(h, FLOAT32, (p + r) * padded + n + v * LANES, sums[r][v]);
}

static void multiply_chunk(const struct scan *s, struct work *w, float *h, bool is_zero,
                           int64_t tokens) {
    const float *seen = is_zero ? NULL : h;
    for (int64_t i = 0; i < tokens; i += PANEL) {
        int64_t depth = min64(tokens, i + PANEL);
        for (int64_t p = 0, rows; p < s->head_dim; p += rows) {
            rows = min64(TILE_ROWS, s->head_dim - p);
            if (tokens - i > LANES)
                FOR_ROWS(rows, output_tile(s, w, seen, p, ROWS, i, PANEL_VECTORS, depth))
            else
                FOR_ROWS(rows, output_tile(s, w, seen, p, ROWS, i, 1, depth))
        }
    }
    for (int64_t p = 0, rows; p < s->head_dim; p += rows) {
        rows = min64(TILE_ROWS, s->head_dim - p);
        int64_t n = 0;
        for (; n + TILE_COLUMNS <= s->padded_state_dim; n += TILE_COLUMNS)
            FOR_ROWS(rows, state_tile(s, w, h, p, ROWS, n, TILE_VECTORS, tokens))
        for (; n < s->padded_state_dim; n += LANES)
            FOR_ROWS(rows, state_tile(s, w, h, p, ROWS, n, 1, tokens))
    }
}
