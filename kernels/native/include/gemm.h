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

// Sums of some rows, at most TILE_ROWS, or of fewer rows with several panels.
typedef vf tile[TILE_ROWS][TILE_VECTORS];

// Which bytes of the weights to fetch while a tile is multiplied, so that none is waited for: those
// from `next` on, as many as one pair of inputs has, after every `period` pairs.
struct stream {
    const char *next;
    int64_t period;
};

INLINE void fetch(const char *bytes, int count) {
#pragma GCC unroll 8
    for (int i = 0; i < count; i += 64) prefetch(bytes + i);
}

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
                      int rows, const float *row_scale, tile sums) {
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
                   const float *row_scale, tile sums) {
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

INLINE void add_products(tile sums, int rows, const operand *x, int64_t x_stride,
                         const uint16_t *w) {
    vu columns[TILE_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECTORS; v++) memcpy(&columns[v], w + v * LANES * 2, sizeof columns[v]);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        uint32_t pair;
        memcpy(&pair, x + r * x_stride, 4);
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++)
            sums[r][v] = add_pairs(sums[r][v], pair - (vu){0}, columns[v]);
    }
}

#else

// Floats are multiplied: x is widened once per block, weights on their way to the registers.
typedef float operand;
#define OPERAND FLOAT32

// First the even inputs, then the odd ones: both at once need more registers than there are.
INLINE void add_products(tile sums, int rows, const operand *x, int64_t x_stride,
                         const uint16_t *w) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
        vf columns[TILE_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) {
            vu both;
            memcpy(&both, w + v * LANES * 2, sizeof both);
            columns[v] = (vf)(odd ? both & 0xffff0000u : both << 16);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf value = splat(x[r * x_stride + odd]);
#pragma GCC unroll 8
            for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] += value * columns[v];
        }
    }
}

#endif

// sums[p * rows + r] += x[r] panel[p] over all pairs, for panels that follow each other.
INLINE void multiply_bf16(tile sums, int rows, int panels, const operand *x, int64_t x_stride,
                          const uint16_t *panel, int64_t pairs, struct stream ahead) {
    for (int64_t k = 0; k < pairs; ahead.next += TILE_COLUMNS * 4) {
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++)
            fetch(ahead.next + p * pairs * TILE_COLUMNS * 4, TILE_COLUMNS * 4);
        for (int64_t stop = min64(k + ahead.period, pairs); k < stop; k++) {
#pragma GCC unroll 8
            for (int p = 0; p < panels; p++)
                add_products(sums + p * rows, rows, x + 2 * k, x_stride,
                             panel + (p * pairs + k) * TILE_COLUMNS * 2);
        }
    }
}

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

INLINE void add_int_products(vi totals[TILE_ROWS][TILE_VECTORS], int rows, const int16_t *x,
                             int64_t x_stride, const int8_t *w) {
    vi columns[TILE_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECTORS; v++) columns[v] = widen_int8(w + v * LANES * 2);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        int32_t pair;
        memcpy(&pair, x + r * x_stride, 4);
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++)
            totals[r][v] = add_int_pairs(totals[r][v], pair - (vi){0}, columns[v]);
    }
}

INLINE void multiply_int8(tile sums, int rows, int panels, const int16_t *x, int64_t x_stride,
                          const int8_t *panel, int64_t pairs, struct stream ahead) {
    vi totals[TILE_ROWS][TILE_VECTORS] = {{{0}}};
    for (int64_t k = 0; k < pairs; ahead.next += TILE_COLUMNS * 2) {
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++)
            fetch(ahead.next + p * pairs * TILE_COLUMNS * 2, TILE_COLUMNS * 2);
        for (int64_t stop = min64(k + ahead.period, pairs); k < stop; k++) {
#pragma GCC unroll 8
            for (int p = 0; p < panels; p++)
                add_int_products(totals + p * rows, rows, x + 2 * k, x_stride,
                                 panel + (p * pairs + k) * TILE_COLUMNS * 2);
        }
    }
    for (int i = 0; i < rows * panels; i++)
        for (int v = 0; v < TILE_VECTORS; v++)
            sums[i][v] = __builtin_convertvector(totals[i][v], vf);
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

// A block of prepared rows and the weight that it meets.
struct product {
    enum weight_format format;
    const char *x;            // rows of `length` operands
    const float *scales;      // of rows of integers
    int64_t count, length, row_bytes;
    const char *panels;
    int64_t num_panels, panel_bytes;
    const struct epilogue *epilogue;
    int64_t first_row;        // of the block in out
};

// `rows` rows from number `row` on times `panels` panels from p on; the counts must be constants.
INLINE void multiply_tile(const struct product *m, int rows, int panels, int64_t row, int64_t p,
                          struct stream ahead) {
    tile sums = {{{0}}};
    const void *x = m->x + row * m->row_bytes, *panel = m->panels + p * m->panel_bytes;
    if (m->format == WEIGHT_BF16)
        multiply_bf16(sums, rows, panels, x, m->length, panel, m->length / 2, ahead);
    else
        multiply_int8(sums, rows, panels, x, m->length, panel, m->length / 2, ahead);
    for (int i = 0; i < panels; i++)
        finish(m->epilogue, m->first_row + row, (p + i) * TILE_COLUMNS, rows,
               m->scales ? m->scales + row : NULL, sums + i * rows);
}

// A function for every size, called through a table: inlined together they would share registers,
// of which each needs all.
typedef void tile_function(const struct product *, int64_t, int64_t, struct stream);
#define TILE(ROWS, PANELS)                                                                      \
    static void multiply_##ROWS##_##PANELS(const struct product *m, int64_t row, int64_t p,     \
                                           struct stream ahead) {                               \
        multiply_tile(m, ROWS, PANELS, row, p, ahead);                                          \
    }
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
TILE(1, 4) TILE(2, 2)

// One panel meets all rows. A single tile fetches what it will read itself soon: far enough ahead
// to hide memory, near enough to stay in the L1 cache. Of several, each fetches its part of the
// next panel.
INLINE void multiply_panel(const struct product *m, int64_t p) {
    static tile_function *const BY_ROWS[TILE_ROWS + 1] = {
        NULL, multiply_1_1, multiply_2_1, multiply_3_1, multiply_4_1, multiply_5_1, multiply_6_1,
    };
    const char *panel = m->panels + p * m->panel_bytes;
    int64_t tiles = (m->count + TILE_ROWS - 1) / TILE_ROWS, row = 0;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t rows = (m->count - row + tiles - t - 1) / (tiles - t);
        struct stream ahead = {panel + 2048, 1};
        if (tiles > 1) ahead = (struct stream){panel + m->panel_bytes * (tiles + t) / tiles, tiles};
        BY_ROWS[rows](m, row, p, ahead);
        row += rows;
    }
}

// One or two rows wait for memory and for their own sums: several panels at once keep both busy.
INLINE int64_t panels_at_once(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

INLINE void multiply_panels(const struct product *m, int64_t p) {
    int64_t end = p + panels_at_once(m->count);
    struct stream ahead = {m->panels + p * m->panel_bytes + 1024, 1};
    if (m->count <= 2 && end <= m->num_panels)
        return (m->count == 1 ? multiply_1_4 : multiply_2_2)(m, 0, p, ahead);
    for (; p < min64(end, m->num_panels); p++) multiply_panel(m, p);
}

// out = x w for the packed weight `panels`.
INLINE void gemm(enum weight_format format, const struct rows *x, int64_t inputs,
                 const void *panels, const struct epilogue *e) {
    int64_t length = 2 * num_pairs(inputs);
    int64_t row_bytes = length * (format == WEIGHT_BF16 ? (int64_t)sizeof(operand) : 2);
    int64_t block = min64(x->count, rows_of_block(row_bytes));
    char *prepared = scratch(block * (row_bytes + 4));
    float *scales = (float *)(prepared + block * row_bytes);
    struct product m = {.format = format, .x = prepared,
                        .scales = format == WEIGHT_INT8 ? scales : NULL,
                        .length = length, .row_bytes = row_bytes, .panels = panels,
                        .num_panels = num_panels(e->outputs),
                        .panel_bytes = panel_elements(inputs) * (format == WEIGHT_BF16 ? 2 : 1),
                        .epilogue = e};
    for (m.first_row = 0; m.first_row < x->count; m.first_row += block) {
        m.count = min64(block, x->count - m.first_row);
        for (int64_t r = 0; r < m.count; r++) {
            int64_t source = x->index ? x->index[m.first_row + r] : m.first_row + r;
            const void *row = at(x->x, x->dtype, source * x->stride);
            if (format == WEIGHT_BF16)
                prepare_bf16(row, x->dtype, inputs, (void *)(prepared + r * row_bytes));
            else
                scales[r] = prepare_int8(row, x->dtype, inputs, (void *)(prepared + r * row_bytes));
        }
#pragma omp parallel for schedule(static) if (inputs * e->outputs > 1 << 16)
        for (int64_t p = 0; p < m.num_panels; p += panels_at_once(m.count))
            multiply_panels(&m, p);
    }
}
