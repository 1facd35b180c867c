// selective_scan; arguments as in op.py.
//
// T packed tokens, R rows, C channels, N state dim, S slots, E checkpoints. Lanes hold channels:
// the sum over N needs no step across lanes, and step sizes, gates and skips are vectors like it.
// A block of channels goes through a chunk of tokens in three stages, with all that it touches in
// the first-level cache; one exponential per channel, state element and token is most of the work.
#include <stdlib.h>

#include "decay.h"
#include "rounding.h"

#define BLOCK 64  // channels, a multiple of LANES
#define CHUNK 32  // tokens
#define PARALLEL_WORK (1 << 16)

struct strided {
    const void *data;
    int64_t token;  // elements between tokens
};

struct scan {
    int64_t tokens, rows, channels, state_dim, checkpoints;
    struct strided x, dt, B, C, z;
    enum dtype dtype, state_dtype;
    const float *A, *D, *dt_bias;
    void *state, *out;
    int64_t slot_stride;
    const int32_t *cu_seqlens;
    const int64_t *read_slots, *write_slots, *checkpoint_tokens, *checkpoint_slots;
    const bool *has_initial_state;
    bool softplus;
    float least_step, greatest_step;
    struct rounding rounding;
};

// Scratch of one thread. N' is N rounded up to whole vectors.
struct work {
    float *B, *C;        // (CHUNK, N')
    float *h, *rates;    // (BLOCK / LANES, N', LANES); the decay rates are to base 2
    float steps[CHUNK * BLOCK];
    float values[CHUNK * BLOCK];  // step x, and after the scan y
};

// RUN with the constant DTYPE that equals `value`.
#define FOR_DTYPE(value, RUN)                                                  \
    switch (value) {                                                           \
    case FLOAT32: { const enum dtype DTYPE = FLOAT32; RUN; break; }            \
    case BFLOAT16: { const enum dtype DTYPE = BFLOAT16; RUN; break; }          \
    default: { const enum dtype DTYPE = FLOAT16; RUN; break; }                 \
    }

// ---- states -----------------------------------------------------------------------------------

// `count` channels of (C, N) at element `first`, with channels in lanes: times `factor` to `lanes`.
INLINE void load_channels(float *lanes, const void *from, enum dtype dtype, int64_t first,
                          int64_t count, int64_t state_dim, float factor) {
    for (int64_t n = 0; n < state_dim; n += LANES) {
        vf square[LANES] = {{0}};
        for (int64_t c = 0; c < min64(LANES, count); c++)
            square[c] = load_upto(from, dtype, first + c * state_dim + n, state_dim - n) * factor;
        transpose(square);
        for (int64_t i = 0; i < LANES; i++) store(lanes, FLOAT32, (n + i) * LANES, square[i]);
    }
}
// From lanes to (C, N) of a slot.
INLINE void store_channels(const struct scan *s, const float *lanes, enum dtype dtype,
                           bool is_stochastic, int64_t slot, int64_t channel, int64_t count,
                           uint32_t key) {
    int64_t state_dim = s->state_dim, first = channel * state_dim;
    void *to = at_mut(s->state, dtype, slot * s->slot_stride);
    for (int64_t n = 0; n < state_dim; n += LANES) {
        vf square[LANES];
        for (int64_t i = 0; i < LANES; i++) square[i] = load(lanes, FLOAT32, (n + i) * LANES);
        transpose(square);
        for (int64_t c = 0; c < min64(LANES, count); c++) {
            int64_t element = first + c * state_dim + n;
            store_state_upto(to, dtype, element, state_dim - n, square[c], is_stochastic, key,
                             s->rounding.first_element + element);
        }
    }
}

static void load_block(const struct scan *s, struct work *w, int64_t row, int64_t channel,
                       int64_t channels) {
    int64_t state_dim = s->state_dim, padded = round_up(state_dim, LANES);
    bool is_fresh = s->read_slots[row] == 0 || !s->has_initial_state[row];
    int64_t slot = s->read_slots[row] * s->slot_stride;
    for (int64_t c = 0; c < channels; c += LANES) {
        int64_t count = channels - c, first = (channel + c) * state_dim;
        load_channels(w->rates + c * padded, s->A, FLOAT32, first, count, state_dim, LOG2E);
        float *h = w->h + c * padded;
        if (is_fresh)
            memset(h, 0, (size_t)(LANES * padded) * sizeof *h);
        else
            FOR_DTYPE(s->state_dtype,
                      load_channels(h, s->state, DTYPE, slot + first, count, state_dim, 1.0f))
    }
}
static void store_block(const struct scan *s, const struct work *w, int64_t row, int64_t offset,
                        int64_t slot, int64_t channel, int64_t channels) {
    int64_t padded = round_up(s->state_dim, LANES);
    const struct rounding *r = &s->rounding;
    bool is_stochastic = r->seeds && s->state_dtype != FLOAT32;
    uint32_t key = is_stochastic ? row_key(r->seeds[row], r->positions[row] + offset, r->layer) : 0;
    for (int64_t c = 0; c < channels; c += LANES)
        FOR_DTYPE(s->state_dtype, {
            if (is_stochastic)
                store_channels(s, w->h + c * padded, DTYPE, true, slot, channel + c, channels - c,
                               key);
            else
                store_channels(s, w->h + c * padded, DTYPE, false, slot, channel + c, channels - c,
                               key);
        })
}

// ---- the three stages of a chunk --------------------------------------------------------------

INLINE void widen(float *to, const void *from, enum dtype dtype, int64_t first, int64_t count) {
    for (int64_t n = 0; n < count; n += LANES)
        store(to, FLOAT32, n, load_upto(from, dtype, first + n, count - n));
}

INLINE void load_chunk(const struct scan *s, struct work *w, enum dtype dtype, int64_t begin,
                       int64_t tokens, int64_t channel, int64_t channels) {
    int64_t padded = round_up(s->state_dim, LANES);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t token = begin + t, first = t * BLOCK;
        widen(w->B + t * padded, s->B.data, dtype, token * s->B.token, s->state_dim);
        widen(w->C + t * padded, s->C.data, dtype, token * s->C.token, s->state_dim);
        for (int64_t c = 0; c < channels; c += LANES) {
            int64_t count = channels - c;
            vf step = load_upto(s->dt.data, dtype, token * s->dt.token + channel + c, count);
            if (s->dt_bias) step += load_upto(s->dt_bias, FLOAT32, channel + c, count);
            if (s->softplus) step = vsoftplus(step);
            step = vclamp(step, splat(s->least_step), splat(s->greatest_step));
            vf x = load_upto(s->x.data, dtype, token * s->x.token + channel + c, count);
            store(w->steps, FLOAT32, first + c, step);
            store(w->values, FLOAT32, first + c, step * x);
        }
    }
}

INLINE vf largest(const float *vectors, int64_t count, int64_t distance) {
    vf most = {0};
    for (int64_t i = 0; i < count; i++) {
        vf x = load(vectors, FLOAT32, i * distance);
        most = vmax(vmax(x, -x), most);
    }
    return most;
}

INLINE void advance(vf step, vf input, bool is_bounded, const float *rates, float *h, vf B, vf C,
                    vf *sum) {
    vf decay = vdecay(step, load(rates, FLOAT32, 0), is_bounded);
    vf new = decay * load(h, FLOAT32, 0) + input * B;
    store(h, FLOAT32, 0, new);
    *sum += new * C;
}

// One vector of channels over the tokens: its state, N vectors, moves between cache and registers.
INLINE void scan_tokens(const float *B, const float *C, float *h, const float *rates,
                        const float *steps, float *values, int64_t tokens, int64_t state_dim,
                        bool is_bounded) {
    int64_t padded = round_up(state_dim, LANES);
    for (int64_t t = 0; t < tokens; t++, B += padded, C += padded) {
        vf step = load(steps, FLOAT32, t * BLOCK), input = load(values, FLOAT32, t * BLOCK);
        vf even = {0}, odd = {0};
        int64_t n = 0;
        for (; n + 1 < state_dim; n += 2) {
            const float *rate = rates + n * LANES;
            float *element = h + n * LANES;
            advance(step, input, is_bounded, rate, element, splat(B[n]), splat(C[n]), &even);
            advance(step, input, is_bounded, rate + LANES, element + LANES, splat(B[n + 1]),
                    splat(C[n + 1]), &odd);
        }
        if (n < state_dim)
            advance(step, input, is_bounded, rates + n * LANES, h + n * LANES, splat(B[n]),
                    splat(C[n]), &even);
        store(values, FLOAT32, t * BLOCK, even + odd);
    }
}
static void scan_chunk(const float *B, const float *C, float *h, const float *rates,
                       const float *steps, float *values, int64_t tokens, int64_t state_dim) {
    vf power = largest(steps, tokens, BLOCK) * largest(rates, state_dim, LANES);
    if (hmax(power) <= DECAY_BOUND)
        scan_tokens(B, C, h, rates, steps, values, tokens, state_dim, true);
    else
        scan_tokens(B, C, h, rates, steps, values, tokens, state_dim, false);
}

INLINE void finish_chunk(const struct scan *s, const struct work *w, enum dtype dtype,
                         int64_t begin, int64_t tokens, int64_t channel, int64_t channels) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t c = 0; c < channels; c += LANES) {
            int64_t token = begin + t, first = channel + c, count = channels - c;
            vf y = load(w->values, FLOAT32, t * BLOCK + c);
            if (s->D)
                y += load_upto(s->D, FLOAT32, first, count) *
                     load_upto(s->x.data, dtype, token * s->x.token + first, count);
            if (s->z.data)
                y *= silu(load_upto(s->z.data, dtype, token * s->z.token + first, count));
            store_upto(s->out, dtype, token * s->channels + first, count, y);
        }
}

// ---- rows -------------------------------------------------------------------------------------

static void zero_outputs(const struct scan *s, int64_t begin, int64_t end, int64_t channel,
                         int64_t channels) {
    for (int64_t t = begin; t < end; t++)
        memset(at_mut(s->out, s->dtype, t * s->channels + channel), 0,
               (size_t)(channels * dtype_bytes(s->dtype)));
}

// The first checkpoint at or after `token`.
static int64_t first_checkpoint(const struct scan *s, int64_t token) {
    int64_t low = 0, high = s->checkpoints;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (s->checkpoint_tokens[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void scan_row(const struct scan *s, struct work *w, int64_t row, int64_t channel) {
    int64_t channels = min64(BLOCK, s->channels - channel), padded = round_up(s->state_dim, LANES);
    int64_t start = s->cu_seqlens[row], stop = s->cu_seqlens[row + 1];
    if (s->write_slots[row] == 0) {
        zero_outputs(s, start, stop, channel, channels);
        return;
    }
    load_block(s, w, row, channel, channels);
    int64_t next = first_checkpoint(s, start);
    for (int64_t begin = start, end; begin < stop; begin = end) {
        end = min64(begin + CHUNK, stop);
        if (next < s->checkpoints) end = min64(end, s->checkpoint_tokens[next] + 1);
        FOR_DTYPE(s->dtype, load_chunk(s, w, DTYPE, begin, end - begin, channel, channels))
        for (int64_t c = 0; c < channels; c += LANES)
            scan_chunk(w->B, w->C, w->h + c * padded, w->rates + c * padded, w->steps + c,
                       w->values + c, end - begin, s->state_dim);
        FOR_DTYPE(s->dtype, finish_chunk(s, w, DTYPE, begin, end - begin, channel, channels))
        for (; next < s->checkpoints && s->checkpoint_tokens[next] == end - 1; next++)
            if (s->checkpoint_slots[next] != 0)
                store_block(s, w, row, end - 1 - start, s->checkpoint_slots[next], channel,
                            channels);
    }
    store_block(s, w, row, stop - 1 - start, s->write_slots[row], channel, channels);
}

EXPORT void selective_scan(const void *x, int64_t x_token, const void *dt, int64_t dt_token,
                           const float *A, const void *B, int64_t B_token, const void *C,
                           int64_t C_token, const void *z, int64_t z_token, int64_t dtype,
                           void *state, int64_t state_dtype, int64_t slot_stride, void *out,
                           const int32_t *cu_seqlens, const int64_t *read_slots,
                           const int64_t *write_slots, const bool *has_initial_state, int64_t rows,
                           const float *D, const float *dt_bias, int64_t softplus,
                           float least_step, float greatest_step, int64_t tokens,
                           int64_t channels, int64_t state_dim, const int64_t *checkpoint_tokens,
                           const int64_t *checkpoint_slots, int64_t checkpoints,
                           const int64_t *seeds, const int64_t *positions, int64_t layer,
                           int64_t first_element) {
    struct scan s = {
        .tokens = tokens, .rows = rows, .channels = channels, .state_dim = state_dim,
        .checkpoints = checkpoints, .x = {x, x_token}, .dt = {dt, dt_token}, .B = {B, B_token},
        .C = {C, C_token}, .z = {z, z_token}, .dtype = (enum dtype)dtype,
        .state_dtype = (enum dtype)state_dtype, .A = A, .D = D, .dt_bias = dt_bias,
        .state = state, .out = out, .slot_stride = slot_stride, .cu_seqlens = cu_seqlens,
        .read_slots = read_slots, .write_slots = write_slots,
        .checkpoint_tokens = checkpoint_tokens, .checkpoint_slots = checkpoint_slots,
        .has_initial_state = has_initial_state, .softplus = softplus, .least_step = least_step,
        .greatest_step = greatest_step, .rounding = {seeds, positions, layer, first_element},
    };
    int64_t begin = cu_seqlens[0], end = cu_seqlens[rows], padded = round_up(state_dim, LANES);
    zero_outputs(&s, 0, begin, 0, channels);
    zero_outputs(&s, end, tokens, 0, channels);
#pragma omp parallel if ((end - begin) * channels * state_dim > PARALLEL_WORK)
    {
        size_t floats = (size_t)(2 * (CHUNK + BLOCK) * padded);
        float *scratch = aligned_alloc(64, round_up(floats * 4 + sizeof(struct work), 64));
        struct work *w = (struct work *)(scratch + floats);
        w->B = scratch;
        w->C = w->B + CHUNK * padded;
        w->h = w->C + CHUNK * padded;
        w->rates = w->h + BLOCK * padded;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t channel = 0; channel < channels; channel += BLOCK)
                scan_row(&s, w, row, channel);
        free(scratch);
    }
}
