// The functions of rounding.h and decay.h over arrays; n is a multiple of LANES.
#include "decay.h"
#include "rounding.h"

EXPORT void bits(int64_t seed, int64_t position, int64_t layer, int64_t first_element, uint32_t *y,
                 int64_t n) {
    uint32_t key = row_key(seed, position, layer);
    for (int64_t i = 0; i < n; i += LANES) {
        vu random = element_bits(key, (uint32_t)(first_element + i));
        memcpy(y + i, &random, sizeof random);
    }
}

EXPORT void round_given(const float *x, const uint32_t *bits, void *y, int64_t dtype, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        vu random;
        memcpy(&random, bits + i, sizeof random);
        vf value = load(x, FLOAT32, i);
        vh half = dtype == BFLOAT16 ? round_bf16(value, random) : round_fp16(value, random);
        memcpy(at_mut(y, dtype, i), &half, sizeof half);
    }
}

EXPORT void store_first(const float *x, void *y, int64_t dtype, int64_t count, int64_t key,
                        int64_t element) {
    store_state_upto(y, dtype, 0, count, load(x, FLOAT32, 0), true, (uint32_t)key, element);
}

EXPORT void decays(const float *steps, const float *rates, float *y, int64_t is_bounded,
                   int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        vf step = load(steps, FLOAT32, i), rate = load(rates, FLOAT32, i) * LOG2E;
        store(y, FLOAT32, i, is_bounded ? vdecay(step, rate, true) : vdecay(step, rate, false));
    }
}
