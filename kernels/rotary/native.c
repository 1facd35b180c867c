// rotary; arguments as in op.py. Threads share out the tokens.
//
// T packed tokens, H heads, D attention head dim, R2 half of the dims that turn.
//
// Products are rounded before they are added, as in every torch program: float32 results are equal
// to theirs to the last bit.
#pragma GCC optimize("fp-contract=off")
#include "plait.h"

// Below this number of elements threads cost more than they save.
#define PARALLEL_ELEMENTS (1 << 15)

INLINE void turn_part(const void *x, enum dtype dtype, const float *cos, const float *sin,
                      int64_t half, int64_t i, int64_t count, void *out) {
    vf first = load_upto(x, dtype, i, count), second = load_upto(x, dtype, half + i, count);
    vf c = load_upto(cos, FLOAT32, i, count), s = load_upto(sin, FLOAT32, i, count);
    store_upto(out, dtype, i, count, first * c - second * s);
    store_upto(out, dtype, half + i, count, second * c + first * s);
}

INLINE void turn_head(const void *x, enum dtype dtype, const float *cos, const float *sin,
                      int64_t half, int64_t dim, void *out) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) turn_part(x, dtype, cos, sin, half, i, LANES, out);
    if (i < half) turn_part(x, dtype, cos, sin, half, i, half - i, out);
    memcpy(at_mut(out, dtype, 2 * half), at(x, dtype, 2 * half),
           (size_t)((dim - 2 * half) * dtype_bytes(dtype)));
}

EXPORT void rotary(const void *x, int64_t x_dtype, int64_t x_token, int64_t x_head,
                   const float *cos, int64_t cos_token, const float *sin, int64_t sin_token,
                   void *out, int64_t tokens, int64_t heads, int64_t dim, int64_t half) {
    enum dtype dtype = (enum dtype)x_dtype;
#pragma omp parallel for schedule(static) if (tokens * heads * dim > PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const void *head = at(x, dtype, t * x_token + h * x_head);
            const float *c = cos + t * cos_token, *s = sin + t * sin_token;
            void *turned = at_mut(out, dtype, (t * heads + h) * dim);
            switch (dtype) {
            case FLOAT32: turn_head(head, FLOAT32, c, s, half, dim, turned); break;
            case BFLOAT16: turn_head(head, BFLOAT16, c, s, half, dim, turned); break;
            case FLOAT16: turn_head(head, FLOAT16, c, s, half, dim, turned); break;
            }
        }
}
