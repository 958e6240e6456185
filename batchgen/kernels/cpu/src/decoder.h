// All layers of a decoder of the Llama family in one call: the same operations in the same order as models/native.py.
// All threads compute each operation; the next one starts when all units of the previous one are done.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "lora.h"
#include "matmul.h"

namespace bg {

// A layer's weights. Of the products, weight, bias, inner, outer and method are set; the step sets the rest.
struct DecoderLayer {
    Matmul qkv, o, gate_up, down;
    const void *input_norm, *post_norm;  // [H]
    const void *q_norm, *k_norm;         // [D] or null, both or neither
    const LoraStack *qkv_lora, *o_lora, *gate_up_lora, *down_lora;  // null: no adapter
};

struct Decoder {
    const DecoderLayer* layers;  // [L]
    const void *embedding;       // [V, H], in panels if `packed_embedding`
    const void *final_norm;      // [H]
    int64_t num_layers, hidden, inner, heads, kv_heads, dim, activation, dtype, packed_embedding;
    double eps;
};

struct DecoderStep {
    const int64_t *ids;         // [T], or null where x holds the tokens' embeddings
    const int64_t *positions;   // [T]
    const int64_t *slots;       // [T]
    const void *cos, *sin;      // [positions, D] as `rope_tables`
    const Attention* attention;  // reads queries from qkv, writes attended
    const LoraStep* lora;        // null where no token has an adapter
    void* const* capture;        // [L + 1] -> [T, H] or null: receives the first layer's input, each layer's output
    void *x;                     // [T, H] residual sums
    void *normed;                // [T, H] the result; of wanted tokens only [W, H]
    void *product_in;            // [T, H] input of a product, float32 if `wide`
    void *qkv;                   // [T, N + 2K, D]
    void *attended;              // [T, N, D]
    void *delta;                 // [T, H]
    void *gate_up;               // [T, 2I]
    void *activated;             // [T, I] likewise
    void *scratch;               // workspace of the products
    const int64_t *wanted;       // [W] tokens whose result is computed
    void *wanted_x;              // [W, H] their residual sums
    int64_t tokens;
    int64_t num_wanted;          // W; -1: all tokens, in order
    int64_t wide;                // norms and activations are stored in float32, as products read them
};

// Number of queues that `decode_part` uses.
int64_t decode_queues(const Decoder& d);

// Runs a thread's part; returns when all parts are done. Uses the queues from number `first` on; `fetch` is the
// prefetch of the step's attention.
void decode_part(
    const Decoder& d, const DecoderStep& s, WorkStealingQueues& queues, int64_t first, KvFetch& fetch, int thread);

}  // namespace bg
