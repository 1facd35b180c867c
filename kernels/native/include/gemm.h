// Products with weights packed once: bfloat16, or int8 with a scale per output.
//
// M rows of x, K inputs, O outputs. A packed weight is a run of panels of TILE_COLUMNS outputs, the
// last one padded with zeros. A panel holds, for every pair of inputs, the pair of each output:
// [panel][ceil(K / 2)][TILE_COLUMNS][2]. A single row streams the panels from memory from end to
// end; many rows find a panel in the nearest cache. Each sum runs over the inputs in order, whatever
// the number of rows: a row does not depend on the batch that it came in.
#pragma once

#include <stdlib.h>

#include "tile.h"

INLINE int64_t num_panels(int64_t outputs) { return (outputs + TILE_COLUMNS - 1) / TILE_COLUMNS; }
INLINE int64_t num_pairs(int64_t inputs) { return (inputs + 1) / 2; }
INLINE int64_t panel_elements(int64_t inputs) { return num_pairs(inputs) * TILE_COLUMNS * 2; }

// Bytes ahead of a weight stream: far enough to hide memory, near enough to stay in the L1 cache.
#define AHEAD_BYTES 2048
// Bytes of the rows of x that meet one panel after the other: most of an L2 cache.
#define BLOCK_BYTES (384 << 10)
#define MAX_BLOCK_ROWS 96

// Memory of the calling thread, kept for its next call; the contents are undefined.
__attribute__((unused)) static void *scratch(int64_t bytes) {
    static _Thread_local void *memory;
    static _Thread_local int64_t size;
    if (bytes > size) {
        free(memory);
        size = (bytes + 4095) & ~(int64_t)4095;
        memory = aligned_alloc(4096, (size_t)size);
        if (memory == NULL) abort();
    }
    return memory;
}

// Where sums go: out[row][column] = row_scale * scale * sum + bias.
struct epilogue {
    void *out;
    enum dtype dtype;
    int64_t stride;           // elements between rows of out
    int64_t outputs;          // columns of out
    const float *scale;       // by column, NULL: 1
    const float *bias;        // by column, NULL: 0
};

INLINE void finish_as(const struct epilogue *e, enum dtype dtype, int64_t row, int64_t column,
                      int rows, const float *row_scale, vf sums[TILE_ROWS][TILE_VECTORS]) {
    for (int v = 0; v < TILE_VECTORS; v++) {
        int64_t first = column + v * LANES, count = e->outputs - first;
        if (count <= 0) return;
        vf scale = e->scale ? load_upto(e->scale, FLOAT32, first, count) : splat(1.0f);
        vf bias = e->bias ? load_upto(e->bias, FLOAT32, first, count) : (vf){0};
        for (int r = 0; r < rows; r++) {
            vf factor = row_scale ? scale * row_scale[r] : scale;
            store_upto(e->out, dtype, (row + r) * e->stride + first, count,
                       sums[r][v] * factor + bias);
        }
    }
}
INLINE void finish(const struct epilogue *e, int64_t row, int64_t column, int rows,
                   const float *row_scale, vf sums[TILE_ROWS][TILE_VECTORS]) {
    if (e->dtype == BFLOAT16)
        finish_as(e, BFLOAT16, row, column, rows, row_scale, sums);
    else if (e->dtype == FLOAT16)
        finish_as(e, FLOAT16, row, column, rows, row_scale, sums);
    else
        finish_as(e, FLOAT32, row, column, rows, row_scale, sums);
}

// Rows of x that share a panel before the next panel is read.
INLINE int64_t rows_of_block(int64_t row_bytes) {
    return max64(TILE_ROWS, min64(BLOCK_BYTES / row_bytes, MAX_BLOCK_ROWS));
}
// Rows of the next tile when `left` are to do: tiles of a block differ by one row at most.
INLINE int64_t rows_of_tile(int64_t left) {
    int64_t tiles = (left + TILE_ROWS - 1) / TILE_ROWS;
    return (left + tiles - 1) / tiles;
}

// ---- bfloat16 weights -------------------------------------------------------------------------

#if defined __AVX512BF16__ || defined BF16_PAIRS

// The CPU multiplies pairs of bfloat16 itself.
typedef uint16_t operand;
#define OPERAND BFLOAT16

INLINE vf add_pairs(vf sums, vu a, vu b) {
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    return sums + (vf)(a << 16) * (vf)(b << 16) +
           (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
#endif
}

INLINE void multiply_bf16(vf sums[TILE_ROWS][TILE_VECTORS], int rows, const operand *x,
                          int64_t x_stride, const uint16_t *panel, int64_t pairs) {
    for (int64_t k = 0; k < pairs; k++) {
        const uint16_t *w = panel + k * TILE_COLUMNS * 2;
        vu columns[TILE_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) {
            memcpy(&columns[v], w + v * LANES * 2, sizeof columns[v]);
            prefetch((const char *)(w + v * LANES * 2) + AHEAD_BYTES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, x + r * x_stride + 2 * k, 4);
#pragma GCC unroll 8
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[r][v] = add_pairs(sums[r][v], pair - (vu){0}, columns[v]);
        }
    }
}

#else

// Floats are multiplied: x is widened once per block, weights on their way to the registers.
typedef float operand;
#define OPERAND FLOAT32

INLINE void multiply_bf16(vf sums[TILE_ROWS][TILE_VECTORS], int rows, const operand *x,
                          int64_t x_stride, const uint16_t *panel, int64_t pairs) {
    for (int64_t k = 0; k < pairs; k++) {
        const uint16_t *w = panel + k * TILE_COLUMNS * 2;
        vf even[TILE_VECTORS], odd[TILE_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) {
            vu both;
            memcpy(&both, w + v * LANES * 2, sizeof both);
            if (v * LANES % 16 == 0) prefetch((const char *)(w + v * LANES * 2) + AHEAD_BYTES);
            even[v] = (vf)(both << 16);
            odd[v] = (vf)(both & 0xffff0000u);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf first = splat(x[r * x_stride + 2 * k]);
            vf second = splat(x[r * x_stride + 2 * k + 1]);
#pragma GCC unroll 8
            for (int v = 0; v < TILE_VECTORS; v++) {
                sums[r][v] += first * even[v];
                sums[r][v] += second * odd[v];
            }
        }
    }
}

#endif

// One row of x in the format of the products, its last pair filled up with 0.
INLINE void prepare_bf16(const void *x, enum dtype dtype, int64_t inputs, operand *row) {
    for (int64_t k = 0; k < inputs; k += LANES)
        store_upto(row, OPERAND, k, inputs - k, load_upto(x, dtype, k, inputs - k));
    if (inputs % 2) row[inputs] = 0;
}

// ---- int8 weights -----------------------------------------------------------------------------

// A row of x becomes integers as large as sums over the inputs allow in 32 bits: 13 bits and a sign
// up to 2064 inputs. Products are exact; what x loses is below what bfloat16 lost before.
INLINE float largest_integer(int64_t inputs) {
    return (float)max64(1, min64(8191, INT32_MAX / 127 / max64(inputs, 1)));
}

// Returns the scale of the row; NaN if x is not finite, so that the output is not either.
INLINE float prepare_int8(const void *x, enum dtype dtype, int64_t inputs, int16_t *row) {
    vf largest = {0}, not_finite = {0};
    for (int64_t k = 0; k < inputs; k += LANES) {
        vf value = load_upto(x, dtype, k, inputs - k);
        largest = vmax(vmax(value, -value), largest);
        not_finite += value * 0.0f;
    }
    float most = hmax(largest), limit = largest_integer(inputs);
    float factor = most > 0.0f ? limit / most : 0.0f;
    if (factor > 3e38f) factor = 3e38f;
    for (int64_t k = 0; k < inputs; k += LANES) {
        vf value = load_upto(x, dtype, k, inputs - k) * factor;
        float lanes[LANES];
        memcpy(lanes, &value, sizeof value);
        for (int64_t i = 0; i < min64(LANES, inputs - k); i++)
            row[k + i] = (int16_t)lrintf(lanes[i]);
    }
    if (inputs % 2) row[inputs] = 0;
    return factor > 0.0f ? 1.0f / factor + hsum(not_finite) : hsum(not_finite);
}

// The pairs of LANES columns, widened to 16 bits.
INLINE vi widen_int8(const int8_t *w) {
#if defined __AVX512BW__ && LANES == 16
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w));
#elif defined __AVX2__ && LANES == 8
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
#else
    int8_t narrow __attribute__((vector_size(2 * LANES)));
    int16_t wide __attribute__((vector_size(4 * LANES)));
    memcpy(&narrow, w, sizeof narrow);
    wide = __builtin_convertvector(narrow, __typeof__(wide));
    return (vi)wide;
#endif
}
INLINE vi add_int_pairs(vi sums, vi a, vi b) {
#if defined __AVX512VNNI__ && LANES == 16
    return (vi)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined __AVX512BW__ && LANES == 16
    return sums + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined __AVX2__ && LANES == 8
    return sums + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

INLINE void multiply_int8(vf sums[TILE_ROWS][TILE_VECTORS], int rows, const int16_t *x,
                          int64_t x_stride, const int8_t *panel, int64_t pairs) {
    vi totals[TILE_ROWS][TILE_VECTORS] = {{{0}}};
    for (int64_t k = 0; k < pairs; k++) {
        const int8_t *w = panel + k * TILE_COLUMNS * 2;
        vi columns[TILE_VECTORS];
        prefetch((const char *)w + AHEAD_BYTES);
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) columns[v] = widen_int8(w + v * LANES * 2);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * x_stride + 2 * k, 4);
#pragma GCC unroll 8
            for (int v = 0; v < TILE_VECTORS; v++)
                totals[r][v] = add_int_pairs(totals[r][v], pair - (vi){0}, columns[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < TILE_VECTORS; v++)
            sums[r][v] = __builtin_convertvector(totals[r][v], vf);
}

// ---- the product ------------------------------------------------------------------------------

enum weight_format { WEIGHT_BF16, WEIGHT_INT8 };

// Rows of x that are worth a panel each: `rows` numbers them, NULL: 0, 1, 2 ...
struct rows {
    const void *x;
    enum dtype dtype;
    int64_t count, stride;
    const int32_t *index;
};

// out = x w for the packed weight `panels`; format must be a constant.
INLINE void gemm(enum weight_format format, const struct rows *x, int64_t inputs,
                 const void *panels, const struct epilogue *e) {
    int64_t pairs = num_pairs(inputs), length = 2 * pairs;
    int64_t operand_bytes = format == WEIGHT_BF16 ? (int64_t)sizeof(operand) : 2;
    int64_t weight_bytes = format == WEIGHT_BF16 ? 2 : 1;
    int64_t block = min64(x->count, rows_of_block(length * operand_bytes));
    char *prepared = scratch(block * (length * operand_bytes + 4));
    float *scales = (float *)(prepared + block * length * operand_bytes);
    for (int64_t first = 0; first < x->count; first += block) {
        int64_t count = min64(block, x->count - first);
        for (int64_t r = 0; r < count; r++) {
            int64_t source = x->index ? x->index[first + r] : first + r;
            const void *row = at(x->x, x->dtype, source * x->stride);
            void *target = prepared + r * length * operand_bytes;
            if (format == WEIGHT_BF16)
                prepare_bf16(row, x->dtype, inputs, target);
            else
                scales[r] = prepare_int8(row, x->dtype, inputs, target);
        }
#pragma omp parallel for schedule(static) if (inputs * e->outputs > 1 << 16)
        for (int64_t p = 0; p < num_panels(e->outputs); p++) {
            const char *panel = (const char *)panels + p * panel_elements(inputs) * weight_bytes;
            for (int64_t row = 0; row < count;) {
                int64_t rows = rows_of_tile(count - row);
                FOR_ROWS(rows, {
                    vf sums[TILE_ROWS][TILE_VECTORS] = {{{0}}};
                    const char *operands = prepared + row * length * operand_bytes;
                    if (format == WEIGHT_BF16)
                        multiply_bf16(sums, ROWS, (const operand *)operands, length,
                                      (const uint16_t *)panel, pairs);
                    else
                        multiply_int8(sums, ROWS, (const int16_t *)operands, length,
                                      (const int8_t *)panel, pairs);
                    finish(e, first + row, p * TILE_COLUMNS, ROWS,
                           format == WEIGHT_INT8 ? scales + row : NULL, sums);
                })
                row += rows;
            }
        }
    }
}
