// Work that threads take as they come, hundreds of times in a step.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

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

// Units of work [begin, end) of one share.
struct Claim {
    int64_t begin, end;
    int share;
    explicit operator bool() const { return begin < end; }
    int64_t units() const { return end - begin; }
};

// One operation's units of work: who may do them, and whether all are done. They come in shares, one for each thread, or
// for each few of many: a thread takes those of its own share in their order, so that it can know what comes next, and
// then what is left of the others'. An operation ends with the last unit, not with the last thread: a thread whose core
// belongs to another process for a while, and that holds no unit, keeps nobody waiting. It finds nothing left to claim
// when it comes.
class Claims {
  public:
    static constexpr int MOST_SHARES = 8;

    // What is known of a share, on a line of cache of its own: another core may be far away.
    struct alignas(64) Line {
        std::atomic<int64_t> claimed{0}, done{0};
    };

    static int shares_of(int threads) { return std::min(threads, MOST_SHARES); }

    // `lines`: unused ones, as many as so many threads have shares.
    Claims(Line* lines, int threads)
        : threads(threads), shares(shares_of(threads)), sharing((threads + shares - 1) / shares), lines_(lines) {}

    // The next units; none when all are claimed. Share s is units [begin(s), begin(s + 1)). Fewer and fewer at a time, so
    // that threads end together although one may be slower.
    template <class Begin>
    Claim next(int thread, Begin begin) const {
        return claim(thread, begin, [&](int64_t left) { return std::max<int64_t>(left / (2 * sharing), 1); });
    }

    // The next unit alone.
    template <class Begin>
    Claim one(int thread, Begin begin) const {
        return claim(thread, begin, [](int64_t) { return 1; });
    }

    // It is done.
    void done(const Claim& c) const { lines_[c.share].done.fetch_add(c.units(), std::memory_order_release); }

    // Until so many units are done, which are all.
    void wait(int64_t units) const {
        spin_until([&] {
            int64_t done = 0;
            for (int s = 0; s < shares; s++) done += lines_[s].done.load(std::memory_order_acquire);
            return done >= units;
        });
    }

    const int threads, shares;
    const int sharing;  // threads of a share

  private:
    template <class Begin, class Count>
    Claim claim(int thread, Begin begin, Count count) const {
        for (int i = 0; i < shares; i++) {
            const int share = (thread + i) % shares;
            const int64_t first = begin(share), units = begin(share + 1) - first;
            std::atomic<int64_t>& claimed = lines_[share].claimed;
            int64_t at = claimed.load(std::memory_order_relaxed);
            while (at < units) {
                const int64_t end = at + count(units - at);
                if (claimed.compare_exchange_weak(at, end, std::memory_order_relaxed)) return {first + at, first + end, share};
            }
        }
        return {0, 0, 0};
    }

    Line* const lines_;
};

// Room for what threads claim of operations one after the other.
class ClaimRoom {
  public:
    ClaimRoom(int64_t operations, int threads) : threads_(threads), lines_(operations * Claims::shares_of(threads)) {}

    Claims of(int64_t operation) { return {lines_.data() + operation * Claims::shares_of(threads_), threads_}; }

  private:
    const int threads_;
    std::vector<Claims::Line> lines_;
};

constexpr int64_t PARTS = 4;  // of an operation on rows, for each thread

// An operation on so many rows: part(i, parts) for the parts that this thread claims, until all are done. A share's rows
// are [rows * share / shares, rows * (share + 1) / shares), as far as parts allow.
template <class Part>
void by_parts(const Claims& claims, int64_t rows, int thread, Part part) {
    const int64_t parts = std::min(rows, PARTS * claims.threads);
    while (const Claim claim = claims.next(thread, [&](int share) { return parts * share / claims.shares; })) {
        for (int64_t i = claim.begin; i < claim.end; i++) part(int(i), int(parts));
        claims.done(claim);
    }
    claims.wait(parts);
}

}  // namespace bg
