// causal_conv1d; arguments as in op.py. Threads share out blocks of channels of groups of rows.
//
// C channels, W conv width. A block takes a few tokens at a time through the nearest cache: inputs
// become floats behind the W-1 before them, the filter runs over them, and the sums are activated
// and stored. Channels lie in the lanes of vectors.
#include "plait.h"

#define MAX_WIDTH 8
// Channels of a block and tokens at a time: both in floats, with the filter, fill half a cache.
#define BLOCK 128
#define STEP 16
// Tokens that are worth loading a filter for, and elements that are worth a thread.
#define GROUP_TOKENS 16
#define PARALLEL_ELEMENTS (1 << 14)

struct conv {
    const void *x;
    enum dtype dtype;
    int64_t x_stride;  // elements between tokens
    int64_t tokens, channels;
    const void *weight, *bias;  // (C, W) and (C,), the bias may be NULL
    enum dtype weight_dtype, bias_dtype;
    int64_t width;
    void *state;
    enum dtype state_dtype;
    int64_t slot_stride;  // elements between slots
    int64_t rows;
    const int32_t *bounds;  // NULL: every row is one token
    const int64_t *read_slots, *write_slots;
    const bool *has_state;  // NULL: every row has one
    int64_t checkpoints;
    const int64_t *checkpoint_tokens, *checkpoint_slots;
    bool silu;
    void *out;
};

typedef float lanes[BLOCK] __attribute__((aligned(64)));

struct block {
    int64_t first, count;           // channels
    lanes taps[MAX_WIDTH], bias;    // the filter
    lanes inputs[MAX_WIDTH - 1 + STEP];  // W-1 old ones, oldest first, then the tokens at hand
};

// ---- conversion -------------------------------------------------------------------------------

INLINE void widen(const void *source, enum dtype dtype, int64_t index, int64_t count, float *x) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(x, FLOAT32, i, load(source, dtype, index + i));
    if (i < count) store(x, FLOAT32, i, load_some(source, dtype, index + i, count - i));
}
// `count` floats from element `index` on, then zeros up to a whole vector.
static void to_floats(const void *source, enum dtype dtype, int64_t index, int64_t count,
                      float *x) {
    switch (dtype) {
    case FLOAT32: widen(source, FLOAT32, index, count, x); break;
    case BFLOAT16: widen(source, BFLOAT16, index, count, x); break;
    case FLOAT16: widen(source, FLOAT16, index, count, x); break;
    }
}

INLINE void narrow(const float *x, int64_t count, bool activate, void *target, enum dtype dtype,
                   int64_t index) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf y = load(x, FLOAT32, i);
        store(target, dtype, index + i, activate ? silu(y) : y);
    }
    if (i < count) {
        vf y = load(x, FLOAT32, i);
        store_some(target, dtype, index + i, count - i, activate ? silu(y) : y);
    }
}
// `count` floats to element `index` and on, after a silu where `activate`.
static void from_floats(const float *x, int64_t count, bool activate, void *target,
                        enum dtype dtype, int64_t index) {
    switch (dtype) {
    case FLOAT32: narrow(x, count, activate, target, FLOAT32, index); break;
    case BFLOAT16: narrow(x, count, activate, target, BFLOAT16, index); break;
    case FLOAT16: narrow(x, count, activate, target, FLOAT16, index); break;
    }
}

// ---- filter and state of a block --------------------------------------------------------------

INLINE void split_taps(const float *weight, int64_t width, struct block *b) {
    for (int64_t i = 0; i < b->count; i++)
        for (int64_t w = 0; w < width; w++) b->taps[w][i] = weight[i * width + w];
}

static void load_filter(const struct conv *c, struct block *b) {
    float weight[MAX_WIDTH * BLOCK];
    to_floats(c->weight, c->weight_dtype, b->first * c->width, b->count * c->width, weight);
    if (c->width == 4)
        split_taps(weight, 4, b);
    else
        split_taps(weight, c->width, b);
    if (c->bias)
        to_floats(c->bias, c->bias_dtype, b->first, b->count, b->bias);
    else
        memset(b->bias, 0, sizeof b->bias);
}

static int64_t state_index(const struct conv *c, const struct block *b, int64_t slot, int64_t w) {
    return slot * c->slot_stride + w * c->channels + b->first;
}

static void load_state(const struct conv *c, int64_t row, struct block *b) {
    int64_t slot = c->has_state && !c->has_state[row] ? 0 : c->read_slots[row];
    for (int64_t w = 0; w < c->width - 1; w++)
        if (slot)
            to_floats(c->state, c->state_dtype, state_index(c, b, slot, w), b->count,
                      b->inputs[w]);
        else
            memset(b->inputs[w], 0, sizeof b->inputs[w]);
}

static void store_state(const struct conv *c, const struct block *b, int64_t slot) {
    for (int64_t w = 0; w < c->width - 1; w++)
        from_floats(b->inputs[w], b->count, false, c->state, c->state_dtype,
                    state_index(c, b, slot, w));
}

// ---- tokens -----------------------------------------------------------------------------------

// The sum for token t replaces input t, which no later token needs.
INLINE void filter_as(int width, int64_t tokens, struct block *b) {
    for (int64_t i = 0; i < b->count; i += LANES) {
        vf taps[MAX_WIDTH], bias = load(b->bias, FLOAT32, i);
        for (int w = 0; w < width; w++) taps[w] = load(b->taps[w], FLOAT32, i);
        for (int64_t t = 0; t < tokens; t++) {
            vf y = bias;
            for (int w = 0; w < width; w++) y += load(b->inputs[t + w], FLOAT32, i) * taps[w];
            store(b->inputs[t], FLOAT32, i, y);
        }
    }
}
static void filter(int64_t width, int64_t tokens, struct block *b) {
    switch (width) {  // the widths of known models, and any
    case 2: filter_as(2, tokens, b); break;
    case 3: filter_as(3, tokens, b); break;
    case 4: filter_as(4, tokens, b); break;
    default: filter_as((int)width, tokens, b); break;
    }
}

// At most STEP tokens; leaves the last W-1 inputs where they were before.
static void convolve_tokens(const struct conv *c, struct block *b, int64_t token, int64_t tokens) {
    int64_t old = c->width - 1;
    for (int64_t t = 0; t < tokens; t++)
        to_floats(c->x, c->dtype, (token + t) * c->x_stride + b->first, b->count,
                  b->inputs[old + t]);
    filter(c->width, tokens, b);
    for (int64_t t = 0; t < tokens; t++)
        from_floats(b->inputs[t], b->count, c->silu, c->out, c->dtype,
                    (token + t) * c->channels + b->first);
    memmove(b->inputs[0], b->inputs[tokens], (size_t)old * sizeof b->inputs[0]);
}

// The states after those tokens of a row that are to be kept; the block holds the first state.
static void store_checkpoints(const struct conv *c, struct block *b, int64_t start, int64_t stop) {
    int64_t old = c->width - 1;
    for (int64_t e = 0; e < c->checkpoints; e++) {
        int64_t token = c->checkpoint_tokens[e], slot = c->checkpoint_slots[e];
        if (token < start || token >= stop || slot == 0) continue;
        for (int64_t w = 0; w < old; w++) {
            int64_t source = token + 1 - old + w;
            float *inputs = b->inputs[old];
            if (source < start)
                inputs = b->inputs[old + source - start];
            else
                to_floats(c->x, c->dtype, source * c->x_stride + b->first, b->count, inputs);
            from_floats(inputs, b->count, false, c->state, c->state_dtype,
                        state_index(c, b, slot, w));
        }
    }
}

static int64_t row_start(const struct conv *c, int64_t row) {
    return c->bounds ? c->bounds[row] : row;
}

static void clear(const struct conv *c, int64_t token, int64_t channel, int64_t count) {
    memset(at_mut(c->out, c->dtype, token * c->channels + channel), 0,
           (size_t)(count * dtype_bytes(c->dtype)));
}

static void convolve_row(const struct conv *c, int64_t row, struct block *b) {
    int64_t start = row_start(c, row), stop = row_start(c, row + 1);
    if (c->write_slots[row] == 0) {
        for (int64_t t = start; t < stop; t++) clear(c, t, b->first, b->count);
        return;
    }
    load_state(c, row, b);
    store_checkpoints(c, b, start, stop);
    for (int64_t t = start; t < stop; t += STEP) convolve_tokens(c, b, t, min64(STEP, stop - t));
    store_state(c, b, c->write_slots[row]);
}

static void convolve(const struct conv *c) {
    int64_t group = max64(1, GROUP_TOKENS * c->rows / max64(1, c->tokens));
    bool is_large = c->tokens * c->channels > PARALLEL_ELEMENTS;
#pragma omp parallel for collapse(2) schedule(static) if (is_large)
    for (int64_t first_row = 0; first_row < c->rows; first_row += group)
        for (int64_t first = 0; first < c->channels; first += BLOCK) {
            struct block b;
            b.first = first;
            b.count = min64(BLOCK, c->channels - first);
            load_filter(c, &b);
            for (int64_t row = first_row; row < min64(first_row + group, c->rows); row++)
                convolve_row(c, row, &b);
        }
    int64_t past = row_start(c, c->rows);
    clear(c, past, 0, (c->tokens - past) * c->channels);
}

EXPORT void causal_conv1d_prefill(
    const void *x, int64_t dtype, int64_t x_stride, int64_t tokens, int64_t channels,
    const void *weight, int64_t weight_dtype, int64_t width, const void *bias, int64_t bias_dtype,
    void *state, int64_t state_dtype, int64_t slot_stride, int64_t rows, const int32_t *bounds,
    const int64_t *read_slots, const int64_t *write_slots, const bool *has_state,
    int64_t checkpoints, const int64_t *checkpoint_tokens, const int64_t *checkpoint_slots,
    int64_t silu, void *out) {
    struct conv c = {x, dtype, x_stride, tokens, channels, weight, bias, weight_dtype, bias_dtype,
                     width, state, state_dtype, slot_stride, rows, bounds, read_slots, write_slots,
                     has_state, checkpoints, checkpoint_tokens, checkpoint_slots, silu, out};
    convolve(&c);
}

EXPORT void causal_conv1d_update(
    const void *x, int64_t dtype, int64_t x_stride, int64_t rows, int64_t channels,
    const void *weight, int64_t weight_dtype, int64_t width, const void *bias, int64_t bias_dtype,
    void *state, int64_t state_dtype, int64_t slot_stride, const int64_t *read_slots,
    const int64_t *write_slots, int64_t silu, void *out) {
    struct conv c = {x, dtype, x_stride, rows, channels, weight, bias, weight_dtype, bias_dtype,
                     width, state, state_dtype, slot_stride, rows, NULL, read_slots, write_slots,
                     NULL, 0, NULL, NULL, silu, out};
    convolve(&c);
}
