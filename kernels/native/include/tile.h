// The register tile that every matrix product of the kernels is made of.
#pragma once

#include "plait.h"

// TILE_ROWS x (TILE_VECTORS * LANES) sums fill the registers and leave room for operands.
#define TILE_ROWS 6
#define TILE_VECTORS (LANES == 16 ? 4 : 2)
#define TILE_COLUMNS (TILE_VECTORS * LANES)

// sums[r][v] += sum over k < depth of a[r * a_row + k * a_step] * b[k * b_step + v * LANES ...].
// rows and vectors must be constants at the call, at most TILE_ROWS and TILE_VECTORS.
INLINE void tile_multiply(vf sums[TILE_ROWS][TILE_VECTORS], int rows, int vectors, const float *a,
                          int64_t a_row, int64_t a_step, const float *b, int64_t b_step,
                          int64_t depth) {
    for (int64_t k = 0; k < depth; k++) {
        vf columns[TILE_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) columns[v] = load(b + k * b_step, FLOAT32, v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf row = splat(a[r * a_row + k * a_step]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sums[r][v] += row * columns[v];
        }
    }
}

// RUN with the constant ROWS that equals `rows`, 1 to TILE_ROWS.
#define FOR_ROWS(rows, RUN)                                                    \
    switch (rows) {                                                            \
    case 1: { enum { ROWS = 1 }; RUN; break; }                                 \
    case 2: { enum { ROWS = 2 }; RUN; break; }                                 \
    case 3: { enum { ROWS = 3 }; RUN; break; }                                 \
    case 4: { enum { ROWS = 4 }; RUN; break; }                                 \
    case 5: { enum { ROWS = 5 }; RUN; break; }                                 \
    default: { enum { ROWS = 6 }; RUN; break; }                                \
    }
