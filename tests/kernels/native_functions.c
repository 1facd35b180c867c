// The functions of plait.h over arrays, for test_native.py; n is a multiple of LANES.
#include "plait.h"

EXPORT int64_t lanes(void) { return LANES; }

#define OVER_ARRAYS(NAME, FUNCTION)                                                                \
    EXPORT void NAME(const float *x, float *y, int64_t n) {                                        \
        for (int64_t i = 0; i < n; i += LANES) store(y, FLOAT32, i, FUNCTION(load(x, FLOAT32, i))); \
    }
OVER_ARRAYS(exponentials, vexp)
OVER_ARRAYS(sigmoids, sigmoid)
OVER_ARRAYS(silus, silu)
OVER_ARRAYS(vector_softplus, vsoftplus)

EXPORT void scalar_softplus(const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = softplus(x[i]);
}

EXPORT void convert(const void *x, int64_t from, void *y, int64_t to, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(y, to, i, load(x, from, i));
}
EXPORT void convert_ones(const void *x, int64_t from, void *y, int64_t to, int64_t n) {
    for (int64_t i = 0; i < n; i++) store_one(y, to, i, load_one(x, from, i));
}
// The first `count` elements, at most LANES; the other lanes of `loaded` show what was loaded.
EXPORT void convert_some(const void *x, int64_t from, float *loaded, void *y, int64_t to,
                         int64_t count) {
    vf some = load_upto(x, from, 0, count);
    store(loaded, FLOAT32, 0, some);
    store_upto(y, to, 0, count, some);
}

EXPORT void reduce(const float *x, const float *y, float *sum, float *largest, float *larger,
                   float *smaller) {
    vf a = load(x, FLOAT32, 0), b = load(y, FLOAT32, 0);
    *sum = hsum(a);
    *largest = hmax(a);
    store(larger, FLOAT32, 0, vmax(a, b));
    store(smaller, FLOAT32, 0, vmin(a, b));
}

EXPORT void transposed(const float *x, float *y) {
    vf square[LANES];
    for (int r = 0; r < LANES; r++) square[r] = load(x, FLOAT32, r * LANES);
    transpose(square);
    for (int r = 0; r < LANES; r++) store(y, FLOAT32, r * LANES, square[r]);
}
