// y = x W^T + b over weights packed in panels of PANEL outputs.
//
// Layouts. float32: [panels][K][PANEL]. bfloat16: [panels][ceil(K / 2)][PANEL][2], the order of the dot instruction,
// from which the float32 path widens a panel with a shift and a mask. Zero beyond N and K.
//
// Every element of y is one sum over k = 0, 1, 2, ... in one accumulator, whatever the number of rows, of threads, or
// the index of the row, so that a row's result is bitwise the same in every batch.
#pragma once

#include "work_stealing.h"
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
    BF16_DOT = 2,      // the processor's dot instruction, which sums pairs and flushes denormals
    INT8_F32 = 3,      // int8 weights by groups (int8.h), float32 in and out
    INT8_BF16 = 4,     // the same, bfloat16 in and out
    BF16_BFP = 5,      // block floating point (bfp.h), bfloat16 in and out
};

// A range of weights in memory.
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
    void* scratch;  // `matmul_scratch` bytes per thread, aligned to 64
    int64_t x_wide;  // x is float32 with bfloat16 values; only for BF16_WIDENED with even K, and BF16_BFP
    int64_t group;   // most inputs of a group, for INT8_F32 and INT8_BF16
};

// A thread that computes a product.
struct Worker {
    WorkStealingQueue queue;  // unused
    int thread;
    KvFetch::Layer* fetch;         // keys and values to prefetch meanwhile; or null
    const Matmul* next = nullptr;  // the next product, whose first weights are prefetched at the end
};

int64_t matmul_scratch(int64_t inner, int64_t method, int64_t group);
// Runs a thread's part. Returns the number of units of all threads.
int64_t matmul_part(const Matmul& m, const Worker& worker);
// The weights that this thread begins with, for a product of `rows` rows.
Block first_weights(const Matmul& m, int64_t rows, const Worker& worker);

}  // namespace bg
