// The decay of a state whose elements have a rate each: one exponential per element and token, which
// is most of what such a recurrence computes.
#pragma once

#include "plait.h"

#define LOG2E 1.44269504f
// For a step and a rate whose product is no larger, in size, `is_bounded` may be true.
#define DECAY_BOUND 126.0f

// 2^(step * rate) within 1 unit in the last place. Exactly 1 for 0, 0 below 2^-127, infinite above
// 2^128, NaN for NaN; the same bits whatever `is_bounded` is.
INLINE vf vdecay(vf step, vf rate, bool is_bounded) {
    const float magic = 0x1.8p23f + 127.0f;  // adding it leaves a biased exponent in the low bits
    vf shifted = step * rate + magic, n = shifted - magic;
    vf r = step * rate - n;  // |r| <= 1/2
    vf p = splat(1.5353362e-4f);
    p = p * r + 1.33988750e-3f;
    p = p * r + 9.61843692e-3f;
    p = p * r + 5.55033237e-2f;
    p = p * r + 2.40226477e-1f;
    p = p * r + 6.93147182e-1f;
    p = p * r + 1.0f;
    vf decay = p * (vf)((vi)shifted << 23);
    if (is_bounded) return decay;
    // Of n, not of the product: that one has to stay inside of a fused operation here as well.
    decay = choose(n < -127.0f, (vf){0}, decay);
    return choose(n > 128.0f, splat(INFINITY), decay);
}
