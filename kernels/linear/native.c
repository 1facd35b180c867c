// linear with packed weights; arguments as in op.py.
#include "gemm.h"

EXPORT int64_t tile_columns(void) { return TILE_COLUMNS; }

EXPORT void linear(const void *x, int64_t x_dtype, int64_t rows, int64_t inputs, int64_t x_stride,
                   const void *panels, int64_t format, const float *scale, const float *bias,
                   void *out, int64_t out_dtype, int64_t outputs) {
    struct rows source = {.x = x, .dtype = (enum dtype)x_dtype, .count = rows, .stride = x_stride};
    struct epilogue target = {.out = out, .dtype = (enum dtype)out_dtype, .stride = outputs,
                              .outputs = outputs, .scale = scale, .bias = bias};
    gemm((enum weight_format)format, &source, inputs, panels, &target);
}
