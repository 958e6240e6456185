// All layers of a decoder of the Llama family, in one call: the same operations in the same order as models/native.py,
// each by all threads, one begun when the units of the one before are done.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "lora.h"
#include "matmul.h"

namespace bg {

// Of the products weight, bias, inner, outer and method are given; the rest is the step's.
struct DecoderLayer {
    Matmul qkv, o, gate_up, down;
    const void *input_norm, *post_norm;  // [H]
    const void *q_norm, *k_norm;         // [D] or null, both or neither
    const LoraStack *qkv_lora, *o_lora, *gate_up_lora, *down_lora;  // null where no adapter changes the product
};

struct Decoder {
    const DecoderLayer* layers;  // [L]
    const void *embedding;       // [V, H]
    const void *final_norm;      // [H]
    int64_t num_layers, hidden, inner, heads, kv_heads, dim, activation, dtype;
    double eps;
};

struct DecoderStep {
    const int64_t *ids;         // [T], or null where x holds the tokens' embeddings
    const int64_t *positions;   // [T]
    const int64_t *slots;       // [T]
    const void *cos, *sin;      // [positions, D] of rope_tables
    const Attention* attention;  // reads queries from qkv, writes attended
    const LoraStep* lora;        // null where no token has an adapter
    void* const* taps;           // [L + 1] -> [T, H] or null: what goes into the first layer, what comes out of each
    void *x;                     // [T, H] residual sums
    void *normed;                // [T, H] the result, of wanted tokens alone [W, H]
    void *product_in;            // [T, H] what goes into a product, float32 where `wide`
    void *qkv;                   // [T, N + 2K, D]
    void *attended;              // [T, N, D]
    void *delta;                 // [T, H]
    void *gate_up;               // [T, 2I]
    void *activated;             // [T, I] likewise
    void *scratch;               // of the products
    const int64_t *wanted;       // [W] tokens whose result is asked for
    void *wanted_x;              // [W, H] for their residual sums
    int64_t tokens;
    int64_t num_wanted;          // W; -1: all tokens, in order
    int64_t wide;                // norms and activations are kept as the float32 numbers that products want
};

// A thread's part, which is over when all are done. Claims: as many unused ones as `decode_claims` says, from number
// `first` on; `fetch`: of the step's attention.
int64_t decode_claims(const Decoder& d);
void decode_part(const Decoder& d, const DecoderStep& s, ClaimRoom& claims, int64_t first, KvFetch& fetch, int thread);

}  // namespace bg
