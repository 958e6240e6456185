#include "background.h"

namespace bg {
namespace {

constexpr int64_t STOP = -1;

template <class T>
const T& as(const void* p) {
    return *static_cast<const T*>(p);
}

int64_t queues_of(const Command& c) { return c.kind == DECODE ? decode_queues(as<Decoder>(c.first)) : 1; }

int64_t num_queues(const std::vector<Command>& commands) {
    int64_t queues = 0;
    for (const Command& c : commands) queues += queues_of(c);
    return queues;
}

}  // namespace

CommandBuffer::CommandBuffer(const Command* commands, int64_t count, int threads)
    : threads(threads), commands_(commands, commands + count), queues_(num_queues(commands_), threads) {
    for (const Command& c : commands_)
        if (c.kind == DECODE)
            fetches_.emplace_back(*as<DecoderStep>(c.second).attention, as<Decoder>(c.first).num_layers);
}

void CommandBuffer::run(int thread) {
    int64_t at = 0;
    KvFetch* fetch = fetches_.data();
    for (const Command& c : commands_) {
        const WorkStealingQueue queue = queues_.of(at);
        if (c.kind == COPY) {
            const PageCopies& p = as<PageCopies>(c.first);
            parallel_for_parts(
                queue, p.num_caches, thread, [&](int part, int parts) { page_copies_part(p, part, parts); });
        }
        if (c.kind == FILL_SAMPLED_IDS) {
            const FillSampledIds& f = as<FillSampledIds>(c.first);
            parallel_for_parts(
                queue, f.tokens, thread, [&](int part, int parts) { fill_sampled_ids_part(f, part, parts); });
        }
        if (c.kind == DECODE)
            decode_part(as<Decoder>(c.first), as<DecoderStep>(c.second), queues_, at, *fetch++, thread);
        if (c.kind == MATMUL) queue.wait(matmul_part(as<Matmul>(c.first), {queue, thread, nullptr}));
        if (c.kind == SAMPLE) {
            const Sample& s = as<Sample>(c.first);
            parallel_for_parts(queue, s.draws, thread, [&](int part, int parts) { sample_part(s, part, parts); });
        }
        at += queues_of(c);
    }
}

BackgroundThread::~BackgroundThread() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        submitted_.store(STOP, std::memory_order_release);
    }
    more_.notify_one();
    worker_.join();
}

void BackgroundThread::submit(const Command* commands, int64_t count, int threads) {
    const int64_t number = submitted_.load(std::memory_order_relaxed) + 1;
    buffers_[number % 2].reset(new CommandBuffer(commands, count, threads));
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        submitted_.store(number, std::memory_order_release);
    }
    more_.notify_one();
    finish(number - 1);
}

void BackgroundThread::join() { finish(submitted_.load(std::memory_order_relaxed)); }

void BackgroundThread::finish(int64_t number) {
    if (finished_ == number) return;
    std::unique_ptr<CommandBuffer>& buffer = buffers_[number % 2];
    buffer->run(buffer->threads - 1);
    // All units are done; wait until the other threads have left the buffer.
    spin_until([&] { return done_.load(std::memory_order_acquire) >= number; });
    buffer.reset();
    finished_ = number;
}

void BackgroundThread::work() {
    for (int64_t number = 1;; number++) {
        await(number);
        if (submitted_.load(std::memory_order_acquire) == STOP) return;
        CommandBuffer& buffer = *buffers_[number % 2];
        // A region may get fewer threads than it asks for.
#pragma omp parallel num_threads(buffer.threads - 1) if (buffer.threads > 2)
        buffer.run(omp_get_thread_num());
        done_.store(number, std::memory_order_release);
    }
}

// Spins first: the next command buffer usually comes sooner than sleeping would pay off.
void BackgroundThread::await(int64_t number) {
    const auto ready = [&] {
        const int64_t submitted = submitted_.load(std::memory_order_acquire);
        return submitted >= number || submitted == STOP;
    };
    for (int64_t spins = 0; spins < SPINS; spins++) {
        if (ready()) return;
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    more_.wait(lock, ready);
}

}  // namespace bg

extern "C" {

bg::BackgroundThread* bg_background_new() { return new bg::BackgroundThread; }

void bg_background_submit(bg::BackgroundThread* b, const bg::Command* commands, int64_t count, int64_t threads) {
    b->submit(commands, count, int(threads));
}

void bg_background_join(bg::BackgroundThread* b) { b->join(); }

void bg_background_delete(bg::BackgroundThread* b) { delete b; }
}
