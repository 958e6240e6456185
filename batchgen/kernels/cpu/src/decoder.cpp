#include "decoder.h"

#include "barrier.h"

namespace bg {
namespace {

class Run {
  public:
    Run(const Decoder& d, const DecoderStep& s, Barrier& barrier, Claims (&claims)[2], int thread, int threads)
        : d_(d), s_(s), barrier_(barrier), claims_(claims), tokens_(s.tokens), x_(s.x), attended_(s.attended),
          thread_(thread), threads_(threads) {}

    void operator()() {
        embed();
        norm(nullptr, d_.layers[0].input_norm, 0);
        for (int64_t l = 0; l < d_.num_layers; l++) {
            const DecoderLayer& layer = d_.layers[l];
            product(layer.qkv, layer.qkv_lora, s_.product_in, s_.qkv, s_.wide);
            attend(layer, l);
            if (s_.num_wanted >= 0 && l + 1 == d_.num_layers) pick();
            product(layer.o, layer.o_lora, attended_, s_.delta, 0);
            norm(s_.delta, layer.post_norm, 0);
            product(layer.gate_up, layer.gate_up_lora, s_.product_in, s_.gate_up, s_.wide);
            gated_part({s_.gate_up, s_.activated, tokens_, d_.inner, d_.activation, d_.dtype, s_.wide},
                       thread_, threads_);
            barrier_.wait();
            product(layer.down, layer.down_lora, s_.activated, s_.delta, s_.wide);
            norm(s_.delta, l + 1 < d_.num_layers ? d_.layers[l + 1].input_norm : d_.final_norm, l + 1);
        }
    }

  private:
    void embed() {
        // The rows that this thread normalises next: no barrier.
        if (s_.ids) embed_part({s_.ids, d_.embedding, s_.x, s_.tokens, row_bytes()}, thread_, threads_);
        tap(0);
    }

    void attend(const DecoderLayer& layer, int64_t l) {
        const Attention& a = *s_.attention;
        heads_part({s_.qkv, layer.q_norm, layer.k_norm, s_.cos, s_.sin, s_.positions, const_cast<void*>(a.keys[l]),
                    const_cast<void*>(a.values[l]), s_.slots, s_.tokens, d_.heads, d_.kv_heads, d_.dim, d_.dtype,
                    d_.eps},
                   thread_, threads_);
        barrier_.wait();
        attention_items_part(a, l, thread_, threads_);
        barrier_.wait();
        attention_merge_part(a, l, thread_, threads_);
        if (a.lists[l]->num_merges) barrier_.wait();
    }

    // From here on there are the wanted tokens alone: nobody reads more of the others than their keys and values.
    void pick() {
        const int64_t head_bytes = d_.heads * d_.dim * (d_.dtype ? 2 : 4);
        const Span span(s_.num_wanted, thread_, threads_);
        for (int64_t i = span.begin; i < span.end; i++) {
            copy_row(s_.wanted_x, i, s_.x, s_.wanted[i], row_bytes());
            copy_row(s_.qkv, i, s_.attended, s_.wanted[i], head_bytes);  // the queries have been used
        }
        tokens_ = s_.num_wanted, x_ = s_.wanted_x, attended_ = s_.qkv;
        barrier_.wait();
    }

    static void copy_row(void* to, int64_t i, const void* from, int64_t j, int64_t bytes) {
        std::memcpy(static_cast<char*>(to) + i * bytes, static_cast<const char*>(from) + j * bytes, bytes);
    }

    void product(const Matmul& weight, const LoraStack* lora, const void* x, void* out, int64_t wide) {
        Matmul m = weight;
        m.x = x;
        m.x_wide = wide;
        m.out = out;
        m.rows = tokens_;
        m.x_stride = m.inner;
        m.out_stride = m.outer;
        m.scratch = s_.scratch;
        // Two take turns: the other is at rest, for all threads are behind the barrier that ended the last product.
        if (!thread_) claims_[(products_ + 1) % 2].reset();
        matmul_part(m, claims_[products_++ % 2], thread_, threads_);
        if (!s_.lora) lora = nullptr;
        if (lora) lora_down_part(*lora, *s_.lora, x, m.inner, thread_, threads_);
        barrier_.wait();
        if (!lora) return;
        lora_up_part(*lora, *s_.lora, out, m.outer, thread_, threads_);
        barrier_.wait();
    }

    // x += delta and its norm, the last layer's into the result. Taps are copied by the thread that has added the row.
    void norm(const void* delta, const void* weight, int64_t tapped) {
        const bool last = tapped == d_.num_layers;
        norm_part({x_, delta, weight, last ? s_.normed : s_.product_in, tokens_, d_.hidden, d_.dtype, d_.eps,
                   last ? 0 : s_.wide},
                  thread_, threads_);
        if (tapped) tap(tapped);
        barrier_.wait();
    }

    void tap(int64_t at) {
        if (!s_.taps[at]) return;
        const Span span(tokens_, thread_, threads_);
        const int64_t from = span.begin * row_bytes();
        std::memcpy(static_cast<char*>(s_.taps[at]) + from, static_cast<const char*>(x_) + from,
                    (span.end - span.begin) * row_bytes());
    }

    int64_t row_bytes() const { return d_.hidden * (d_.dtype ? 2 : 4); }

    const Decoder& d_;
    const DecoderStep& s_;
    Barrier& barrier_;
    Claims (&claims_)[2];
    int64_t products_ = 0, tokens_;
    void* x_;
    const void* attended_;
    const int thread_, threads_;
};

}  // namespace
}  // namespace bg

extern "C" void bg_decode(const bg::Decoder* d, const bg::DecoderStep* s, int threads) {
    // A region may get fewer threads than it asks for.
    bg::Barrier* barrier = nullptr;
    bg::Claims claims[2];
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        barrier = new bg::Barrier(omp_get_num_threads());
        bg::Run(*d, *s, *barrier, claims, omp_get_thread_num(), omp_get_num_threads())();
    }
    delete barrier;
}
