// Work that threads take as they come, hundreds of times in a step.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace bg {

constexpr int64_t SPINS = 4000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Until there() is true. Spins, since the wait is shorter than a call of the system; after long it gives the processor
// away, for the thread that is waited for may need it.
template <class There>
void spin_until(There there) {
    for (int64_t spins = 0; !there(); spins++)
        if (spins < SPINS) relax();
        else sched_yield();
}

struct Claim {
    int64_t begin, end;
    explicit operator bool() const { return begin < end; }
    int64_t units() const { return end - begin; }
};

// One operation's units of work: who may do them, and whether all are done. It ends with the last unit, not with the
// last thread: a thread whose core belongs to another process for a while, and that holds no unit, keeps nobody
// waiting. It finds nothing left to claim when it comes.
class alignas(64) Claims {
  public:
    // The next of `units`; none when all are claimed. Fewer and fewer at a time, so that threads end together although
    // one may be slower.
    Claim next(int64_t units, int threads) {
        int64_t at = claimed_.load(std::memory_order_relaxed), end;
        do {
            if (at >= units) return {units, units};
            end = at + std::max<int64_t>((units - at) / (2 * threads), 1);
        } while (!claimed_.compare_exchange_weak(at, end, std::memory_order_relaxed));
        return {at, end};
    }

    // The next unit's number, which is beyond the last when all are claimed.
    int64_t one() { return claimed_.fetch_add(1, std::memory_order_relaxed); }

    // So many claimed units are done.
    void done(int64_t units) { done_.fetch_add(units, std::memory_order_release); }

    // Until all units are done.
    void wait(int64_t units) const {
        spin_until([&] { return done_.load(std::memory_order_acquire) >= units; });
    }

  private:
    std::atomic<int64_t> claimed_{0}, done_{0};
};

constexpr int64_t PARTS = 4;  // of an operation on rows, for each thread

// An operation on so many rows: part(i, parts) for the parts that this thread claims, until all are done.
template <class Part>
void by_parts(Claims& claims, int64_t rows, int threads, Part part) {
    const int64_t parts = std::min<int64_t>(rows, PARTS * threads);
    while (const Claim claim = claims.next(parts, threads)) {
        for (int64_t i = claim.begin; i < claim.end; i++) part(int(i), int(parts));
        claims.done(claim.units());
    }
    claims.wait(parts);
}

}  // namespace bg
