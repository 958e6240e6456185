// Work that threads take as they come.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace bg {

struct Claim {
    int64_t begin, end;
    explicit operator bool() const { return begin < end; }
};

// Hands out units of work, fewer and fewer at a time, so that threads end together although one may be slower: a core
// may belong to others for a while, or be another's twin.
class Claims {
  public:
    // The next of `units`; none when all are claimed.
    Claim next(int64_t units, int threads) {
        int64_t at = claimed_.load(std::memory_order_relaxed), end;
        do {
            if (at >= units) return {units, units};
            end = at + std::max<int64_t>((units - at) / (2 * threads), 1);
        } while (!claimed_.compare_exchange_weak(at, end, std::memory_order_relaxed));
        return {at, end};
    }

    // Only while no thread claims.
    void reset() { claimed_.store(0, std::memory_order_relaxed); }

  private:
    alignas(64) std::atomic<int64_t> claimed_{0};
};

}  // namespace bg
