// Prefetch of the keys and values that decode rows are about to read. Products leave memory bandwidth unused, so they
// prefetch them; attention reads each key and value once per step, and would wait for nearly all of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace bg {

struct Attention;

constexpr int LINE = 64;              // bytes of a cache line
constexpr uint64_t CHUNK_LINES = 16;  // adjacent lines of a chunk
constexpr int64_t CHUNK_BYTES = CHUNK_LINES * LINE;
constexpr int64_t MOST_CHUNKS = 64;   // most chunks taken at once

// Cache lines from `base` on: adjacent, or in `chunks`, whose numbers count chunks from `base`.
struct Lines {
    const char* base = nullptr;
    const int32_t* chunks = nullptr;

    const char* at(uint64_t i) const { return base + chunks[i / CHUNK_LINES] * CHUNK_BYTES + i % CHUNK_LINES * LINE; }
};

// Prefetch for the attention of all layers of a step, by the shares of its work list: each thread fetches what it will
// read itself into the cache of its core. The threads of a share divide its lines.
class KvFetch {
  public:
    // The lines that attention reads in one layer for one share.
    class alignas(LINE) Layer {
      public:
        // Up to `lines` lines that were not taken before; a null base: none are left.
        Lines take(int64_t lines);

      private:
        friend class KvFetch;
        const char *keys_ = nullptr, *values_ = nullptr;
        const int32_t* chunks_ = nullptr;  // MOST_CHUNKS more than `count_`; those beyond may be read twice
        int64_t count_ = 0;
        std::atomic<int64_t> taken_{0};  // chunks taken: of keys, then of values
    };

    // Covers the first pages that each share's items of few query rows read: as much as half of the last-level cache
    // holds, at most 16 MiB for all shares; nothing if the size of the cache is unknown.
    KvFetch(const Attention& a, int64_t num_layers);

    // Lines of layer l for a thread; null if there is no such layer.
    Layer* layer(int64_t l, int thread) {
        return l < num_layers_ ? &layers_[l * num_shares_ + thread % num_shares_] : nullptr;
    }

  private:
    int64_t num_layers_, num_shares_;
    std::unique_ptr<Layer[]> layers_;
    std::deque<std::vector<int32_t>> chunks_;  // by list and share; a deque, as layers point to its elements
};

}  // namespace bg
