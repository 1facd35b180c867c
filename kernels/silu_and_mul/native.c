// silu_and_mul; arguments as in op.py. Threads share out parts of tokens.
//
// I intermediate dim.
#include "plait.h"

// Channels of a part.
#define PART 2048
// Below this number of elements threads cost more than they save.
#define PARALLEL_ELEMENTS (1 << 14)

INLINE void gate_vector(const void *gate, const void *up, enum dtype dtype, float multiplier,
                        void *out, int64_t i, int64_t count) {
    vf gated = silu(multiplier * load_upto(gate, dtype, i, count));
    store_upto(out, dtype, i, count, gated * load_upto(up, dtype, i, count));
}

// out = silu(multiplier gate) up for `count` channels.
INLINE void gate_channels(const void *gate, const void *up, enum dtype dtype, float multiplier,
                          void *out, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) gate_vector(gate, up, dtype, multiplier, out, i, LANES);
    if (i < count) gate_vector(gate, up, dtype, multiplier, out, i, count - i);
}

EXPORT void silu_and_mul(const void *x, int64_t x_dtype, int64_t x_stride, float multiplier,
                         void *out, int64_t tokens, int64_t dim) {
    enum dtype dtype = (enum dtype)x_dtype;
#pragma omp parallel for collapse(2) schedule(static) if (tokens * dim > PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t first = 0; first < dim; first += PART) {
            const void *gate = at(x, dtype, t * x_stride + first), *up = at(gate, dtype, dim);
            void *y = at_mut(out, dtype, t * dim + first);
            int64_t count = min64(PART, dim - first);
            switch (dtype) {
            case FLOAT32: gate_channels(gate, up, FLOAT32, multiplier, y, count); break;
            case BFLOAT16: gate_channels(gate, up, BFLOAT16, multiplier, y, count); break;
            case FLOAT16: gate_channels(gate, up, FLOAT16, multiplier, y, count); break;
            }
        }
}
