// Keys and values that decode rows are about to read, from far away: they come into the cache while the products before
// are computed, which leave the memory idle. Attention would wait for nearly all of them, as each is read once a step.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace bg {

struct Attention;

constexpr int LINE = 64;              // bytes of a line of cache
constexpr uint64_t CHUNK_LINES = 16;  // adjacent ones
constexpr int64_t CHUNK_BYTES = CHUNK_LINES * LINE;
constexpr int64_t MOST_CHUNKS = 64;   // that are taken at once

// Lines from `base` on: adjacent ones, or in `chunks`, counted in chunks from there.
struct Lines {
    const char* base = nullptr;
    const int32_t* chunks = nullptr;

    const char* at(uint64_t i) const { return base + chunks[i / CHUNK_LINES] * CHUNK_BYTES + i % CHUNK_LINES * LINE; }
};

// Of the attention of all layers of a step, by the shares that its items come in: each thread fetches what it will read
// itself, into the cache of its own core. Threads of one share take side by side.
class KvFetch {
  public:
    // What attention reads in one layer for one share.
    class alignas(LINE) Layer {
      public:
        // Up to `lines` that nobody took before; none with a null base.
        Lines take(int64_t lines);

      private:
        friend class KvFetch;
        const char *keys_ = nullptr, *values_ = nullptr;
        const int32_t* chunks_ = nullptr;  // MOST_CHUNKS more than `count`, of which those beyond may be read twice
        int64_t count_ = 0;
        std::atomic<int64_t> taken_{0};  // of keys, then of values
    };

    // The first pages that each share's rows of few queries read, as many as half of the last level of cache holds, up to
    // 16 MiB together; none where its size is not known.
    KvFetch(const Attention& a, int64_t num_layers);

    // What a thread fetches for layer l; null where there is no such layer.
    Layer* layer(int64_t l, int thread) {
        return l < num_layers_ ? &layers_[l * num_shares_ + thread % num_shares_] : nullptr;
    }

  private:
    int64_t num_layers_, num_shares_;
    std::unique_ptr<Layer[]> layers_;
    std::deque<std::vector<int32_t>> chunks_;  // of lists and shares; they stay where they are
};

}  // namespace bg
