// Vectors of floats as wide as the target's registers, and the memory formats of tensors.
//
// One source serves every instruction set: LANES floats are 16 with AVX-512, 8 with AVX2 and 4
// otherwise, and gcc lowers the vector extensions. Intrinsics stand here alone, each beside its
// portable twin.
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))

#ifndef LANES
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX2__
#define LANES 8
#else
#define LANES 4
#endif
#endif

// As in library.py. Pass it as a constant to inlined functions: every format gets its own code.
enum dtype { FLOAT32, BFLOAT16, FLOAT16 };

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

INLINE int64_t dtype_bytes(enum dtype dtype) { return dtype == FLOAT32 ? 4 : 2; }

// The address of element `index` of a tensor of `dtype`.
INLINE const void *at(const void *base, enum dtype dtype, int64_t index) {
    return (const char *)base + index * dtype_bytes(dtype);
}
INLINE void *at_mut(void *base, enum dtype dtype, int64_t index) {
    return (char *)base + index * dtype_bytes(dtype);
}

INLINE vf splat(float x) { return x - (vf){0}; }

// mask: all bits of a lane set or none, as comparisons of vectors give.
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf vmax(vf a, vf b) { return choose(a > b, a, b); }  // b where a is NaN
INLINE vf vmin(vf a, vf b) { return choose(a < b, a, b); }

INLINE float hsum(vf v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}
INLINE float hmax(vf v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

// ---- 16-bit formats ---------------------------------------------------------------------------

INLINE float bf16_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
// Round to nearest even; NaN stays NaN.
INLINE uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE float fp16_to_float(uint16_t half) {
#ifdef __F16C__
    return _cvtsh_ss(half);
#else
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    float x;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x400) {
        bits = sign | ((rest << 13) + ((127 - 15) << 23));
    } else {
        x = (float)rest * 0x1p-24f;
        memcpy(&bits, &x, 4);
        bits |= sign;
    }
    memcpy(&x, &bits, 4);
    return x;
#endif
}
// Round to nearest even; too large becomes infinite; NaN stays NaN.
INLINE uint16_t float_to_fp16(float x) {
#ifdef __F16C__
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) {  // subnormal: let the addition round at 2^-24
        float magnitude;
        memcpy(&magnitude, &rest, 4);
        magnitude += 0.5f;
        memcpy(&rest, &magnitude, 4);
        return (uint16_t)(sign | (rest - 0x3f000000));
    }
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | (rest - ((127 - 15) << 23)) >> 13);
#endif
}

INLINE float load_one(const void *base, enum dtype dtype, int64_t index) {
    if (dtype == FLOAT32) return ((const float *)base)[index];
    uint16_t half = ((const uint16_t *)base)[index];
    return dtype == BFLOAT16 ? bf16_to_float(half) : fp16_to_float(half);
}
INLINE void store_one(void *base, enum dtype dtype, int64_t index, float x) {
    if (dtype == FLOAT32)
        ((float *)base)[index] = x;
    else
        ((uint16_t *)base)[index] = dtype == BFLOAT16 ? float_to_bf16(x) : float_to_fp16(x);
}

INLINE vf vf_of_bf16(vh half) {
#if defined __AVX512F__ && LANES == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#elif defined __AVX2__ && LANES == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)half), 16);
#else
    return (vf)(__builtin_convertvector(half, vu) << 16);
#endif
}
INLINE vh bf16_of_vf(vf x) {
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu quiet = (bits >> 16) | 0x40;
    vu halves = (vu)choose((vi)(x == x), (vf)rounded, (vf)quiet);
#if defined __AVX512F__ && LANES == 16
    return (vh)_mm512_cvtepi32_epi16((__m512i)halves);
#elif defined __AVX2__ && LANES == 8
    __m256i packed = _mm256_packus_epi32((__m256i)halves, (__m256i)halves);
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
    return __builtin_convertvector(halves, vh);
#endif
}
INLINE vf vf_of_fp16(vh half) {
#if defined __AVX512F__ && LANES == 16
    return (vf)_mm512_cvtph_ps((__m256i)half);
#elif defined __F16C__ && LANES == 8
    return (vf)_mm256_cvtph_ps((__m128i)half);
#else
    vf x;
    for (int i = 0; i < LANES; i++) x[i] = fp16_to_float(half[i]);
    return x;
#endif
}
INLINE vh fp16_of_vf(vf x) {
#if defined __AVX512F__ && LANES == 16
    return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined __F16C__ && LANES == 8
    return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    vh half;
    for (int i = 0; i < LANES; i++) half[i] = float_to_fp16(x[i]);
    return half;
#endif
}

// ---- loads and stores of LANES elements, at any alignment -------------------------------------

INLINE vf load(const void *base, enum dtype dtype, int64_t index) {
    const void *source = at(base, dtype, index);
    if (dtype == FLOAT32) {
        vf x;
        memcpy(&x, source, sizeof x);
        return x;
    }
    vh half;
    memcpy(&half, source, sizeof half);
    return dtype == BFLOAT16 ? vf_of_bf16(half) : vf_of_fp16(half);
}
INLINE void store(void *base, enum dtype dtype, int64_t index, vf x) {
    void *target = at_mut(base, dtype, index);
    if (dtype == FLOAT32) {
        memcpy(target, &x, sizeof x);
        return;
    }
    vh half = dtype == BFLOAT16 ? bf16_of_vf(x) : fp16_of_vf(x);
    memcpy(target, &half, sizeof half);
}
// The first `count` < LANES elements; the other lanes are 0 and their memory is not touched.
INLINE vf load_some(const void *base, enum dtype dtype, int64_t index, int64_t count) {
    vf x = {0};
    for (int64_t i = 0; i < count; i++) x[i] = load_one(base, dtype, index + i);
    return x;
}
INLINE void store_some(void *base, enum dtype dtype, int64_t index, int64_t count, vf x) {
    for (int64_t i = 0; i < count; i++) store_one(base, dtype, index + i, x[i]);
}
// `count` elements, at most LANES.
INLINE vf load_upto(const void *base, enum dtype dtype, int64_t index, int64_t count) {
    return count >= LANES ? load(base, dtype, index) : load_some(base, dtype, index, count);
}
INLINE void store_upto(void *base, enum dtype dtype, int64_t index, int64_t count, vf x) {
    if (count >= LANES)
        store(base, dtype, index, x);
    else
        store_some(base, dtype, index, count, x);
}

// ---- functions --------------------------------------------------------------------------------

// e^x within 2 units in the last place; 0 below the normal range, infinite above, NaN for NaN.
INLINE vf vexp(vf x) {
    const float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const float magic = 0x1.8p23f;  // adding it rounds to an integer, kept in the low bits
    vf inside = vmin(vmax(x, splat(-87.4f)), splat(88.8f));
    vf shifted = inside * log2e + magic;
    vf n = shifted - magic;
    vf r = inside - n * ln2_high - n * ln2_low;  // |r| <= ln 2 / 2
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    // Twice by half the exponent: 2^n alone would not be a float at both ends.
    vi exponent = (vi)shifted - (int32_t)0x4b400000;
    vi half = exponent >> 1;
    vf scaled = p * (vf)((half + 127) << 23) * (vf)((exponent - half + 127) << 23);
    scaled = choose(x < -87.4f, (vf){0}, scaled);
    scaled = choose(x > 88.72284f, splat(INFINITY), scaled);
    return choose(x == x, scaled, x);
}
INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }
INLINE vf silu(vf x) { return x * sigmoid(x); }
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

INLINE void prefetch(const void *address) { __builtin_prefetch(address, 0, 3); }

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|, and log(1 + u) is twice the inverse
// hyperbolic tangent of u / (2 + u).
INLINE vf vsoftplus(vf x) {
    vf u = vexp(choose(x > 0.0f, -x, x));
    vf t = u / (u + 2.0f), square = t * t;
    vf p = splat(1.0f / 13);
    p = p * square + 1.0f / 11;
    p = p * square + 1.0f / 9;
    p = p * square + 1.0f / 7;
    p = p * square + 1.0f / 5;
    p = p * square + 1.0f / 3;
    return choose(x > 0.0f, x, (vf){0}) + 2.0f * t * (square * p + 1.0f);
}

// ---- squares of LANES vectors -----------------------------------------------------------------

#if LANES == 16
#define LANE_NUMBERS ((vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif LANES == 8
#define LANE_NUMBERS ((vi){0, 1, 2, 3, 4, 5, 6, 7})
#else
#define LANE_NUMBERS ((vi){0, 1, 2, 3})
#endif

// Swaps, in every block of 2 distance rows and lanes, the upper right and the lower left quarter.
INLINE void swap_quarters(vf square[LANES], int distance) {
    vi is_right = (LANE_NUMBERS & distance) != 0;  // -1 or 0
    vi upper = LANE_NUMBERS + (is_right & (LANES - distance)), lower = upper + distance;
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++)
        if ((r & distance) == 0) {
            vf a = square[r], b = square[r + distance];
            square[r] = __builtin_shuffle(a, b, upper);
            square[r + distance] = __builtin_shuffle(a, b, lower);
        }
}
INLINE void transpose(vf square[LANES]) {
    if (LANES > 8) swap_quarters(square, 8);
    if (LANES > 4) swap_quarters(square, 4);
    swap_quarters(square, 2);
    swap_quarters(square, 1);
}

// ---- limits -----------------------------------------------------------------------------------

// x no less than `least` and no greater than `greatest`; NaN stays NaN.
INLINE vf vclamp(vf x, vf least, vf greatest) {
#if defined __AVX512F__ && LANES == 16
    return (vf)_mm512_min_ps((__m512)greatest, _mm512_max_ps((__m512)least, (__m512)x));
#elif defined __AVX2__ && LANES == 8
    return (vf)_mm256_min_ps((__m256)greatest, _mm256_max_ps((__m256)least, (__m256)x));
#else
    return vmin(greatest, vmax(least, x));
#endif
}
