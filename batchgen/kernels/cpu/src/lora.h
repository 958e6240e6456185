// Low-rank changes of a linear layer, each token by its own adapter: out[t] += (x[t] A^T) B^T (kernels/lora.py).
//
// Two halves with a barrier between: first every token's inner sums, then what they add. Inner sums are kept in
// float32, and out is rounded once. A number is the same sum in the same order whatever other tokens are there.
#pragma once

#include <cstdint>

namespace bg {

// A layer's adapters, one below another.
struct LoraStack {
    const void *down;             // [ranks, I]
    const void *up;               // [ranks, O]
    const int32_t (*ranges)[2];   // [adapters] first rank, and how many; 0 where the adapter leaves the layer as it is
    const int32_t (*spans)[2];    // [adapters, ceil(O / LORA_BLOCK)] ranks [from, to), beyond which B is zero there
    int64_t inner, outer, dtype;  // as in elementwise.h
};

// A step's tokens by adapter.
struct LoraStep {
    const int64_t *order;       // [U] tokens that have an adapter
    const int64_t (*tiles)[3];  // [M] adapter, first place in `order`, tokens
    float *sums;                // [U, width]
    int64_t num_tiles, width;   // `width`: as many ranks as an adapter has in any layer
};

constexpr int64_t LORA_BLOCK = 128;  // outputs

void lora_down_part(const LoraStack& stack, const LoraStep& step, const void* x, int64_t stride, int thread,
                    int threads);
void lora_up_part(const LoraStack& stack, const LoraStep& step, void* out, int64_t stride, int thread, int threads);

}  // namespace bg
