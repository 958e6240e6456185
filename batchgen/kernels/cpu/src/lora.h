// LoRA of a linear layer, each token with its own adapter: out[t] += (x[t] A^T) B^T (kernels/lora.py).
//
// Two phases with a barrier between: first the inner sums x A^T of all tokens, then the update of out. Inner sums are
// float32, and out is rounded once. A result is the same sum in the same order whatever other tokens the step has.
#pragma once

#include <cstdint>

namespace bg {

// A layer's adapters, stacked along the rank.
struct LoraStack {
    const void *down;             // [ranks, I]
    const void *up;               // [ranks, O]
    const int32_t (*ranges)[2];   // [adapters] first rank, number of ranks; 0 ranks: no change of this layer
    const int32_t (*spans)[2];    // [adapters, ceil(O / LORA_BLOCK)] ranks [from, to) where B is not zero
    int64_t inner, outer, dtype;  // as in elementwise.h
};

// A step's tokens by adapter.
struct LoraStep {
    const int64_t *order;       // [U] tokens that have an adapter
    const int64_t (*tiles)[3];  // [M] adapter, first index in `order`, number of tokens
    float *sums;                // [U, width]
    int64_t num_tiles, width;   // `width`: largest rank of an adapter in any layer
};

constexpr int64_t LORA_BLOCK = 128;  // outputs

void lora_down_part(const LoraStack& stack, const LoraStep& step, const void* x, int64_t stride, int thread,
                    int threads);
void lora_up_part(const LoraStack& stack, const LoraStep& step, void* out, int64_t stride, int thread, int threads);

}  // namespace bg
