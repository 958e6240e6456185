// y = x W^T + b over weights packed in panels of PANEL outputs.
//
// Layouts. float32: [panels][K][PANEL]. bfloat16: [panels][ceil(K / 2)][PANEL][2], the order that the dot instruction
// wants, from which the float32 path widens a panel with a shift and a mask. Sums run over K in one order whatever the
// number of rows, so that a row's result is the same bits in every batch.
#pragma once

#include "simd.h"

namespace bg {

#if defined(__AVX512F__)
constexpr int PANEL_VECTORS = 3, TILE_ROWS = 8;
#else
constexpr int PANEL_VECTORS = 1, TILE_ROWS = 4;
#endif
constexpr int PANEL = PANEL_VECTORS * LANES;

enum Method : int64_t { F32 = 0, BF16_WIDENED = 1, BF16_DOT = 2 };

struct Matmul {
    const void* x;       // [M, K], rows `x_stride` elements apart
    const void* weight;  // packed
    const float* bias;   // [N] or null
    void* out;           // [M, N], rows `out_stride` elements apart, in x's type
    int64_t rows, inner, outer, x_stride, out_stride;
    int64_t method;
    void* scratch;       // per thread `matmul_scratch` bytes
};

int64_t matmul_scratch(int64_t inner, int64_t method);
void matmul_part(const Matmul& m, int thread, int threads);

}  // namespace bg
