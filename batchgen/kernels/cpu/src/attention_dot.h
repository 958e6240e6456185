// Tiles of query rows, as in attention_rows.h, by the processor's bfloat16 dot instruction. Included by attention.cpp
// and attention_few_dots.h.
//
// Queries and keys are multiplied in bfloat16. Softmax weights are rounded to bfloat16. Sums are float32; the
// instruction flushes denormal numbers to zero.
#pragma once

#include "attention_units.h"

namespace bg {
namespace {

#if defined(__AVX512BF16__)

constexpr int SCORE_UNITS = 3;  // units whose scores are computed together
// Numbers of a block of keys and values: it and the next one fit the L2 cache. Larger blocks need fewer updates of the
// softmax, until a tile's scores and weights no longer fit the L1 cache.
constexpr int64_t DOT_NUMBERS = 1 << 16;
constexpr int64_t MOST_POSITIONS = 512, LEAST_POSITIONS = 3 * UNIT;

// Workspace: a block of keys and values, and the query rows.
struct DotBlock {
    DotUnit unit;
    int64_t block, columns;  // positions; padded value size
    const int32_t** units;   // [block / LANES]
    int32_t* own;            // [block / LANES, words] units that are not cached
    bf16* query;             // [rows, 2 * pairs]
    float* scores;           // [TILE_ROWS, block]
    bf16* weights;           // [TILE_ROWS, block]

    explicit DotBlock(const AttentionList& l)
        : unit(l),
          block(std::clamp(DOT_NUMBERS / (l.key_dim + l.value_dim) / UNIT * UNIT, LEAST_POSITIONS, MOST_POSITIONS)),
          columns(unit.columns) {}

    template <class Arrays>
    void take(Arrays& arrays, int64_t rows) {
        units = arrays.template take<const int32_t*>(block / LANES);
        own = arrays.template take<int32_t>(block / LANES * unit.words());
        query = arrays.template take<bf16>(rows * 2 * unit.pairs);
        scores = arrays.template take<float>(TILE_ROWS * block);
        weights = arrays.template take<bf16>(TILE_ROWS * block);
    }

    // Copies a head's queries, each padded with zeros.
    void load_query(const Attention& a, const AttentionList& l, const Item& item, int64_t head) const {
        const int64_t group = l.heads / l.kv_heads, dim = l.key_dim;
        bf16* to = query;
        for (int64_t i = 0; i < item.count; i++) {
            const bf16* q = static_cast<const bf16*>(a.query) + item.tokens[i] * a.query_stride + head * group * dim;
            for (int64_t g = 0; g < group; g++, q += dim, to += 2 * unit.pairs) {
                std::memcpy(to, q, dim * sizeof(bf16));
                std::memset(to + dim, 0, (2 * unit.pairs - dim) * sizeof(bf16));
            }
        }
    }

    // Finds or packs the units of the item's keys [b, b + count).
    void load_units(
        const AttentionList& l, const HeadCache<bf16>& cache, const CachedUnits& kept, const int32_t* slots, int64_t b,
        int64_t count) const {
        for (int64_t k = 0; k < count; k += LANES) {
            const int32_t*& at = units[k / LANES];
            if ((at = kept.find(b + k))) continue;
            int32_t* const claimed = kept.claim(b + k);
            int32_t* const to = claimed ? claimed : own + k / LANES * unit.words();
            unit.pack(l, cache, slots + b + k, std::min<int64_t>(LANES, count - k), to);
            if (claimed) kept.put(b + k);
            at = to;
        }
    }
};

// c [ROWS, ACROSS * LANES] = x [ROWS, 2 * pairs] times the keys of ACROSS units.
template <int ROWS, int ACROSS>
__attribute__((noinline)) void score_dots(
    const bf16* x, int64_t pairs, const int32_t* const* units, float* c, int64_t c_stride) {
    const int32_t* keys[ACROSS];
    for (int v = 0; v < ACROSS; v++) keys[v] = units[v];
    Sums<ROWS, ACROSS> sums(c, true, c_stride);
    for (int64_t k = 0; k < pairs; k++) sums.dot(x + 2 * k, 2 * pairs, [&](int v) { return keys[v] + k * LANES; });
    sums.save(c, c_stride);
}

// c [ROWS, DOT_PANEL] += x [ROWS, count * LANES] times DOT_PANEL columns of the values of `count` units, which begin
// `at` words into each unit.
template <int ROWS>
__attribute__((noinline)) void value_dots(
    const bf16* x, int64_t x_stride, const int32_t* const* units, int64_t count, int64_t at, int64_t columns, float* c,
    int64_t c_stride) {
    Sums<ROWS, DOT_COLUMNS> sums(c, false, c_stride);
    for (int64_t u = 0; u < count; u++, x += LANES) {
        const int32_t* values = units[u] + at;
#pragma GCC unroll 2
        for (int k = 0; k < LANES / 2; k++, values += columns)
            sums.dot(x + 2 * k, x_stride, [&](int v) { return values + v * LANES; });
    }
    sums.save(c, c_stride);
}

// Online softmax of `scale` times the scores [R, count] into `weights`, 0 outside a row's edges. Running maxima and
// sums are updated as by `softmax_rows`. `count` is a multiple of UNIT.
template <int R>
__attribute__((noinline)) void softmax_weights(
    float* scores, int64_t stride, int64_t count, const Edges<R>& edges, float scale, float softcap, float* row_max,
    float* row_sum, float* decay, bf16* weights) {
    static_assert(R <= LANES);  // below, a lane is a row
    constexpr float LOG2_E = 1.44269504f;
    const float factor = softcap == 0.0f ? scale : 1.0f;
    vf old = splat(LOWEST), largest_of[LANES], sums[LANES] = {};
    for (int r = 0; r < LANES; r++) largest_of[r] = splat(LOWEST);
    for (int r = 0; r < R; r++) {
        float* row = scores + r * stride;
        old[r] = row_max[r];
        for (int64_t k = 0; k < count && softcap != 0.0f; k += LANES)
            store(row + k, soft_capped(load(row + k) * scale, softcap));
        mask_unseen(row, count, edges.from[r], edges.to[r]);
        vf x = splat(LOWEST), y = x;
        for (int64_t k = 0; k < count; k += UNIT) {
            x = max(load(row + k), x);
            y = max(load(row + k + LANES), y);
        }
        largest_of[r] = max(x, y);
    }
    const vf most = max(lane_maxima(largest_of) * factor, old);
    for (int r = 0; r < R; r++) {
        const vf by = splat(factor * LOG2_E), top = splat(-most[r] * LOG2_E);
        vf x_sum{}, y_sum{};
        for (int64_t k = 0; k < count; k += UNIT) {
            const vf x = power_of_two(fused(load(scores + r * stride + k), by, top));
            const vf y = power_of_two(fused(load(scores + r * stride + k + LANES), by, top));
            x_sum += x, y_sum += y;
            store_as(weights + r * stride + k, _mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
        }
        sums[r] = x_sum + y_sum;
    }
    update_totals<R>(old, most, lane_sums(sums), row_max, row_sum, decay);
}

// R rows from row `row` on times the block's `count` positions, which begin with the item's key b.
template <int R>
void dot_tile(
    const Attention& a, const DotBlock& m, const Rows& rows, int64_t row, int64_t b, int64_t count,
    DotPrefetcher& prefetcher) {
    auto [from, to] = visible_range<R>(rows, row, b, count);
    if (from >= to) return;
    from = from / UNIT * UNIT;
    const int32_t* const* units = m.units + from / LANES;
    const int64_t num_units = round_up(to - from, LANES) / LANES, padded = round_up(to - from, UNIT);
    by_runs<SCORE_UNITS>(num_units, [&](auto n, int64_t u) {
        prefetcher.step();
        score_dots<R, n()>(
            m.query + row * 2 * m.unit.pairs, m.unit.pairs, units + u, m.scores + from + u * LANES, m.block);
    });
    float* sums = rows.sums + row * rows.width;
    float decay[R];
    softmax_weights<R>(
        m.scores + from, m.block, padded, Edges<R>(rows, row, b + from, count - from), a.scale, a.softcap,
        rows.max + row, rows.total + row, decay, m.weights + from);
    scale_rows<R>(sums, rows.width, decay);
    for (int64_t d = 0; d < m.columns; d += DOT_PANEL) {
        prefetcher.step();
        value_dots<R>(
            m.weights + from, m.block, units, num_units, m.unit.key_words() + d, m.columns, sums + d, rows.width);
    }
}

template <class T>
void dot_item(
    const Attention& a, const AttentionList& l, int64_t layer, const Item& item, int64_t head, const int32_t* slots,
    const Rows& rows, const DotBlock& m) {
    if constexpr (sizeof(T) == 2) {
        const int64_t next = std::min(head + 1, item.end_head - 1);
        const HeadCache<T> cache(a, l, layer, head), next_cache(a, l, layer, next);
        const CachedUnits kept(a, l, layer, item, head, m.unit), next_kept(a, l, layer, item, next, m.unit);
        m.load_query(a, l, item, head);
        for (int64_t b = 0; b < item.keys(); b += m.block) {
            const int64_t count = std::min(m.block, item.keys() - b), left = item.keys() - b - count;
            m.load_units(l, cache, kept, slots, b, count);
            const int64_t tiles = round_up(rows.count, TILE_ROWS) / TILE_ROWS;
            const int64_t calls =
                tiles * (round_up(count, SCORE_UNITS * LANES) / (SCORE_UNITS * LANES) + m.columns / DOT_PANEL);
            DotPrefetcher prefetcher;
            if (left) {
                prefetcher = DotPrefetcher(l, cache, kept, m.unit, slots, b + count, std::min(m.block, left), calls);
            } else if (next > head) {
                prefetcher =
                    DotPrefetcher(l, next_cache, next_kept, m.unit, slots, 0, std::min(m.block, item.keys()), calls);
            }
            by_runs<TILE_ROWS>(
                rows.count, [&](auto n, int64_t row) { dot_tile<n()>(a, m, rows, row, b, count, prefetcher); });
        }
    }
}

#else

struct DotBlock {
    int64_t columns = 0;
    explicit DotBlock(const AttentionList&) {}
    template <class Arrays>
    void take(Arrays&, int64_t) {}
};

template <class T>
void dot_item(
    const Attention&, const AttentionList&, int64_t, const Item&, int64_t, const int32_t*, const Rows&,
    const DotBlock&) {}

#endif

// Whether an item is computed this way. Not in deterministic lists, as the pairs summed depend on what other rows see.
template <class T>
bool by_dots(const AttentionList& l, const Item& item) {
#if defined(__AVX512BF16__)
    return l.dots && sizeof(T) == 2 && !l.block && !item.few(l);
#else
    return false;
#endif
}

}  // namespace
}  // namespace bg
