// Operations of a decoder layer between its products. T is float (dtype 0) or bf16 (dtype 1); sums and norms are
// float32 inside, and results are rounded where the PyTorch versions round (norm.py, activation.py, heads.py, rope.py).
#pragma once

#include "parallel.h"
#include "simd.h"

namespace bg {

// `wide`: results are stored as float32, for a next product that would widen them.

enum Activation : int64_t { SILU = 0, GELU = 1, GELU_TANH = 2, QUICK_GELU = 3, RELU = 4 };

struct Norm {
    void* x;             // [T, H]; with a delta, x += delta in place
    const void* delta;   // [T, H] or null
    const void* weight;  // [H]
    void* out;           // [T, H]; float32 rounded to T if `wide`
    int64_t tokens, hidden, dtype;
    double eps;
    int64_t wide;
};
void norm_part(const Norm& n, int thread, int threads);

struct Gated {
    const void* gate_up;  // [T, 2I], gate first
    void* out;            // [T, I]; float32 rounded to T if `wide`
    int64_t tokens, inner, activation, dtype, wide;
};
void gated_part(const Gated& g, int thread, int threads);

struct Heads {
    void* qkv;                    // [T, N + 2K, D]; queries are normalised and rotated in place
    const void *q_norm, *k_norm;  // [D] or null, both or neither
    const void *cos, *sin;        // [D] rows of rope_tables, by token or by position
    const int64_t* positions;     // [T]; null: the tables have a row per token
    void *keys, *values;          // [P, S, K, D]
    const int64_t* slots;         // [T]
    int64_t tokens, heads, kv_heads, dim, dtype;
    double eps;
};
void heads_part(const Heads& h, int thread, int threads);

// Rows of the embedding [V, H] by token id: out [T, H].
struct Embed {
    const int64_t* ids;  // [T]
    const void* table;   // [V, H], or the same in the panels of matmul.h
    void* out;           // [T, H]
    int64_t tokens, bytes;  // `bytes` of a row
    int64_t packed;      // whether the table is in panels
};
void embed_part(const Embed& e, int thread, int threads);

// Token ids that the previous step sampled: ids[t] = sampled[source[t]].
struct FillSampledIds {
    int64_t* ids;            // [T]
    const int64_t* source;   // [T] index in `sampled`; negative: ids[t] is known already
    const int64_t* sampled;  // [R]
    int64_t tokens;
};
void fill_sampled_ids_part(const FillSampledIds& f, int thread, int threads);

}  // namespace bg
