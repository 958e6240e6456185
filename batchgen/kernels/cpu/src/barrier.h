// Where the threads of a region wait for each other between two operations, hundreds of times in a step.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace bg {

// Threads spin: the wait is shorter than a call of the system. After long it gives the processor away, since another
// thread of the region may be waiting for it.
class Barrier {
  public:
    explicit Barrier(int threads) : threads_(threads) {}

    void wait() {
        if (threads_ == 1) return;
        const int64_t turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int64_t spins = 0; turn_.load(std::memory_order_acquire) == turn; spins++)
            if (spins < SPINS) relax();
            else sched_yield();
    }

  private:
    static constexpr int64_t SPINS = 4000;

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ __volatile__("yield");
#endif
    }

    const int64_t threads_;
    alignas(64) std::atomic<int64_t> arrived_{0};
    alignas(64) std::atomic<int64_t> turn_{0};
};

}  // namespace bg
