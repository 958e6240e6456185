#include "decoder.h"

#include <algorithm>
#include <vector>

namespace bg {
namespace {

class Run {
  public:
    // Most operations of a layer, and operations before the first layer.
    static constexpr int64_t PER_LAYER = 20, BEFORE = 1;

    // The queues from number `first` on are unused, one for each operation.
    Run(const Decoder& d, const DecoderStep& s, WorkStealingQueues& queues, int64_t first, KvFetch& fetch, int thread)
        : d_(d), s_(s), queues_(queues), next_queue_(first), fetch_(fetch), tokens_(s.tokens), x_(s.x),
          attended_(s.attended), thread_(thread) {}

    void operator()() {
        begin();
        for (int64_t l = 0; l < d_.num_layers; l++) {
            const DecoderLayer& layer = d_.layers[l];
            product(layer.qkv, layer.qkv_lora, s_.product_in, s_.qkv, s_.wide, nullptr);
            attend(layer, l);
            attended_layers_ = l + 1;
            if (s_.num_wanted >= 0 && l + 1 == d_.num_layers) select_wanted();
            product(layer.o, layer.o_lora, attended_, s_.delta, 0, &layer.gate_up);
            norm(s_.delta, layer.post_norm, 0);
            product(layer.gate_up, layer.gate_up_lora, s_.product_in, s_.gate_up, s_.wide, &layer.down);
            parallel_for_parts(tokens_, [&](int part, int parts) {
                gated_part({s_.gate_up, s_.activated, tokens_, d_.inner, d_.activation, d_.dtype, s_.wide}, part,
                           parts);
            });
            product(
                layer.down, layer.down_lora, s_.activated, s_.delta, s_.wide,
                l + 1 < d_.num_layers ? &d_.layers[l + 1].qkv : nullptr);
            norm(s_.delta, l + 1 < d_.num_layers ? d_.layers[l + 1].input_norm : d_.final_norm, l + 1);
        }
    }

  private:
    template <class Part>
    void parallel_for_parts(int64_t rows, Part part) {
        bg::parallel_for_parts(next_queue(), rows, thread_, part);
    }

    WorkStealingQueue next_queue() { return queues_.of(next_queue_++); }

    void begin() {
        parallel_for_parts(tokens_, [&](int part, int parts) {
            if (s_.ids) embed_part(embedding(), part, parts);
            capture(0, part, parts);
            norm_part(norm_of(nullptr, d_.layers[0].input_norm, false), part, parts);
        });
    }

    void attend(const DecoderLayer& layer, int64_t l) {
        const Attention& a = *s_.attention;
        const AttentionList& list = *a.lists[l];
        const Heads heads{s_.qkv, layer.q_norm, layer.k_norm, s_.cos, s_.sin, s_.positions,
                          const_cast<void*>(a.keys[l]), const_cast<void*>(a.values[l]), s_.slots, s_.tokens, d_.heads,
                          d_.kv_heads, d_.dim, d_.dtype, d_.eps};
        parallel_for_parts(s_.tokens, [&](int part, int parts) { heads_part(heads, part, parts); });
        const WorkStealingQueue items = next_queue();
        attention_items_part(a, l, items, thread_);
        items.wait(list.num_items);
        parallel_for_parts(list.num_merges, [&](int part, int parts) { attention_merge_part(a, l, part, parts); });
    }

    // Continues with the wanted tokens only: of the others, only keys and values are read later.
    void select_wanted() {
        const int64_t head_bytes = d_.heads * d_.dim * (d_.dtype ? 2 : 4);
        parallel_for_parts(s_.num_wanted, [&](int part, int parts) {
            const Span span(s_.num_wanted, part, parts);
            for (int64_t i = span.begin; i < span.end; i++) {
                copy_row(s_.wanted_x, i, s_.x, s_.wanted[i], row_bytes());
                copy_row(s_.qkv, i, s_.attended, s_.wanted[i], head_bytes);  // the queries have been used
            }
        });
        tokens_ = s_.num_wanted, x_ = s_.wanted_x, attended_ = s_.qkv;
    }

    static void copy_row(void* to, int64_t i, const void* from, int64_t j, int64_t bytes) {
        std::memcpy(static_cast<char*>(to) + i * bytes, static_cast<const char*>(from) + j * bytes, bytes);
    }

    void product(
        const Matmul& weight, const LoraStack* lora, const void* x, void* out, int64_t wide, const Matmul* next) {
        Matmul m = weight;
        m.x = x;
        m.x_wide = wide;
        m.out = out;
        m.rows = tokens_;
        m.x_stride = m.inner;
        m.out_stride = m.outer;
        m.scratch = s_.scratch;
        const WorkStealingQueue queue = next_queue();
        const int64_t units = matmul_part(m, {queue, thread_, fetch_.layer(attended_layers_, thread_), next});
        if (!s_.lora) lora = nullptr;
        const auto down = [&](int part, int parts) { lora_down_part(*lora, *s_.lora, x, m.inner, part, parts); };
        if (lora) parallel_for_parts(tokens_, down);
        queue.wait(units);
        const auto up = [&](int part, int parts) { lora_up_part(*lora, *s_.lora, out, m.outer, part, parts); };
        if (lora) parallel_for_parts(tokens_, up);
    }

    // x += delta and its norm; after the last layer the norm is the result. The thread that updates a row captures it.
    void norm(const void* delta, const void* weight, int64_t layer) {
        const Norm n = norm_of(delta, weight, layer == d_.num_layers);
        parallel_for_parts(tokens_, [&](int part, int parts) {
            norm_part(n, part, parts);
            if (layer) capture(layer, part, parts);
        });
    }

    Norm norm_of(const void* delta, const void* weight, bool last) const {
        return {x_, delta, weight, last ? s_.normed : s_.product_in, tokens_, d_.hidden, d_.dtype, d_.eps,
                last ? 0 : s_.wide};
    }

    void capture(int64_t at, int part, int parts) {
        if (!s_.capture[at]) return;
        const Span span(tokens_, part, parts);
        const int64_t from = span.begin * row_bytes();
        std::memcpy(static_cast<char*>(s_.capture[at]) + from, static_cast<const char*>(x_) + from,
                    (span.end - span.begin) * row_bytes());
    }

    Embed embedding() const {
        return {s_.ids, d_.embedding, s_.x, s_.tokens, row_bytes(), d_.packed_embedding};
    }

    int64_t row_bytes() const { return d_.hidden * (d_.dtype ? 2 : 4); }

    const Decoder& d_;
    const DecoderStep& s_;
    WorkStealingQueues& queues_;
    int64_t next_queue_;  // number of the next operation's queue
    KvFetch& fetch_;
    int64_t attended_layers_ = 0;
    int64_t tokens_;
    void* x_;
    const void* attended_;
    const int thread_;
};

}  // namespace

// One queue per operation: a thread that is several operations late finds their units claimed.
int64_t decode_queues(const Decoder& d) { return Run::BEFORE + Run::PER_LAYER * d.num_layers; }

void decode_part(
    const Decoder& d, const DecoderStep& s, WorkStealingQueues& queues, int64_t first, KvFetch& fetch, int thread) {
    Run(d, s, queues, first, fetch, thread)();
}

}  // namespace bg

extern "C" void bg_decode(const bg::Decoder* d, const bg::DecoderStep* s, int threads) {
    bg::WorkStealingQueues queues(bg::decode_queues(*d), threads);
    bg::KvFetch fetch(*s->attention, d->num_layers);
    // A region may get fewer threads than it asks for.
#pragma omp parallel num_threads(threads)
    bg::decode_part(*d, *s, queues, 0, fetch, omp_get_thread_num());
}
