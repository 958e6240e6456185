// A work item's query rows times its keys, for one key head: few rows with keys read in place, or tiles of many rows
// with blocks of transposed keys. Included only by attention.cpp.
#pragma once

#include <type_traits>
#include <utility>

#include "attention.h"
#include "attention_math.h"
#include "rows.h"

namespace bg {
namespace {

constexpr int FEW = 6;            // most query rows for which keys are read row by row, not transposed
constexpr int FEW_BLOCK = 256;    // most positions between two updates of the running softmax
constexpr int PREFETCH_KEYS = 4;  // positions between two calls of a prefetcher
constexpr int64_t PREFETCH_BYTES = 256 << 10;  // of a block; it and the next one fit the L2 cache
// Tile sizes whose sums fit into the registers together with their operands.
constexpr int KEY_PANEL = (REGISTERS == 32 ? 3 : 2) * LANES;  // positions of a panel of transposed keys
constexpr int TILE = REGISTERS == 32 ? 8 : 6;             // query rows multiplied together
constexpr int FEW_VECTORS = REGISTERS / 8;                // vectors of a value, summed together
template <int R>
constexpr int FEW_KEYS = R * 4 <= REGISTERS - 4 ? 4 : 2;  // keys whose scores are computed together

// Positions whose keys are transposed together: their keys and values fit the L2 cache.
int64_t many_block(const AttentionList& l) {
    if (l.block) return l.block;
    const int64_t dim = std::max(l.key_dim, l.value_dim);
    return (dim <= 128 ? 192 : dim <= 256 ? 96 : 48) / KEY_PANEL * KEY_PANEL;
}

// Decoded fields of a work item.
struct Item {
    const int32_t* tokens;
    const int32_t* pages;
    const int32_t* versions;  // or null
    int64_t count, base, first, end, part_at, head, end_head;
    int64_t lead;  // in a deterministic list: positions from the block's begin to the item's, which no token sees

    Item(const AttentionList& l, int64_t index) {
        const int32_t* f = l.items + index * ITEM_FIELDS;
        tokens = l.tokens + f[ROWS_AT];
        pages = l.pages + f[PAGE_AT];
        versions = l.versions ? l.versions + f[PAGE_AT] : nullptr;
        count = f[COUNT], base = f[BASE], first = f[FIRST], end = f[END], part_at = f[PART_AT];
        head = std::max<int64_t>(f[HEAD], 0), end_head = f[HEAD] < 0 ? l.kv_heads : head + 1;
        lead = l.block ? first % l.block : 0;
        first -= lead;  // so that a position's lane does not depend on where the item begins
    }
    int64_t keys() const { return end - first; }
    int64_t heads() const { return end_head - head; }
    int64_t query_rows(const AttentionList& l) const { return count * (l.heads / l.kv_heads); }
    bool few(const AttentionList& l) const {
        return !l.block && query_rows(l) <= FEW && l.key_dim % LANES == 0 && l.value_dim % LANES == 0;
    }
};

// The query rows of an item for one key head: token i's query head g is row i * G + g.
struct Rows {
    int64_t count;
    float* query;        // [rows, D], multiplied by the scale
    float* sums;         // [rows, Dv], rows `width` apart: sums of e^(score - max) * value
    float *max, *total;  // [rows]
    int64_t *from, *to;  // [rows] visible positions, counted from the item's first key
    int64_t width;
};

void slots_of(const AttentionList& l, const Item& item, int32_t* slots) {
    const int32_t size = int32_t(l.page_size);
    const int64_t first = item.first + item.lead;
    if (item.lead) std::fill(slots, slots + item.lead, int32_t(item.pages[first / size] * size + first % size));
    slots += item.lead;
    for (int64_t k = first; k < item.end;) {
        const int32_t in_page = int32_t(k % size), run = int32_t(std::min<int64_t>(size - in_page, item.end - k));
        const int32_t slot = item.pages[k / size] * size + in_page;
        for (int32_t i = 0; i < run; i++) slots[i] = slot + i;
        slots += run, k += run;
    }
}

void begin_rows(const AttentionList& l, const Item& item, const Rows& rows) {
    const int64_t group = l.heads / l.kv_heads;
    for (int64_t i = 0; i < item.count; i++) {
        const int64_t position = l.positions[item.tokens[i]] - item.base;
        const int64_t to = std::min(item.end, position + 1) - item.first;
        const int64_t from = l.window ? std::max<int64_t>(position - l.window + 1 - item.first, 0) : 0;
        for (int64_t r = i * group; r < (i + 1) * group; r++) {
            rows.from[r] = from, rows.to[r] = to;
            rows.max[r] = LOWEST, rows.total[r] = 0.0f;
        }
    }
    std::fill(rows.sums, rows.sums + rows.count * rows.width, 0.0f);
}

// In the order of `load_unit` if `by_units`, else in plain order.
template <class T>
void load_queries(
    const Attention& a, const AttentionList& l, const Item& item, int64_t head, const Rows& rows, bool by_units) {
    const int64_t group = l.heads / l.kv_heads, dim = l.key_dim;
    const int64_t units = by_units ? dim / UNIT * UNIT : 0;
    float* to = rows.query;
    for (int64_t i = 0; i < item.count; i++) {
        const T* q = static_cast<const T*>(a.query) + item.tokens[i] * a.query_stride + head * group * dim;
        for (int64_t g = 0; g < group; g++, q += dim, to += dim) {
            for (int64_t d = 0; d < units; d += UNIT) {
                vf x, y;
                load_unit(q + d, x, y);
                store(to + d, x * a.scale);
                store(to + d + LANES, y * a.scale);
            }
            for (int64_t d = units; d < dim; d++) to[d] = widen(q[d]) * a.scale;
        }
    }
}

// Positions of a block for few query rows, over all of the item's heads.
template <class T>
int64_t few_block(const AttentionList& l, const Item& item) {
    const int64_t bytes = item.heads() * (l.key_dim + l.value_dim) * int64_t(sizeof(T));
    return std::clamp<int64_t>(PREFETCH_BYTES / bytes / LANES * LANES, LANES, FEW_BLOCK);
}

// Prefetches the next keys and values into the L2 cache, a few lines per call, while others are multiplied: decode rows
// read their pages once a step, and would wait for nearly all of them.
template <class T>
class Prefetcher {
  public:
    Prefetcher() = default;

    // Prefetches the item's keys [from, to), counted from its first, within `calls` calls.
    Prefetcher(
        const Attention& a, const AttentionList& l, int64_t layer, const Item& item, int64_t from, int64_t to,
        int64_t calls)
        : pages_(item.pages), page_size_(l.page_size), k_(item.first + from), end_(item.first + to) {
        const int64_t key_size = l.key_dim * sizeof(T), value_size = l.value_dim * sizeof(T);
        keys_ = {
            static_cast<const char*>(a.keys[layer]) + item.head * key_size, l.kv_heads * key_size,
            item.heads() * key_size};
        values_ = {
            static_cast<const char*>(a.values[layer]) + item.head * value_size, l.value_stride * int64_t(sizeof(T)),
            item.heads() * value_size};
        separate_ = a.values[layer] != a.keys[layer];
        whole_ = item.heads() == l.kv_heads;
        const int64_t bytes = (to - from) * (keys_.bytes + (separate_ ? values_.bytes : 0));
        lines_ = (bytes + LINE * calls - 1) / (LINE * calls);
        next_run();
    }

    void step() {
        for (int64_t i = 0; i < lines_ && at_ < at_end_; i++) {
            __builtin_prefetch(at_, 0, 2);
            at_ += LINE;
            if (at_ >= at_end_) values_left_ ? begin(values_) : next_run();
        }
    }

    void finish() {
        while (at_ < at_end_) step();
    }

  private:
    struct Slots {
        const char* base = nullptr;
        int64_t stride = 0, bytes = 0;
    };

    // Begins a run of adjacent slots, within a page if the item has all heads, else a single slot: keys, then values.
    void next_run() {
        k_ += run_, run_ = 0;
        if (k_ >= end_) return;
        const int64_t in_page = k_ % page_size_;
        run_ = whole_ ? std::min(page_size_ - in_page, end_ - k_) : 1;
        slot_ = pages_[k_ / page_size_] * page_size_ + in_page;
        begin(keys_);
        values_left_ = separate_;
    }

    void begin(const Slots& slots) {
        at_ = slots.base + slot_ * slots.stride;
        at_end_ = at_ + (run_ - 1) * slots.stride + slots.bytes;
        values_left_ = false;
    }

    const char *at_ = nullptr, *at_end_ = nullptr;
    Slots keys_, values_;
    const int32_t* pages_ = nullptr;
    int64_t page_size_ = 1, k_ = 0, end_ = 0, run_ = 0, slot_ = 0, lines_ = 0;
    bool whole_ = false, values_left_ = false;
    bool separate_ = true;  // whether values are not in the keys' memory
};

// Keys and values of one head.
template <class T>
struct HeadCache {
    const T *keys, *values;
    int64_t key_stride, value_stride;

    HeadCache(const Attention& a, const AttentionList& l, int64_t layer, int64_t head)
        : keys(static_cast<const T*>(a.keys[layer]) + head * l.key_dim),
          values(static_cast<const T*>(a.values[layer]) + head * l.value_dim),
          key_stride(l.kv_heads * l.key_dim),
          value_stride(l.value_stride) {}
};

// Scores [R, FEW_BLOCK] of R query rows and `count` keys.
template <class T, int R>
void few_scores(
    const T* keys, int64_t stride, const int32_t* slots, int64_t count, int64_t dim, const float* query, float* scores,
    Prefetcher<T>& prefetcher) {
    constexpr int KEYS = FEW_KEYS<R>;
    for (int64_t k = 0; k < count; k += LANES) {
        vf acc[R][LANES];
        for (int first = 0; first < LANES; first += KEYS) {
            if (first % PREFETCH_KEYS == 0) prefetcher.step();
            const T* p[KEYS];
            for (int j = 0; j < KEYS; j++) p[j] = keys + slots[std::min(k + first + j, count - 1)] * stride;
            vf sums[R][KEYS] = {};
            int64_t d = 0;
            for (; d + UNIT <= dim; d += UNIT)
#pragma GCC unroll 4
                for (int j = 0; j < KEYS; j++) {
                    vf x, y;
                    load_unit(p[j] + d, x, y);
                    for (int r = 0; r < R; r++) {
                        sums[r][j] += x * load(query + r * dim + d);
                        sums[r][j] += y * load(query + r * dim + d + LANES);
                    }
                }
            for (; d < dim; d += LANES)
                for (int j = 0; j < KEYS; j++) {
                    const vf x = load(p[j] + d);
                    for (int r = 0; r < R; r++) sums[r][j] += x * load(query + r * dim + d);
                }
            for (int r = 0; r < R; r++)
                for (int j = 0; j < KEYS; j++) acc[r][first + j] = sums[r][j];
        }
        for (int r = 0; r < R; r++) store(scores + r * FEW_BLOCK + k, lane_sums(acc[r]));
    }
}

// sums[r] = sums[r] * decay[r] + weights[r] V over VECTORS vectors of each value.
template <class T, int R, int VECTORS>
void few_values(
    const T* values, int64_t stride, const int32_t* slots, int64_t count, const float* weights, const float* decay,
    float* sums, int64_t width, Prefetcher<T>& prefetcher) {
    vf acc[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = load(sums + r * width + v * LANES) * decay[r];
    for (int64_t k = 0; k < count; k++) {
        if (k % PREFETCH_KEYS == 0) prefetcher.step();
        const T* p = values + slots[k] * stride;
        vf x[VECTORS];
        if constexpr (VECTORS == 1) {
            x[0] = load(p);
        } else {
            for (int v = 0; v < VECTORS; v += 2) load_unit(p + v * LANES, x[v], x[v + 1]);
        }
        for (int r = 0; r < R; r++) {
            const vf w = splat(weights[r * FEW_BLOCK + k]);
            for (int v = 0; v < VECTORS; v++) acc[r][v] += w * x[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * width + v * LANES, acc[r][v]);
}

// R query rows of one head times `count` keys at `slots`, which begin with the item's key b.
template <class T, int R>
void few_rows(
    const Attention& a, const AttentionList& l, const HeadCache<T>& cache, const int32_t* slots, int64_t b,
    int64_t count, const Rows& rows, Prefetcher<T>& prefetcher) {
    alignas(64) float scores[R * FEW_BLOCK];
    few_scores<T, R>(cache.keys, cache.key_stride, slots, count, l.key_dim, rows.query, scores, prefetcher);
    float decay[R];
    int64_t from[R], to[R];
    for (int r = 0; r < R; r++) from[r] = rows.from[r] - b, to[r] = std::min(rows.to[r] - b, count);
    softmax_rows<R>(scores, FEW_BLOCK, count, from, to, a.softcap, rows.max, rows.total, decay);
    const auto add = [&](auto vectors, int64_t d) {
        few_values<T, R, vectors()>(
            cache.values + d, cache.value_stride, slots, count, scores, decay, rows.sums + d, rows.width, prefetcher);
    };
    int64_t d = 0;
    for (; d + FEW_VECTORS * LANES <= l.value_dim; d += FEW_VECTORS * LANES)
        add(std::integral_constant<int, FEW_VECTORS>{}, d);
    for (; d + UNIT <= l.value_dim; d += UNIT) add(std::integral_constant<int, 2>{}, d);
    if (d < l.value_dim) add(std::integral_constant<int, 1>{}, d);
}

// All heads of an item of few query rows, block by block, so that a block is prefetched once for all heads. Calls
// run(head, b, count, prefetcher) for the item's keys [b, b + count). `next`: the next item, or null; `prefetched`: the
// first block of this item has been prefetched.
template <class T, class Run>
void few_item(
    const Attention& a, const AttentionList& l, int64_t layer, const Item& item, const Item* next, bool prefetched,
    Run run) {
    const int64_t block = few_block<T>(l, item);
    if (!prefetched) Prefetcher<T>(a, l, layer, item, 0, std::min(block, item.keys()), 1).finish();
    for (int64_t b = 0; b < item.keys(); b += block) {
        const int64_t count = std::min(block, item.keys() - b), left = item.keys() - b - count;
        const int64_t calls = item.heads() * 2 * ((count + PREFETCH_KEYS - 1) / PREFETCH_KEYS);
        Prefetcher<T> prefetcher;
        if (left) {
            prefetcher = Prefetcher<T>(a, l, layer, item, b + count, b + count + std::min(block, left), calls);
        } else if (next) {
            prefetcher = Prefetcher<T>(a, l, layer, *next, 0, std::min(few_block<T>(l, *next), next->keys()), calls);
        }
        for (int64_t head = item.head; head < item.end_head; head++) run(head, b, count, prefetcher);
        prefetcher.finish();
    }
}

// Transposes the keys of up to LANES slots into columns of a panel [D, KEY_PANEL]; further columns are zero.
void transpose_keys(const float* keys, int64_t stride, const int32_t* slots, int64_t count, int64_t dim, float* panel) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        vu rows[LANES];
        for (int j = 0; j < LANES; j++) rows[j] = j < count ? load_as<vu>(keys + slots[j] * stride + d) : vu{};
        transpose(rows);
        for (int i = 0; i < LANES; i++) store_as(panel + (d + i) * KEY_PANEL, rows[i]);
    }
    for (; d < dim; d++)
        for (int j = 0; j < LANES; j++) panel[d * KEY_PANEL + j] = j < count ? keys[slots[j] * stride + d] : 0.0f;
}

void transpose_keys(const bf16* keys, int64_t stride, const int32_t* slots, int64_t count, int64_t dim, float* panel) {
    int64_t d = 0;
    for (; d + UNIT <= dim; d += UNIT) {
        vu rows[LANES];
        for (int j = 0; j < LANES; j++) rows[j] = j < count ? load_as<vu>(keys + slots[j] * stride + d) : vu{};
        transpose(rows);
        for (int i = 0; i < LANES; i++) {
            store(panel + (d + 2 * i) * KEY_PANEL, (vf)(rows[i] << 16));
            store(panel + (d + 2 * i + 1) * KEY_PANEL, (vf)(rows[i] & 0xffff0000u));
        }
    }
    for (; d < dim; d++)
        for (int j = 0; j < LANES; j++)
            panel[d * KEY_PANEL + j] = j < count ? widen(keys[slots[j] * stride + d]) : 0.0f;
}

template <class T>
void widen_values(
    const T* values, int64_t stride, const int32_t* slots, int64_t count, int64_t dim, int64_t width, float* out) {
    for (int64_t k = 0; k < count; k++, out += width) {
        const T* p = values + slots[k] * stride;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) store(out + d, load(p + d));
        for (; d < dim; d++) out[d] = widen(p[d]);
        for (; d < width; d++) out[d] = 0.0f;
    }
}

// Range of the `count` positions from the item's key b on that any of R rows sees.
template <int R>
std::pair<int64_t, int64_t> visible_range(const Rows& rows, int64_t row, int64_t b, int64_t count) {
    int64_t from = count, to = 0;
    for (int r = 0; r < R; r++) {
        from = std::min(from, rows.from[row + r] - b);
        to = std::max(to, rows.to[row + r] - b);
    }
    return {std::max<int64_t>(from, 0), std::min(to, count)};
}

// Range of the `count` positions from the item's key b on that each of R rows sees.
template <int R>
struct Edges {
    int64_t from[R], to[R];

    Edges(const Rows& rows, int64_t row, int64_t b, int64_t count) {
        for (int r = 0; r < R; r++) {
            from[r] = rows.from[row + r] - b;
            to[r] = std::min(rows.to[row + r] - b, count);
        }
    }
};

// Sets a row's scores outside [from, to) to -inf.
inline void mask_unseen(float* row, int64_t count, int64_t from, int64_t to) {
    if (from <= 0 && to >= count) return;
    const vf lane = lane_numbers<vf>(), none = splat(-__builtin_inff());
    for (int64_t k = 0; k < count; k += LANES) {
        if (k >= from && k + LANES <= to) continue;
        const vf x = lane < splat(float(from - k)) ? none : load(row + k);
        store(row + k, lane >= splat(float(to - k)) ? none : x);
    }
}

// Sets R rows' running maxima, one in each lane, to `most`, and adds `totals` to their sums.
template <int R>
void update_totals(vf old, vf most, vf totals, float* row_max, float* row_sum, float* decay) {
    const vf keep = exp_nonpositive(old - most);
    for (int r = 0; r < R; r++) {
        row_max[r] = most[r];
        row_sum[r] = row_sum[r] * keep[r] + totals[r];
        decay[r] = keep[r];
    }
}

// Multiplies sums [R, width] by each row's factor.
template <int R>
void scale_rows(float* sums, int64_t width, const float* factors) {
    for (int r = 0; r < R; r++, sums += width)
        if (factors[r] != 1.0f)
            for (int64_t d = 0; d < width; d += LANES) store(sums + d, load(sums + d) * factors[r]);
}

// R rows from row `row` on times a block of transposed keys and widened values.
template <int R>
void many_tile(
    const Attention& a, const AttentionList& l, const Rows& rows, int64_t row, int64_t b, int64_t count,
    const float* panels, const float* values, float* scores, int64_t block) {
    auto [from, to] = visible_range<R>(rows, row, b, count);
    if (from >= to) return;
    const float* query = rows.query + row * l.key_dim;
    for (int64_t k = from / KEY_PANEL * KEY_PANEL; k < to; k += KEY_PANEL)
        small_product<R, KEY_PANEL / LANES>(
            query, l.key_dim, panels + k * l.key_dim, KEY_PANEL, l.key_dim, scores + k, block, true);
    from = from / LANES * LANES;
    float* sums = rows.sums + row * rows.width;
    float decay[R];
    const Edges<R> edges(rows, row, b + from, count - from);
    softmax_rows<R>(
        scores + from, block, to - from, edges.from, edges.to, a.softcap, rows.max + row, rows.total + row, decay);
    scale_rows<R>(sums, rows.width, decay);
    int64_t d = 0;
    for (; d + 2 * LANES <= rows.width; d += 2 * LANES)
        small_product<R, 2>(
            scores + from, block, values + from * rows.width + d, rows.width, to - from, sums + d, rows.width, false);
    if (d < rows.width)
        small_product<R, 1>(
            scores + from, block, values + from * rows.width + d, rows.width, to - from, sums + d, rows.width, false);
}

// Merges the block sums `block` of rows [first, first + count) into their sums of the blocks before, and clears them.
void merge_block(const Rows& rows, const Rows& block, int64_t first, int64_t count) {
    for (int64_t r = first; r < first + count; r++) {
        float* sums = block.sums + r * rows.width;
        const SoftmaxState state{rows.sums + r * rows.width, rows.max + r, rows.total + r};
        state.merge(sums, block.max[r], block.total[r], rows.width);
        std::fill(sums, sums + rows.width, 0.0f);
        block.max[r] = LOWEST, block.total[r] = 0.0f;
    }
}

// `block_rows`: for a deterministic list, separate sums of a block, empty before and after the call; else null.
template <class T>
void many_rows(
    const Attention& a, const AttentionList& l, const Item& item, const HeadCache<T>& cache, const int32_t* slots,
    const Rows& rows, const Rows* block_rows, float* panels, float* wide, float* scores) {
    const int64_t block = many_block(l);
    for (int64_t b = 0; b < item.keys(); b += block) {
        const int64_t count = std::min(block, item.keys() - b);
        for (int64_t k = 0; k < round_up(count, KEY_PANEL); k += LANES)
            transpose_keys(
                cache.keys, cache.key_stride, slots + b + k, std::min<int64_t>(LANES, count - k), l.key_dim,
                panels + k / KEY_PANEL * KEY_PANEL * l.key_dim + k % KEY_PANEL);
        widen_values(cache.values, cache.value_stride, slots + b, count, l.value_dim, rows.width, wide);
        for (int64_t r = 0; r < rows.count; r += TILE) {
            const int64_t height = std::min<int64_t>(TILE, rows.count - r);
            const Rows& into = block_rows ? *block_rows : rows;
            const auto tile = [&](auto n) { many_tile<n()>(a, l, into, r, b, count, panels, wide, scores, block); };
            with_constant<TILE>(height, tile);
            if (block_rows) merge_block(rows, *block_rows, r, height);
        }
    }
}

}  // namespace
}  // namespace bg
