#include "attention.h"

#include <cstdlib>
#include <memory>

#include "attention_bfp.h"
#include "attention_dot.h"
#include "attention_few_dots.h"
#include "attention_rows.h"

namespace bg {
namespace {

// Workspace of a thread, kept between calls; it grows as needed.
class Scratch {
  public:
    char* take(int64_t bytes) {
        if (bytes > size_) {
            memory_.reset(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) & ~int64_t(63))));
            size_ = bytes;
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(char* p) const { std::free(p); }
    };
    std::unique_ptr<char, Free> memory_;
    int64_t size_ = 0;
};

thread_local Scratch scratch;

// Divides a workspace into arrays aligned to cache lines. With null memory it only counts bytes.
class Arrays {
  public:
    explicit Arrays(char* at) : at_(at) {}
    template <class V>
    V* take(int64_t count) {
        V* taken = reinterpret_cast<V*>(at_ + used_);
        used_ += (count * int64_t(sizeof(V)) + 63) & ~int64_t(63);
        return taken;
    }
    int64_t used() const { return used_; }

  private:
    char* at_;
    int64_t used_ = 0;
};

// Factor that normalises a row's sums.
float normalizer(float max, float total, const float* sink) {
    if (!sink) return total == 0.0f ? 0.0f : 1.0f / total;
    const float top = std::max(max, *sink);
    const float weight = exp_nonpositive(max - top);
    return weight / (total * weight + exp_nonpositive(*sink - top));
}

// Writes rows' sums to the output, or to parts with their log-sum-exp.
template <class T>
void finish(
    const Attention& a, const AttentionList& l, int64_t layer, const Item& item, int64_t head, const Rows& rows,
    bool by_units) {
    const int64_t group = l.heads / l.kv_heads, dim = l.value_dim;
    const int64_t units = by_units ? dim / UNIT * UNIT : 0;
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t i = r / group, q_head = head * group + r % group;
        const float* sums = rows.sums + r * rows.width;
        const auto emit = [&](auto* out, float factor) {
            for (int64_t d = 0; d < units; d += UNIT)
                store_unit<T>(out + d, load(sums + d) * factor, load(sums + d + LANES) * factor);
            int64_t d = units;
            for (; d + LANES <= dim; d += LANES) store(out + d, load(sums + d) * factor);
            for (; d < dim; d++) put(out + d, sums[d] * factor);
        };
        if (item.part_at < 0) {
            const float* sinks = a.sinks ? a.sinks[layer] : nullptr;
            const float factor = normalizer(rows.max[r], rows.total[r], sinks ? sinks + q_head : nullptr);
            emit(static_cast<T*>(a.out) + item.tokens[i] * a.out_stride + q_head * dim, factor);
            continue;
        }
        const int64_t part = (item.part_at + i) * l.heads + q_head;
        const float total = rows.total[r];
        if (l.block) {
            l.part_lse[2 * part] = rows.max[r], l.part_lse[2 * part + 1] = total;
            emit(l.part_out + part * dim, 1.0f);
            continue;
        }
        l.part_lse[part] = total == 0.0f ? -__builtin_inff() : rows.max[r] + std::log(total);
        emit(l.part_out + part * dim, normalizer(rows.max[r], total, nullptr));
    }
}

// `next`: the item that this thread computes afterwards, or null; `prefetched`: this item was the previous `next`.
template <class T>
void run_item(const Attention& a, int64_t layer, const Item& item, const Item* next, bool prefetched) {
    const AttentionList& l = *a.lists[layer];
    const bool few = item.few(l), dots = by_dots<T>(l, item), bfp = !dots && by_bfp<T>(l, item);
    const int64_t block = many_block(l), count = item.query_rows(l);
    BfpBlock numbers(l, block);
    DotBlock pairs(l);
    const int64_t width = bfp ? numbers.columns : dots ? pairs.columns : round_up(l.value_dim, LANES);
    const int64_t heads = few ? item.heads() : 1;  // heads whose state is held at once
    int32_t* slots = nullptr;
    float *query = nullptr, *sums = nullptr, *max = nullptr, *total = nullptr;
    int64_t *from = nullptr, *to = nullptr;
    float *panels = nullptr, *wide = nullptr, *scores = nullptr;
    float *block_sums = nullptr, *block_max = nullptr, *block_total = nullptr;
    char* memory = nullptr;
    for (int pass = 0; pass < 2; pass++) {
        Arrays arrays(memory);
        slots = arrays.take<int32_t>(item.keys());
        query = arrays.take<float>(heads * count * l.key_dim);
        sums = arrays.take<float>(heads * count * width);
        max = arrays.take<float>(heads * count);
        total = arrays.take<float>(heads * count);
        from = arrays.take<int64_t>(count);
        to = arrays.take<int64_t>(count);
        if (bfp) {
            numbers.take(arrays, count);
        } else if (dots) {
            pairs.take(arrays, count);
        } else if (!few) {
            panels = arrays.take<float>(block * l.key_dim);
            wide = arrays.take<float>(block * width);
            scores = arrays.take<float>(TILE * block);
        }
        if (l.block) {
            block_sums = arrays.take<float>(count * width);
            block_max = arrays.take<float>(count);
            block_total = arrays.take<float>(count);
        }
        if (!pass) memory = scratch.take(arrays.used());
    }
    const auto rows_of = [&](int64_t head) {
        const int64_t at = few ? (head - item.head) * count : 0;
        return Rows{count, query + at * l.key_dim, sums + at * width, max + at, total + at, from, to, width};
    };
    const auto begin = [&](int64_t head) {
        begin_rows(l, item, rows_of(head));
        load_queries<T>(a, l, item, head, rows_of(head), few);
    };
    slots_of(l, item, slots);
    if (few) {
        const bool by_dots = few_by_dots<T>(l, item);
        for (int64_t head = item.head; head < item.end_head; head++)
            by_dots ? begin_rows(l, item, rows_of(head)) : begin(head);
        const auto run = [&](int64_t head, int64_t b, int64_t keys, Prefetcher<T>& prefetcher) {
            const HeadCache<T> cache(a, l, layer, head);
            const auto rows = [&](auto n) {
                if (by_dots) few_dots<T, n()>(a, l, item, head, cache, slots + b, b, keys, rows_of(head), prefetcher);
                else few_rows<T, n()>(a, l, cache, slots + b, b, keys, rows_of(head), prefetcher);
            };
            with_constant<FEW>(count, rows);
        };
        few_item<T>(a, l, layer, item, next && next->few(l) ? next : nullptr, prefetched, run);
        for (int64_t head = item.head; head < item.end_head; head++)
            finish<T>(a, l, layer, item, head, rows_of(head), !by_dots);
        return;
    }
    for (int64_t head = item.head; head < item.end_head; head++) {
        const HeadCache<T> cache(a, l, layer, head);
        if (dots) {
            begin_rows(l, item, rows_of(head));
            dot_item<T>(a, l, layer, item, head, slots, rows_of(head), pairs);
            finish<T>(a, l, layer, item, head, rows_of(head), false);
            continue;
        }
        begin(head);
        if (bfp) {
            bfp_rows<T>(a, l, item, cache, slots, rows_of(head), numbers);
            finish<T>(a, l, layer, item, head, rows_of(head), false);
            continue;
        }
        const Rows block_rows{count, query, block_sums, block_max, block_total, from, to, width};
        if (l.block) begin_rows(l, item, block_rows);
        many_rows<T>(a, l, item, cache, slots, rows_of(head), l.block ? &block_rows : nullptr, panels, wide, scores);
        finish<T>(a, l, layer, item, head, rows_of(head), false);
    }
}

template <class T>
void merge_token(const Attention& a, const AttentionList& l, int64_t layer, const int32_t* merge) {
    const int64_t heads = l.heads, dim = l.value_dim, padded = round_up(heads, LANES);
    const int32_t* parts = l.parts + merge[1];
    const int64_t count = merge[2];
    Arrays arrays(scratch.take(4 * (padded * (count + 2) + round_up(dim, LANES)) + 64 * 4));
    float* weights = arrays.take<float>(count * padded);  // holds log-sum-exps first
    float* top = arrays.take<float>(padded);
    float* total = arrays.take<float>(padded);
    float* result = arrays.take<float>(round_up(dim, LANES));
    const float* sinks = a.sinks ? a.sinks[layer] : nullptr;
    std::fill(top, top + padded, LOWEST);
    std::fill(total, total + padded, 0.0f);
    if (sinks) std::copy(sinks, sinks + heads, top);
    for (int64_t i = 0; i < count; i++) {
        float* lse = weights + i * padded;
        std::copy(l.part_lse + parts[i] * heads, l.part_lse + (parts[i] + 1) * heads, lse);
        std::fill(lse + heads, lse + padded, LOWEST);
        for (int64_t n = 0; n < padded; n += LANES) store(top + n, max(load(top + n), load(lse + n)));
    }
    for (int64_t n = 0; n < heads && sinks; n++) total[n] = exp_nonpositive(sinks[n] - top[n]);
    for (int64_t i = 0; i < count; i++)
        for (int64_t n = 0; n < padded; n += LANES) {
            const vf w = exp_nonpositive(load(weights + i * padded + n) - load(top + n));
            store(weights + i * padded + n, w);
            store(total + n, load(total + n) + w);
        }
    T* out = static_cast<T*>(a.out) + merge[0] * a.out_stride;
    for (int64_t n = 0; n < heads; n++, out += dim) {
        std::fill(result, result + dim, 0.0f);
        for (int64_t i = 0; i < count; i++) {
            const float w = weights[i * padded + n];
            if (w == 0.0f) continue;  // a part without keys
            const float* part = l.part_out + (parts[i] * heads + n) * dim;
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) store(result + d, load(result + d) + load(part + d) * w);
            for (; d < dim; d++) result[d] += part[d] * w;
        }
        const float factor = total[n] == 0.0f ? 0.0f : 1.0f / total[n];
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) store(out + d, load(result + d) * factor);
        for (; d < dim; d++) put(out + d, result[d] * factor);
    }
}

// The same for a deterministic list: parts are merged in order.
template <class T>
void merge_token_in_order(const Attention& a, const AttentionList& l, int64_t layer, const int32_t* merge) {
    const int64_t heads = l.heads, dim = l.value_dim;
    const int32_t* parts = l.parts + merge[1];
    float* sums = Arrays(scratch.take(4 * dim + 64)).take<float>(dim);
    T* out = static_cast<T*>(a.out) + merge[0] * a.out_stride;
    for (int64_t n = 0; n < heads; n++, out += dim) {
        float max = LOWEST, total = 0.0f;
        std::fill(sums, sums + dim, 0.0f);
        for (int64_t i = 0; i < merge[2]; i++) {
            const int64_t part = parts[i] * heads + n;
            SoftmaxState{sums, &max, &total}.merge(
                l.part_out + part * dim, l.part_lse[2 * part], l.part_lse[2 * part + 1], dim);
        }
        const float factor = normalizer(max, total, a.sinks && a.sinks[layer] ? a.sinks[layer] + n : nullptr);
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) store(out + d, load(sums + d) * factor);
        for (; d < dim; d++) put(out + d, sums[d] * factor);
    }
}

}  // namespace

void attention_items_part(const Attention& a, int64_t layer, const WorkStealingQueue& queue, int thread) {
    const AttentionList& l = *a.lists[layer];
    // The list may have been made for another number of threads.
    const auto begin = [&](int share) { return l.shares[l.num_shares * share / queue.shares]; };
    Claim at = queue.pop_one(thread, begin);
    for (bool prefetched = false; at;) {
        const Item item(l, at.begin);
        // A thread claims its next item before it has finished the current one, to prefetch for it; but not a share's
        // last items, which a free thread could compute at once.
        const bool early = at.begin + 2 * queue.sharing < begin(at.share + 1);
        const Claim next_at = early ? queue.pop_one(thread, begin) : Claim{};
        const Item next(l, next_at ? next_at.begin : at.begin);
        const Item* known = next_at ? &next : nullptr;
        if (l.dtype == 0) {
            run_item<float>(a, layer, item, known, prefetched);
        } else {
            run_item<bf16>(a, layer, item, known, prefetched);
        }
        prefetched = known && item.few(l);
        queue.done(at);
        at = known ? next_at : queue.pop_one(thread, begin);
    }
}

void attention_merge_part(const Attention& a, int64_t layer, int part, int parts) {
    const AttentionList& l = *a.lists[layer];
    const Span span(l.num_merges, part, parts);
    for (int64_t i = span.begin; i < span.end; i++) {
        const int32_t* merge = l.merges + 3 * i;
        const auto of = [&](auto zero) {
            using T = decltype(zero);
            l.block ? merge_token_in_order<T>(a, l, layer, merge) : merge_token<T>(a, l, layer, merge);
        };
        l.dtype == 0 ? of(float{}) : of(bf16{});
    }
}

std::vector<int32_t> attention_pages(const AttentionList& l, int64_t share, int64_t most) {
    std::vector<int32_t> pages;
    for (int64_t i = l.shares[share]; i < l.shares[share + 1]; i++) {
        const Item item(l, i);
        if (!item.few(l) || item.head) continue;  // an item split by key head has one entry per head
        for (int64_t p = item.first / l.page_size; p * l.page_size < item.end; p++) {
            if (int64_t(pages.size()) == most) return pages;
            pages.push_back(item.pages[p]);
        }
    }
    return pages;
}

}  // namespace bg

extern "C" void bg_attention(const bg::Attention* a, int64_t layer, int64_t threads) {
    bg::WorkStealingQueues queues(1, int(threads));
    const bg::WorkStealingQueue items = queues.of(0);
#pragma omp parallel num_threads(threads)
    {
        bg::attention_items_part(*a, layer, items, omp_get_thread_num());
        items.wait(a->lists[layer]->num_items);
        bg::attention_merge_part(*a, layer, omp_get_thread_num(), omp_get_num_threads());
    }
}
