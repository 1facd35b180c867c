// moe with packed experts; arguments as in op.py. T tokens, D model dim, E experts, K experts of a
// token, I intermediate dim.
#include "gemm.h"

// The choices (token, place among its K) of each expert, expert by expert: order[offsets[e] ...].
static void sort_by_expert(const int64_t *ids, int64_t choices, int64_t experts, int64_t *offsets,
                           int32_t *order) {
    memset(offsets, 0, (size_t)(experts + 1) * sizeof *offsets);
    for (int64_t c = 0; c < choices; c++) offsets[ids[c] + 1]++;
    for (int64_t e = 0; e < experts; e++) offsets[e + 1] += offsets[e];
    for (int64_t c = 0; c < choices; c++) order[offsets[ids[c]]++] = (int32_t)c;
    for (int64_t e = experts; e > 0; e--) offsets[e] = offsets[e - 1];
    offsets[0] = 0;
}

// hidden[I] = silu(gate[I]) * up[I], rounded to bfloat16, from one row gate | up.
INLINE void activate(const float *both, int64_t width, uint16_t *hidden) {
    for (int64_t i = 0; i < width; i += LANES) {
        vf gate = load_upto(both, FLOAT32, i, width - i);
        vf up = load_upto(both + width, FLOAT32, i, width - i);
        store_upto(hidden, BFLOAT16, i, width - i, silu(gate) * up);
    }
}

// total[D] += weight * y[D]
INLINE void accumulate(float *total, const float *y, float weight, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES)
        store_upto(total, FLOAT32, d, dim - d,
                   load_upto(total, FLOAT32, d, dim - d) +
                       weight * load_upto(y, FLOAT32, d, dim - d));
}

struct experts {
    const char *w_in, *w_out;
    const float *in_scale, *out_scale;
    int64_t dim, width;
};

// The rows `index` of x through expert e: results in y (count, D).
INLINE void run_expert(enum weight_format format, const struct experts *w, int64_t e,
                       const struct rows *x, float *both, uint16_t *hidden, float *y) {
    int64_t bytes = format == WEIGHT_BF16 ? 2 : 1, dim = w->dim, width = w->width;
    int64_t in_bytes = num_panels(2 * width) * panel_elements(dim) * bytes;
    int64_t out_bytes = num_panels(dim) * panel_elements(width) * bytes;
    struct epilogue to_both = {.out = both, .dtype = FLOAT32, .stride = 2 * width,
                               .outputs = 2 * width,
                               .scale = w->in_scale ? w->in_scale + e * 2 * width : NULL};
    gemm(format, x, dim, w->w_in + e * in_bytes, &to_both);
    for (int64_t r = 0; r < x->count; r++)
        activate(both + r * 2 * width, width, hidden + r * width);
    struct rows rows = {.x = hidden, .dtype = BFLOAT16, .count = x->count, .stride = width};
    struct epilogue to_y = {.out = y, .dtype = FLOAT32, .stride = dim, .outputs = dim,
                            .scale = w->out_scale ? w->out_scale + e * dim : NULL};
    gemm(format, &rows, width, w->w_out + e * out_bytes, &to_y);
}

EXPORT int64_t tile_columns(void) { return TILE_COLUMNS; }

// Scratch: both (T K, 2I), y (T K, D) and total (T, D) float; hidden (T K, I) bfloat16;
// offsets (E + 1) int64; order and tokens (T K) int32.
EXPORT void moe(const void *x, int64_t x_stride, int64_t tokens, int64_t dim, int64_t width,
                int64_t num_experts, int64_t per_token, const int64_t *ids,
                const float *weights, const void *w_in, const float *in_scale, const void *w_out,
                const float *out_scale, int64_t format, float *both, float *y, float *total,
                uint16_t *hidden, int64_t *offsets, int32_t *order, int32_t *token_of,
                void *out) {
    struct experts w = {w_in, w_out, in_scale, out_scale, dim, width};
    sort_by_expert(ids, tokens * per_token, num_experts, offsets, order);
    for (int64_t c = 0; c < tokens * per_token; c++)
        token_of[c] = (int32_t)(order[c] / per_token);
    memset(total, 0, (size_t)(tokens * dim) * sizeof *total);
    for (int64_t e = 0; e < num_experts; e++) {
        int64_t first = offsets[e], count = offsets[e + 1] - first;
        if (count == 0) continue;
        struct rows rows = {.x = x, .dtype = BFLOAT16, .count = count, .stride = x_stride,
                            .index = token_of + first};
        run_expert((enum weight_format)format, &w, e, &rows, both, hidden, y);
        for (int64_t r = 0; r < count; r++)
            accumulate(total + token_of[first + r] * dim, y + r * dim,
                       weights[order[first + r]], dim);
    }
    for (int64_t i = 0; i < tokens * dim; i += LANES)
        store_upto(out, BFLOAT16, i, tokens * dim - i,
                   load_upto(total, FLOAT32, i, tokens * dim - i));
}
