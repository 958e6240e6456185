// A step's kernels on threads of their own, while the thread that began them does something else. When it has nothing
// else to do it helps: it claims units as all others do, and finds those claimed that were done without it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "copies.h"
#include "decoder.h"
#include "sampling.h"

namespace bg {

// What `first` and `second` of an operation point to.
enum Kind : int64_t {
    COPY,     // PageCopies
    DECODE,   // Decoder, DecoderStep
    PRODUCT,  // Matmul
    SAMPLE,   // Sample
    FEED,     // Feed
};

struct Operation {
    int64_t kind;
    const void *first, *second;
};

// Operations one after the other, by all threads.
class Program {
  public:
    Program(const Operation* operations, int64_t count, int threads);

    // The part of a thread, which is over when all are done.
    void part(int thread);

    const int threads;

  private:
    std::vector<Operation> operations_;
    ClaimRoom claims_;
    std::vector<KvFetch> fetches_;  // of decoders
};

// One program after the other.
class Background {
  public:
    Background() : worker_([this] { work(); }) {}
    ~Background();

    // Has a program follow on the one under way, on all of its threads but one, the caller's; and ends that one with the
    // caller's help. So the others wait for nothing in between.
    void begin(const Operation* operations, int64_t count, int threads);

    // Ends the last one, with the caller's help.
    void join();

  private:
    void end(int64_t turn);
    void work();
    void await(int64_t turn);

    std::unique_ptr<Program> programs_[2];     // by turn: one under way and the next
    int64_t ended_ = 0;                        // programs, the caller's count
    std::atomic<int64_t> begun_{0}, done_{0};  // programs
    std::mutex mutex_;
    std::condition_variable more_;
    std::thread worker_;  // the last member: it runs as soon as it is there
};

}  // namespace bg
