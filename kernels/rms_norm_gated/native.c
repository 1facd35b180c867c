// rms_norm_gated and grouped_sum_squares; arguments as in op.py. Threads share out the tokens.
//
// C channels. Those of a norm group mostly lie side by side: the map of groups is cut into runs
// first. The gate is one factor of the result wherever the norm is taken: a token becomes floats
// that are x times the gate, and a sum per group decides what they are multiplied with.
#include <stdlib.h>

#include "plait.h"

// Below this number of elements threads cost more than they save.
#define PARALLEL_ELEMENTS (1 << 14)

// As in native.py.
enum gating { NO_GATE, GATE_FIRST, GATE_LAST };

// Channels side by side of one group.
struct run {
    int64_t first, stop, group;
};

struct norm {
    const void *x, *gate;
    enum dtype dtype;
    int64_t x_stride, gate_stride;  // elements between tokens
    enum gating gating;
    int64_t tokens, channels, num_groups;
    struct run *runs;
    int64_t num_runs;
};

static void *allocate(void *memory, int64_t bytes) {
    memory = realloc(memory, (size_t)max64(bytes, 1));
    if (memory == NULL) abort();
    return memory;
}

// ---- runs of channels -------------------------------------------------------------------------

static int64_t run_stop(const int64_t *groups, int64_t c, int64_t channels) {
    int64_t group = groups[c];
    for (; c + 16 <= channels; c += 16) {
        int64_t difference = 0;
        for (int i = 0; i < 16; i++) difference |= groups[c + i] ^ group;
        if (difference) break;
    }
    while (c < channels && groups[c] == group) c++;
    return c;
}

// Returns whether every channel has one of the groups. A map of NULL puts all into the first.
static bool find_runs(struct norm *n, const int64_t *groups) {
    n->num_runs = 0;
    n->runs = NULL;
    for (int64_t c = 0, stop; c < n->channels; c = stop) {
        // Room for twice as many at 1, 2, 4, 8 ... runs.
        if ((n->num_runs & (n->num_runs - 1)) == 0)
            n->runs = allocate(n->runs, (2 * n->num_runs + 1) * (int64_t)sizeof(struct run));
        stop = groups ? run_stop(groups, c, n->channels) : n->channels;
        struct run run = {.first = c, .stop = stop, .group = groups ? groups[c] : 0};
        n->runs[n->num_runs++] = run;
        if (run.group < 0 || run.group >= n->num_groups) return false;
    }
    return true;
}

// ---- first pass: products and sums ------------------------------------------------------------

// values = x silu(gate); returns the squares of what is normalised.
INLINE vf gate_vector(const void *x, const void *gate, enum dtype dtype, enum gating gating,
                      float *values, int64_t c, int64_t count) {
    vf value = load_upto(x, dtype, c, count), normalised = value;
    if (gating != NO_GATE) value *= silu(load_upto(gate, dtype, c, count));
    if (gating == GATE_FIRST) normalised = value;
    store_upto(values, FLOAT32, c, count, value);
    return normalised * normalised;
}

INLINE float gate_run(const void *x, const void *gate, enum dtype dtype, enum gating gating,
                      float *values, int64_t c, int64_t stop) {
    vf squares[2] = {{0}, {0}};
    for (; c + 2 * LANES <= stop; c += 2 * LANES)
        for (int i = 0; i < 2; i++)
            squares[i] += gate_vector(x, gate, dtype, gating, values, c + i * LANES, LANES);
    for (; c < stop; c += LANES)
        squares[0] += gate_vector(x, gate, dtype, gating, values, c, min64(LANES, stop - c));
    return hsum(squares[0] + squares[1]);
}

INLINE void gate_token_as(const struct norm *n, enum dtype dtype, enum gating gating,
                          int64_t token, float *values, float *sums) {
    const void *x = at(n->x, dtype, token * n->x_stride), *gate = NULL;
    if (gating != NO_GATE) gate = at(n->gate, dtype, token * n->gate_stride);
    for (int64_t r = 0; r < n->num_runs; r++) {
        struct run run = n->runs[r];
        sums[run.group] += gate_run(x, gate, dtype, gating, values, run.first, run.stop);
    }
}

INLINE void gate_token_of(const struct norm *n, enum dtype dtype, int64_t token, float *values,
                          float *sums) {
    switch (n->gating) {
    case NO_GATE: gate_token_as(n, dtype, NO_GATE, token, values, sums); break;
    case GATE_FIRST: gate_token_as(n, dtype, GATE_FIRST, token, values, sums); break;
    case GATE_LAST: gate_token_as(n, dtype, GATE_LAST, token, values, sums); break;
    }
}

static void gate_token(const struct norm *n, int64_t token, float *values, float *sums) {
    memset(sums, 0, (size_t)n->num_groups * sizeof *sums);
    switch (n->dtype) {
    case FLOAT32: gate_token_of(n, FLOAT32, token, values, sums); break;
    case BFLOAT16: gate_token_of(n, BFLOAT16, token, values, sums); break;
    case FLOAT16: gate_token_of(n, FLOAT16, token, values, sums); break;
    }
}

// ---- second pass: scales ----------------------------------------------------------------------

INLINE void scale_run(const float *values, float inverse, const void *weight,
                      enum dtype weight_dtype, void *y, enum dtype dtype, int64_t c,
                      int64_t stop) {
    for (; c + LANES <= stop; c += LANES)
        store(y, dtype, c, load(values, FLOAT32, c) * inverse * load(weight, weight_dtype, c));
    if (c == stop) return;
    vf scale = inverse * load_some(weight, weight_dtype, c, stop - c);
    store_some(y, dtype, c, stop - c, load_some(values, FLOAT32, c, stop - c) * scale);
}

// y = values weight / rms; the weight is of the dtype of y or float32.
static void scale_token(const struct norm *n, const float *values, const float *sums, float width,
                        float eps, const void *weight, enum dtype weight_dtype, void *y) {
    for (int64_t r = 0; r < n->num_runs; r++) {
        struct run run = n->runs[r];
        float inverse = 1.0f / sqrtf(sums[run.group] / width + eps);
        if (n->dtype == FLOAT32)
            scale_run(values, inverse, weight, FLOAT32, y, FLOAT32, run.first, run.stop);
        else if (n->dtype == BFLOAT16 && weight_dtype == BFLOAT16)
            scale_run(values, inverse, weight, BFLOAT16, y, BFLOAT16, run.first, run.stop);
        else if (n->dtype == BFLOAT16)
            scale_run(values, inverse, weight, FLOAT32, y, BFLOAT16, run.first, run.stop);
        else if (weight_dtype == FLOAT16)
            scale_run(values, inverse, weight, FLOAT16, y, FLOAT16, run.first, run.stop);
        else
            scale_run(values, inverse, weight, FLOAT32, y, FLOAT16, run.first, run.stop);
    }
}

// ---- all tokens -------------------------------------------------------------------------------

// Both return 0, or 1 and do nothing where a channel has none of the groups.

EXPORT int64_t grouped_sum_squares(const void *x, int64_t dtype, int64_t x_stride, const void *gate,
                                   int64_t gate_stride, int64_t gating, const int64_t *groups,
                                   int64_t num_groups, float *sums, int64_t tokens,
                                   int64_t channels) {
    struct norm n = {x, gate, dtype, x_stride, gate_stride, gating, tokens, channels, num_groups,
                     NULL, 0};
    bool is_valid = find_runs(&n, groups);
#pragma omp parallel if (is_valid && tokens * channels > PARALLEL_ELEMENTS)
    if (is_valid) {
        float *values = allocate(NULL, channels * (int64_t)sizeof(float));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) gate_token(&n, t, values, sums + t * num_groups);
        free(values);
    }
    free(n.runs);
    return !is_valid;
}

// sum_squares may be NULL: the channels here are all there are.
EXPORT int64_t rms_norm_gated(const void *x, int64_t dtype, int64_t x_stride, const void *gate,
                              int64_t gate_stride, int64_t gating, const int64_t *groups,
                              int64_t num_groups, const float *sum_squares, int64_t tokens,
                              int64_t channels, const void *weight, int64_t weight_dtype,
                              float width, float eps, void *y) {
    struct norm n = {x, gate, dtype, x_stride, gate_stride, gating, tokens, channels, num_groups,
                     NULL, 0};
    bool is_valid = find_runs(&n, groups);
#pragma omp parallel if (is_valid && tokens * channels > PARALLEL_ELEMENTS)
    if (is_valid) {
        float *values = allocate(NULL, (channels + num_groups) * (int64_t)sizeof(float));
        float *sums = values + channels;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            gate_token(&n, t, values, sums);
            const float *whole = sum_squares ? sum_squares + t * num_groups : sums;
            scale_token(&n, values, whole, width, eps, weight, (enum dtype)weight_dtype,
                        at_mut(y, n.dtype, t * channels));
        }
        free(values);
    }
    free(n.runs);
    return !is_valid;
}
