// Work-stealing queues: the units of an operation, taken by threads as they become free, hundreds of times in a step.
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

// Waits until ready() is true. Spins, since the wait is shorter than a system call. After SPINS it yields the
// processor, as the awaited thread may need it.
template <class Ready>
void spin_until(Ready ready) {
    for (int64_t spins = 0; !ready(); spins++)
        if (spins < SPINS) relax();
        else sched_yield();
}

// Units of work [begin, end) of one share, claimed by a thread.
struct Claim {
    int64_t begin, end;
    int share;
    explicit operator bool() const { return begin < end; }
    int64_t units() const { return end - begin; }
};

// The units of work of one operation. They are divided into shares, one for each thread, or one for several of many
// threads. A thread first pops the units of its share in order, so that it knows which come next, and then steals from
// the other shares. The operation ends with its last unit, not with its last thread: a preempted thread that holds no
// unit delays no one, and finds nothing left when it runs again.
class WorkStealingQueue {
  public:
    static constexpr int MOST_SHARES = 8;

    // Counters of a share, on a separate cache line for each share.
    struct alignas(64) ShareState {
        std::atomic<int64_t> claimed{0}, done{0};
    };

    static int shares_of(int threads) { return std::min(threads, MOST_SHARES); }

    // `states`: shares_of(threads) unused ones.
    WorkStealingQueue(ShareState* states, int threads)
        : threads(threads), shares(shares_of(threads)), sharing((threads + shares - 1) / shares), states_(states) {}

    // The next units; none when all are claimed. Share s is units [begin(s), begin(s + 1)). Claims get smaller towards
    // the end, so that threads finish together even if one is slower.
    template <class Begin>
    Claim pop(int thread, Begin begin) const {
        return claim(thread, begin, [&](int64_t left) { return std::max<int64_t>(left / (2 * sharing), 1); });
    }

    // The next unit; none when all are claimed.
    template <class Begin>
    Claim pop_one(int thread, Begin begin) const {
        return claim(thread, begin, [](int64_t) { return 1; });
    }

    // Marks claimed units as done.
    void done(const Claim& c) const { states_[c.share].done.fetch_add(c.units(), std::memory_order_release); }

    // Waits until all units are done, which are `units`.
    void wait(int64_t units) const {
        spin_until([&] {
            int64_t done = 0;
            for (int s = 0; s < shares; s++) done += states_[s].done.load(std::memory_order_acquire);
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
            std::atomic<int64_t>& claimed = states_[share].claimed;
            int64_t at = claimed.load(std::memory_order_relaxed);
            while (at < units) {
                const int64_t end = at + count(units - at);
                if (claimed.compare_exchange_weak(at, end, std::memory_order_relaxed))
                    return {first + at, first + end, share};
            }
        }
        return {0, 0, 0};
    }

    ShareState* const states_;
};

// The queues of consecutive operations.
class WorkStealingQueues {
  public:
    WorkStealingQueues(int64_t operations, int threads)
        : threads_(threads), states_(operations * WorkStealingQueue::shares_of(threads)) {}

    WorkStealingQueue of(int64_t operation) {
        return {states_.data() + operation * WorkStealingQueue::shares_of(threads_), threads_};
    }

  private:
    const int threads_;
    std::vector<WorkStealingQueue::ShareState> states_;
};

constexpr int64_t PARTS = 4;  // parts of an operation on rows, per thread

// An operation on `rows` rows: calls part(i, parts) for the parts that this thread claims, and waits until all are
// done. The rows of a share are [rows * share / shares, rows * (share + 1) / shares), to the precision of parts.
template <class Part>
void parallel_for_parts(const WorkStealingQueue& queue, int64_t rows, int thread, Part part) {
    const int64_t parts = std::min(rows, PARTS * queue.threads);
    while (const Claim claim = queue.pop(thread, [&](int share) { return parts * share / queue.shares; })) {
        for (int64_t i = claim.begin; i < claim.end; i++) part(int(i), int(parts));
        queue.done(claim);
    }
    queue.wait(parts);
}

}  // namespace bg
