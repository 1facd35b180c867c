// Stochastic rounding to 16-bit floats, bit for bit as in rounding.py.
#pragma once

#include "plait.h"

INLINE uint32_t mix(uint32_t h) {
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    return h ^ h >> 16;
}

// What the bits of all elements of a token's state start from.
INLINE uint32_t row_key(int64_t seed, int64_t position, int64_t layer) {
    uint32_t key = mix((uint32_t)seed + 0x9e3779b9u);
    key = mix(key ^ (uint32_t)((uint64_t)seed >> 32));
    key = mix(key ^ (uint32_t)position);
    return mix(key ^ (uint32_t)layer);
}
INLINE vu element_bits(uint32_t key, uint32_t first_element) {
    vu h = ((vu)LANE_NUMBERS + first_element) ^ key;
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    return h ^ h >> 16 ^ mix(key + 0x9e3779b9u);
}

INLINE vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }

// Up or down to a neighbour, with the probability that makes the mean exact. What lies beyond the
// largest finite value, and what is not finite, is rounded to nearest.
INLINE vh round_bf16(vf x, vu bits) {
    vu word = (vu)x, nearest = 0x7fff + (word >> 16 & 1);
    vu is_inside = (vu)(magnitude(x) <= 0x1.fep127f);
    vu rounded = (word + ((is_inside & bits >> 16) | (~is_inside & nearest))) >> 16;
    vu is_number = (vu)(x == x), quiet = word >> 16 | 0x40;
    return __builtin_convertvector((is_number & rounded) | (~is_number & quiet), vh);
}
INLINE vh round_fp16(vf x, vu bits) {
    vf size = magnitude(x);
    vf normal = (vf)(((vu)size + (bits >> 19)) & ~0x1fffu);
    vf steps = size * 0x1p24f + __builtin_convertvector((vi)(bits >> 19), vf) * 0x1p-13f;
    vf subnormal = __builtin_convertvector(__builtin_convertvector(vmin(steps, splat(2048.0f)), vi),
                                           vf) *
                   0x1p-24f;
    vf rounded = choose(size < 0x1p-14f, subnormal, normal);
    rounded = choose(size <= 65504.0f, rounded, size);
    rounded = (vf)((vu)rounded | ((vu)x & 0x80000000u));
    return fp16_of_vf(choose(x == x, rounded, x));
}

// How the state of one token is stored; NULL seeds: to nearest.
struct rounding {
    const int64_t *seeds, *positions;  // by row
    int64_t layer, first_element;
};

// LANES elements of a state, `element` of its slot being the first; key from row_key.
INLINE void store_state(void *state, enum dtype dtype, int64_t index, vf x, bool is_stochastic,
                        uint32_t key, int64_t element) {
    if (dtype == FLOAT32 || !is_stochastic) {
        store(state, dtype, index, x);
        return;
    }
    vu bits = element_bits(key, (uint32_t)element);
    vh half = dtype == BFLOAT16 ? round_bf16(x, bits) : round_fp16(x, bits);
    memcpy(at_mut(state, dtype, index), &half, sizeof half);
}
INLINE void store_state_upto(void *state, enum dtype dtype, int64_t index, int64_t count, vf x,
                             bool is_stochastic, uint32_t key, int64_t element) {
    if (count >= LANES) {
        store_state(state, dtype, index, x, is_stochastic, key, element);
        return;
    }
    uint32_t whole[LANES];  // room for LANES elements of any dtype
    store_state(whole, dtype, 0, x, is_stochastic, key, element);
    memcpy(at_mut(state, dtype, index), whole, (size_t)(count * dtype_bytes(dtype)));
}
