// rms_norm and add_rms_norm; arguments as in op.py. Threads share out the tokens.
//
// A token is read twice, the second time from the nearest cache.
#include "plait.h"

// Below this number of elements threads cost more than they save.
#define PARALLEL_ELEMENTS (1 << 16)
// Sums that run side by side, for one chain of additions would wait for itself.
#define CHAINS 4

// What a store to `dtype` and a load from it leave of x.
INLINE vf rounded(vf x, enum dtype dtype) {
    if (dtype == FLOAT16) return vf_of_fp16(fp16_of_vf(x));
    if (dtype == FLOAT32) return x;
    vu bits = (vu)x;
    vu nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return choose(x == x, (vf)nearest, x);
}

INLINE float inverse_rms(const vf squares[CHAINS], int64_t dim, float eps) {
    vf sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    return 1.0f / sqrtf(hsum(sum) / (float)dim + eps);
}

// ---- first pass: the sum of squares -----------------------------------------------------------

INLINE float measure_as(const void *x, enum dtype dtype, int64_t dim, float eps) {
    vf squares[CHAINS] = {{0}};
    int64_t d = 0;
    for (; d + CHAINS * LANES <= dim; d += CHAINS * LANES)
        for (int i = 0; i < CHAINS; i++) {
            vf value = load(x, dtype, d + i * LANES);
            squares[i] += value * value;
        }
    for (; d < dim; d += LANES) {
        vf value = load_upto(x, dtype, d, dim - d);
        squares[0] += value * value;
    }
    return inverse_rms(squares, dim, eps);
}

// The inverse root mean square of a token.
static float measure(const void *x, enum dtype dtype, int64_t dim, float eps) {
    switch (dtype) {
    case FLOAT32: return measure_as(x, FLOAT32, dim, eps);
    case BFLOAT16: return measure_as(x, BFLOAT16, dim, eps);
    default: return measure_as(x, FLOAT16, dim, eps);
    }
}

// Adds to the residual and returns the squares of what the norm sees of it; `seen` keeps that
// unless the residual itself does.
INLINE vf add_vector(void *residual, enum dtype residual_dtype, const void *branch,
                     enum dtype dtype, float scale, void *seen, int64_t d, int64_t count) {
    vf sum = load_upto(residual, residual_dtype, d, count) +
             scale * load_upto(branch, dtype, d, count);
    store_upto(residual, residual_dtype, d, count, sum);
    vf value = rounded(rounded(sum, residual_dtype), dtype);
    if (residual_dtype != dtype) store_upto(seen, dtype, d, count, value);
    return value * value;
}

INLINE float add_as(void *residual, enum dtype residual_dtype, const void *branch,
                    enum dtype dtype, float scale, void *seen, int64_t dim, float eps) {
    vf squares[CHAINS] = {{0}};
    int64_t d = 0;
    for (; d + CHAINS * LANES <= dim; d += CHAINS * LANES)
        for (int i = 0; i < CHAINS; i++)
            squares[i] += add_vector(residual, residual_dtype, branch, dtype, scale, seen,
                                     d + i * LANES, LANES);
    for (; d < dim; d += LANES)
        squares[0] += add_vector(residual, residual_dtype, branch, dtype, scale, seen, d,
                                 min64(LANES, dim - d));
    return inverse_rms(squares, dim, eps);
}

// residual += scale branch for a token; returns the inverse root mean square of the sum. The
// residual is of the dtype of the branch or float32.
static float add(void *residual, enum dtype residual_dtype, const void *branch, enum dtype dtype,
                 float scale, void *seen, int64_t dim, float eps) {
    bool is_wide = residual_dtype == FLOAT32;
    switch (dtype) {
    case FLOAT32: return add_as(residual, FLOAT32, branch, FLOAT32, scale, seen, dim, eps);
    case BFLOAT16:
        return is_wide ? add_as(residual, FLOAT32, branch, BFLOAT16, scale, seen, dim, eps)
                       : add_as(residual, BFLOAT16, branch, BFLOAT16, scale, seen, dim, eps);
    default:
        return is_wide ? add_as(residual, FLOAT32, branch, FLOAT16, scale, seen, dim, eps)
                       : add_as(residual, FLOAT16, branch, FLOAT16, scale, seen, dim, eps);
    }
}

// ---- second pass: the product -----------------------------------------------------------------

INLINE void scale_vector(const void *x, enum dtype dtype, float inverse, const void *weight,
                         enum dtype weight_dtype, void *y, int64_t d, int64_t count) {
    vf normalised = rounded(load_upto(x, dtype, d, count) * inverse, dtype);
    store_upto(y, dtype, d, count, normalised * load_upto(weight, weight_dtype, d, count));
}

INLINE void scale_as(const void *x, enum dtype dtype, float inverse, const void *weight,
                     enum dtype weight_dtype, void *y, int64_t dim) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
        scale_vector(x, dtype, inverse, weight, weight_dtype, y, d, LANES);
    if (d < dim) scale_vector(x, dtype, inverse, weight, weight_dtype, y, d, dim - d);
}

// y = x inverse weight for a token; y may be x. The weight is of the dtype of x or float32.
static void scale_token(const void *x, enum dtype dtype, float inverse, const void *weight,
                        enum dtype weight_dtype, void *y, int64_t dim) {
    bool is_wide = weight_dtype == FLOAT32;
    if (dtype == FLOAT32)
        scale_as(x, FLOAT32, inverse, weight, FLOAT32, y, dim);
    else if (dtype == BFLOAT16 && is_wide)
        scale_as(x, BFLOAT16, inverse, weight, FLOAT32, y, dim);
    else if (dtype == BFLOAT16)
        scale_as(x, BFLOAT16, inverse, weight, BFLOAT16, y, dim);
    else if (is_wide)
        scale_as(x, FLOAT16, inverse, weight, FLOAT32, y, dim);
    else
        scale_as(x, FLOAT16, inverse, weight, FLOAT16, y, dim);
}

// ---- all tokens -------------------------------------------------------------------------------

EXPORT void rms_norm(const void *x, int64_t dtype, int64_t x_stride, const void *weight,
                     int64_t weight_dtype, void *y, int64_t tokens, int64_t dim, float eps) {
#pragma omp parallel for schedule(static) if (tokens * dim > PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < tokens; t++) {
        const void *token = at(x, dtype, t * x_stride);
        float inverse = measure(token, dtype, dim, eps);
        scale_token(token, dtype, inverse, weight, weight_dtype, at_mut(y, dtype, t * dim), dim);
    }
}

EXPORT void add_rms_norm(const void *branch, int64_t dtype, int64_t branch_stride, void *residual,
                         int64_t residual_dtype, int64_t residual_stride, const void *weight,
                         int64_t weight_dtype, void *y, int64_t tokens, int64_t dim, float eps,
                         float scale) {
#pragma omp parallel for schedule(static) if (tokens * dim > PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < tokens; t++) {
        void *sum = at_mut(residual, residual_dtype, t * residual_stride);
        void *out = at_mut(y, dtype, t * dim);
        float inverse = add(sum, residual_dtype, at(branch, dtype, t * branch_stride), dtype,
                            scale, out, dim, eps);
        const void *seen = residual_dtype == dtype ? sum : out;
        scale_token(seen, dtype, inverse, weight, weight_dtype, out, dim);
    }
}
