// rms_norm and add_rms_norm; arguments as in op.py. Threads share out the tokens.
//
// D model dim. A token is read twice, the second time from the nearest cache.
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

INLINE float inverse_rms_of(const void *x, enum dtype dtype, int64_t dim, float eps) {
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

INLINE void scale_part(const void *x, enum dtype dtype, float inverse, const void *weight,
                       enum dtype weight_dtype, void *y, int64_t d, int64_t count) {
    vf normalised = rounded(load_upto(x, dtype, d, count) * inverse, dtype);
    store_upto(y, dtype, d, count, normalised * load_upto(weight, weight_dtype, d, count));
}

// y = x inverse weight for one token; y may be x.
INLINE void scale_token(const void *x, enum dtype dtype, float inverse, const void *weight,
                        enum dtype weight_dtype, void *y, int64_t dim) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
        scale_part(x, dtype, inverse, weight, weight_dtype, y, d, LANES);
    if (d < dim) scale_part(x, dtype, inverse, weight, weight_dtype, y, d, dim - d);
}

// Adds to the residual and returns the squares of what the norm sees of it, which `seen` keeps
// unless the residual itself does.
INLINE vf add_part(void *residual, enum dtype residual_dtype, const void *branch,
                   enum dtype dtype, float scale, void *seen, int64_t d, int64_t count) {
    vf sum = load_upto(residual, residual_dtype, d, count) +
             scale * load_upto(branch, dtype, d, count);
    store_upto(residual, residual_dtype, d, count, sum);
    vf value = rounded(rounded(sum, residual_dtype), dtype);
    if (residual_dtype != dtype) store_upto(seen, dtype, d, count, value);
    return value * value;
}

// residual += scale branch for one token; returns the inverse root mean square of the sum.
INLINE float add_token(void *residual, enum dtype residual_dtype, const void *branch,
                       enum dtype dtype, float scale, void *seen, int64_t dim, float eps) {
    vf squares[CHAINS] = {{0}};
    int64_t d = 0;
    for (; d + CHAINS * LANES <= dim; d += CHAINS * LANES)
        for (int i = 0; i < CHAINS; i++)
            squares[i] += add_part(residual, residual_dtype, branch, dtype, scale, seen,
                                   d + i * LANES, LANES);
    for (; d < dim; d += LANES)
        squares[0] += add_part(residual, residual_dtype, branch, dtype, scale, seen, d,
                               min64(LANES, dim - d));
    return inverse_rms(squares, dim, eps);
}

// RUN with the constants X and WEIGHT; the weight is of the dtype of x or float32.
#define WITH(X_DTYPE, WEIGHT_DTYPE, RUN)                                                           \
    {                                                                                              \
        const enum dtype X = X_DTYPE, WEIGHT = WEIGHT_DTYPE;                                       \
        RUN;                                                                                       \
    }
#define FOR_DTYPES(x_dtype, weight_dtype, RUN)                                                     \
    if (x_dtype == FLOAT32) WITH(FLOAT32, FLOAT32, RUN)                                            \
    else if (x_dtype == BFLOAT16 && weight_dtype == BFLOAT16) WITH(BFLOAT16, BFLOAT16, RUN)        \
    else if (x_dtype == BFLOAT16) WITH(BFLOAT16, FLOAT32, RUN)                                     \
    else if (weight_dtype == FLOAT16) WITH(FLOAT16, FLOAT16, RUN)                                  \
    else WITH(FLOAT16, FLOAT32, RUN)

EXPORT void rms_norm(const void *x, int64_t dtype, int64_t x_stride, const void *weight,
                     int64_t weight_dtype, void *y, int64_t tokens, int64_t dim, float eps) {
#pragma omp parallel for schedule(static) if (tokens * dim > PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < tokens; t++)
        FOR_DTYPES(dtype, weight_dtype, {
            const void *token = at(x, X, t * x_stride);
            float inverse = inverse_rms_of(token, X, dim, eps);
            scale_token(token, X, inverse, weight, WEIGHT, at_mut(y, X, t * dim), dim);
        })
}

// The residual is of the dtype of the branch or float32.
EXPORT void add_rms_norm(const void *branch, int64_t dtype, int64_t branch_stride, void *residual,
                         int64_t residual_dtype, int64_t residual_stride, const void *weight,
                         int64_t weight_dtype, void *y, int64_t tokens, int64_t dim, float eps,
                         float scale) {
#pragma omp parallel for schedule(static) if (tokens * dim > PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < tokens; t++)
        FOR_DTYPES(dtype, weight_dtype, {
            const void *added = at(branch, X, t * branch_stride);
            void *sum = at_mut(residual, (enum dtype)residual_dtype, t * residual_stride);
            void *out = at_mut(y, X, t * dim);
            if (residual_dtype == X) {
                float inverse = add_token(sum, X, added, X, scale, out, dim, eps);
                scale_token(sum, X, inverse, weight, WEIGHT, out, dim);
            } else {
                float inverse = add_token(sum, FLOAT32, added, X, scale, out, dim, eps);
                scale_token(out, X, inverse, weight, WEIGHT, out, dim);
            }
        })
}
