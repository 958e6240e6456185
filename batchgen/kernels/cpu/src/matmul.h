// y = x W^T + b over weights packed in panels of PANEL outputs.
//
// Layouts. float32: [panels][K][PANEL]. bfloat16: [panels][ceil(K / 2)][PANEL][2], the order that the dot instruction
// wants, from which the float32 path widens a panel with a shift and a mask. What is beyond N and K is zero.
//
// Every element of y is one sum over k = 0, 1, 2, ... in one accumulator, whatever the number of rows, of threads, or
// where a row stands, so that a row's result is the same bits in every batch.
#pragma once

#include "claims.h"
#include "fetch.h"
#include "simd.h"

namespace bg {

#if defined(__AVX512F__)
constexpr int PANEL = 48, TILE_ROWS = 8;
#else
constexpr int PANEL = 16, TILE_ROWS = 6;
#endif

enum Method : int64_t {
    F32 = 0,           // float32 throughout
    BF16_WIDENED = 1,  // bfloat16 in and out, multiplied and summed in float32
    BF16_DOT = 2,      // the processor's dot instruction, which sums pairs and flushes denormal numbers
    INT8_F32 = 3,      // int8 weights by groups (int8.h), float32 in and out
    INT8_BF16 = 4,     // the same, bfloat16 in and out
    BF16_BFP = 5,      // block floating point (bfp.h), bfloat16 in and out
};

// Adjacent weights.
struct Block {
    const char* at = nullptr;
    int64_t bytes = 0;
};

struct Matmul {
    const void* x;       // [M, K], rows `x_stride` elements apart
    const void* weight;  // packed
    const float* bias;   // [N] or null
    void* out;           // [M, N], rows `out_stride` elements apart, in x's type
    int64_t rows, inner, outer, x_stride, out_stride;
    int64_t method;
    void* scratch;  // `matmul_scratch` bytes per thread, from a multiple of 64
    int64_t x_wide;  // BF16_WIDENED with even K, and BF16_BFP: x is float32, every number a bfloat16's
};

// A thread at work on a product.
struct Worker {
    Claims claims;  // unused ones
    int thread;
    KvFetch::Layer* fetch;         // what it has is fetched meanwhile; or null
    const Matmul* next = nullptr;  // the product that comes afterwards, whose first weights are fetched in the end
};

int64_t matmul_scratch(int64_t inner, int64_t method);
// Returns how many units the claims hand out to all threads.
int64_t matmul_part(const Matmul& m, const Worker& worker);
// The weights that it will begin with, for so many rows.
Block first_weights(const Matmul& m, int64_t rows, const Worker& worker);

}  // namespace bg
