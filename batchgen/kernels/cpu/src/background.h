// Runs command buffers on background threads, while the thread that submits them does other work. A thread that waits
// for a command buffer helps: it pops units of work like the others, and skips those that are done.
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

// What `first` and `second` of a command point to.
enum CommandKind : int64_t {
    COPY,              // PageCopies
    DECODE,            // Decoder, DecoderStep
    MATMUL,            // Matmul
    SAMPLE,            // Sample
    FILL_SAMPLED_IDS,  // FillSampledIds
};

struct Command {
    int64_t kind;
    const void *first, *second;
};

// Commands that all threads run one after the other.
class CommandBuffer {
  public:
    CommandBuffer(const Command* commands, int64_t count, int threads);

    // Runs a thread's part; returns when all commands are done.
    void run(int thread);

    const int threads;

  private:
    std::vector<Command> commands_;
    WorkStealingQueues queues_;
    std::vector<KvFetch> fetches_;  // of the decode commands
};

// Runs command buffers in the order of submission.
class BackgroundThread {
  public:
    BackgroundThread() : worker_([this] { work(); }) {}
    ~BackgroundThread();

    // Submits a command buffer to run after the running one, on all of its threads but the caller's, and finishes the
    // running one with the caller's help. So the other threads do not wait in between.
    void submit(const Command* commands, int64_t count, int threads);

    // Finishes the last command buffer with the caller's help.
    void join();

  private:
    void finish(int64_t number);
    void work();
    void await(int64_t number);

    std::unique_ptr<CommandBuffer> buffers_[2];    // by number % 2: the running one and the next
    int64_t finished_ = 0;                         // number of buffers finished, as the caller knows
    std::atomic<int64_t> submitted_{0}, done_{0};  // numbers of buffers
    std::mutex mutex_;
    std::condition_variable more_;
    std::thread worker_;  // the last member, because the thread uses the others as soon as it starts
};

}  // namespace bg
