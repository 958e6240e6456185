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
    std::vector<Claims> claims_;
    std::vector<KvFetch> fetches_;  // of decoders
};

// One program at a time.
class Background {
  public:
    Background() : worker_([this] { work(); }) {}
    ~Background();

    // Begins a program on all of its threads but one, the caller's. No other one may be under way.
    void begin(const Operation* operations, int64_t count, int threads);

    // Ends it, with the caller's help.
    void join();

  private:
    void work();
    void await(int64_t turn);

    std::unique_ptr<Program> program_;
    std::atomic<int64_t> begun_{0}, done_{0};  // programs
    std::mutex mutex_;
    std::condition_variable more_;
    std::thread worker_;  // the last member: it runs as soon as it is there
};

}  // namespace bg
