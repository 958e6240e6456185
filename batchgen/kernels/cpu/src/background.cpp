#include "background.h"

namespace bg {
namespace {

constexpr int64_t STOP = -1;

template <class T>
const T& as(const void* p) {
    return *static_cast<const T*>(p);
}

int64_t claims_of(const Operation& o) { return o.kind == DECODE ? decode_claims(as<Decoder>(o.first)) : 1; }

int64_t all_claims(const std::vector<Operation>& operations) {
    int64_t claims = 0;
    for (const Operation& o : operations) claims += claims_of(o);
    return claims;
}

}  // namespace

Program::Program(const Operation* operations, int64_t count, int threads)
    : threads(threads), operations_(operations, operations + count), claims_(all_claims(operations_), threads) {
    for (const Operation& o : operations_)
        if (o.kind == DECODE) fetches_.emplace_back(*as<DecoderStep>(o.second).attention, as<Decoder>(o.first).num_layers);
}

void Program::part(int thread) {
    int64_t at = 0;
    KvFetch* fetch = fetches_.data();
    for (const Operation& o : operations_) {
        const Claims claims = claims_.of(at);
        if (o.kind == COPY) {
            const PageCopies& p = as<PageCopies>(o.first);
            by_parts(claims, p.num_caches, thread, [&](int part, int parts) { page_copies_part(p, part, parts); });
        }
        if (o.kind == FEED) {
            const Feed& f = as<Feed>(o.first);
            by_parts(claims, f.tokens, thread, [&](int part, int parts) { feed_part(f, part, parts); });
        }
        if (o.kind == DECODE) decode_part(as<Decoder>(o.first), as<DecoderStep>(o.second), claims_, at, *fetch++, thread);
        if (o.kind == PRODUCT) claims.wait(matmul_part(as<Matmul>(o.first), {claims, thread, nullptr}));
        if (o.kind == SAMPLE) {
            const Sample& s = as<Sample>(o.first);
            by_parts(claims, s.draws, thread, [&](int part, int parts) { sample_part(s, part, parts); });
        }
        at += claims_of(o);
    }
}

Background::~Background() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        begun_.store(STOP, std::memory_order_release);
    }
    more_.notify_one();
    worker_.join();
}

void Background::begin(const Operation* operations, int64_t count, int threads) {
    const int64_t turn = begun_.load(std::memory_order_relaxed) + 1;
    programs_[turn % 2].reset(new Program(operations, count, threads));
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        begun_.store(turn, std::memory_order_release);
    }
    more_.notify_one();
    end(turn - 1);
}

void Background::join() { end(begun_.load(std::memory_order_relaxed)); }

void Background::end(int64_t turn) {
    if (ended_ == turn) return;
    std::unique_ptr<Program>& program = programs_[turn % 2];
    program->part(program->threads - 1);
    spin_until([&] { return done_.load(std::memory_order_acquire) >= turn; });  // they are on their way out
    program.reset();
    ended_ = turn;
}

void Background::work() {
    for (int64_t turn = 1;; turn++) {
        await(turn);
        if (begun_.load(std::memory_order_acquire) == STOP) return;
        Program& program = *programs_[turn % 2];
        // A region may get fewer threads than it asks for.
#pragma omp parallel num_threads(program.threads - 1) if (program.threads > 2)
        program.part(omp_get_thread_num());
        done_.store(turn, std::memory_order_release);
    }
}

// The next program mostly comes before it is worth while to sleep.
void Background::await(int64_t turn) {
    const auto there = [&] {
        const int64_t begun = begun_.load(std::memory_order_acquire);
        return begun >= turn || begun == STOP;
    };
    for (int64_t spins = 0; spins < SPINS; spins++) {
        if (there()) return;
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    more_.wait(lock, there);
}

}  // namespace bg

extern "C" {

bg::Background* bg_background_new() { return new bg::Background; }

void bg_background_begin(bg::Background* b, const bg::Operation* operations, int64_t count, int64_t threads) {
    b->begin(operations, count, int(threads));
}

void bg_background_join(bg::Background* b) { b->join(); }

void bg_background_delete(bg::Background* b) { delete b; }
}
