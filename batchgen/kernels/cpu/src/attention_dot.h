// Tiles of query rows, as in attention_rows.h, by the processor's bfloat16 dot instruction. Included by attention.cpp
// alone.
//
// Queries and keys are multiplied as they stand. What the softmax makes of a row's scores is rounded to bfloat16, as
// values were. Sums are float32; the instruction takes denormal numbers for zeros.
#pragma once

#include "attention_rows.h"

namespace bg {
namespace {

#if defined(__AVX512BF16__)

constexpr int DOT_COLUMNS = 2, DOT_PANEL = DOT_COLUMNS * LANES;  // registers and numbers across a panel of values

// A block of keys and values and the rows that are multiplied with them; numbers in pairs, as 32-bit words.
struct DotBlock {
    int64_t block, pairs, columns;  // positions; of a head's numbers; values with zeros behind them
    int32_t* keys;                  // [panels of positions, pairs, PANEL]
    int32_t* values;                // [panels of columns, block / 2, DOT_PANEL]
    bf16* query;                    // [rows, 2 * pairs]
    float* scores;                  // [TILE_ROWS, block]
    bf16* weights;                  // [TILE_ROWS, block]

    DotBlock(const AttentionList& l, int64_t positions)
        : block(positions), pairs(up(l.key_dim, UNIT) / 2), columns(up(l.value_dim, DOT_PANEL)) {}

    template <class Arrays>
    void take(Arrays& arrays, int64_t rows) {
        keys = arrays.template take<int32_t>(block * pairs);
        values = arrays.template take<int32_t>(block / 2 * columns);
        query = arrays.template take<bf16>(rows * 2 * pairs);
        scores = arrays.template take<float>(TILE_ROWS * block);
        weights = arrays.template take<bf16>(TILE_ROWS * block);
    }

    // A head's queries, with zeros behind each.
    void take_query(const Attention& a, const AttentionList& l, const Item& item, int64_t head) const {
        const int64_t group = l.heads / l.kv_heads, dim = l.key_dim;
        bf16* to = query;
        for (int64_t i = 0; i < item.count; i++) {
            const bf16* q = static_cast<const bf16*>(a.query) + item.tokens[i] * a.query_stride + head * group * dim;
            for (int64_t g = 0; g < group; g++, q += dim, to += 2 * pairs) {
                std::memcpy(to, q, dim * sizeof(bf16));
                std::memset(to + dim, 0, (2 * pairs - dim) * sizeof(bf16));
            }
        }
    }

    // Keys of `count` slots, and zeros up to whole panels.
    void take_keys(const bf16* from, int64_t stride, const int32_t* slots, int64_t count, int64_t dim) const {
        for (int64_t k = 0; k < up(count, PANEL); k += LANES)
            for (int64_t d = 0; d < dim; d += UNIT) {
                vu words[LANES];
                for (int64_t j = 0; j < LANES; j++)
                    words[j] = k + j < count ? load_pairs(from + slots[k + j] * stride + d, dim - d) : vu{};
                transpose(words);
                int32_t* to = keys + (k / PANEL * pairs + d / 2) * PANEL + k % PANEL;
                for (int i = 0; i < LANES; i++) store_as(to + i * PANEL, words[i]);
            }
    }

    // Values of `count` slots, and zeros up to whole units of positions.
    void take_values(const bf16* from, int64_t stride, const int32_t* slots, int64_t count, int64_t dim) const {
        alignas(64) int16_t order[2][UNIT];
        for (int i = 0; i < UNIT; i++)
            for (int half = 0; half < 2; half++) order[half][i] = int16_t(half * LANES + i / 2 + i % 2 * UNIT);
        const __m512i low = (__m512i)load_as<vu>(order[0]), high = (__m512i)load_as<vu>(order[1]);
        for (int64_t d = 0; d < columns; d += DOT_PANEL) {
            const auto at = [&](int64_t k) {
                return (__m512i)(k < count ? load_pairs(from + slots[k] * stride + d, dim - d) : vu{});
            };
            int32_t* to = values + d / DOT_PANEL * (block / 2) * DOT_PANEL;
            for (int64_t k = 0; k < up(count, UNIT); k += 2, to += DOT_PANEL) {
                const __m512i even = at(k), odd = at(k + 1);
                store_as(to, _mm512_permutex2var_epi16(even, low, odd));
                store_as(to + LANES, _mm512_permutex2var_epi16(even, high, odd));
            }
        }
    }
};

// c [ROWS, ACROSS * LANES] = or += x [ROWS, 2 * pairs] b [pairs, ACROSS * LANES, 2].
template <int ROWS, int ACROSS>
__attribute__((noinline)) void small_dots(
    const bf16* x, int64_t x_stride, const int32_t* b, int64_t pairs, float* c, int64_t c_stride, bool first) {
    Sums<ROWS, ACROSS> sums(c, first, c_stride);
    for (int64_t k = 0; k < pairs; k++, b += ACROSS * LANES) sums.dot(x + 2 * k, x_stride, b);
    sums.keep(c, c_stride);
}

// 2^x, 0 below -126; not-a-number stays. Off by 3e-6 of itself, a thousandth of what rounding to bfloat16 loses.
inline vf power_of_two(vf x) {
    const vf n = (vf)_mm512_roundscale_ps((__m512)x, 0), r = x - n;
    vf p = splat(0.0095701f);
    p = fused(p, r, splat(0.05591786f));
    p = fused(p, r, splat(0.24024745f));
    p = fused(p, r, splat(0.69312181f));
    p = fused(p, r, splat(0.99999926f));
    const __mmask16 above = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(above, (__m512)p, (__m512)n);
}

// Scores [R, count], which are `scale` times these, become e^(score - largest) in `weights`, those of row r outside
// [from[r], to[r]) zeros; rows' running maxima and sums are joined as by `softmax_rows`. `count` is of whole units.
template <int R>
__attribute__((noinline)) void softmax_weights(
    float* scores, int64_t stride, int64_t count, const Edges<R>& edges, float scale, float softcap, float* row_max,
    float* row_sum, float* decay, bf16* weights) {
    static_assert(R <= LANES);  // a lane of what follows is a row
    constexpr float LOG2_E = 1.44269504f;
    const float factor = softcap == 0.0f ? scale : 1.0f;
    vf old = splat(LOWEST), largest_of[LANES], sums[LANES] = {};
    for (int r = 0; r < LANES; r++) largest_of[r] = splat(LOWEST);
    for (int r = 0; r < R; r++) {
        float* row = scores + r * stride;
        old[r] = row_max[r];
        for (int64_t k = 0; k < count && softcap != 0.0f; k += LANES) store(row + k, soft_capped(load(row + k) * scale, softcap));
        hide_unseen(row, count, edges.from[r], edges.to[r]);
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
    join_totals<R>(old, most, lane_sums(sums), row_max, row_sum, decay);
}

// R rows from row `row` on against the block's `count` positions, which begin with the item's key b.
template <int R>
void dot_tile(const Attention& a, const DotBlock& m, const Rows& rows, int64_t row, int64_t b, int64_t count) {
    auto [from, to] = seen<R>(rows, row, b, count);
    if (from >= to) return;
    for (int64_t k = from / PANEL * PANEL; k < to; k += PANEL)
        small_dots<R, COLUMNS>(m.query + row * 2 * m.pairs, 2 * m.pairs, m.keys + k * m.pairs, m.pairs, m.scores + k, m.block, true);
    from = from / UNIT * UNIT;
    const int64_t units = up(to - from, UNIT);
    float* sums = rows.sums + row * rows.width;
    float decay[R];
    softmax_weights<R>(
        m.scores + from, m.block, units, Edges<R>(rows, row, b + from, count - from), a.scale, a.softcap,
        rows.max + row, rows.total + row, decay, m.weights + from);
    fade<R>(sums, rows.width, decay);
    for (int64_t d = 0; d < m.columns; d += DOT_PANEL)
        small_dots<R, DOT_COLUMNS>(
            m.weights + from, m.block, m.values + (d / DOT_PANEL * m.block + from) / 2 * DOT_PANEL, units / 2, sums + d,
            rows.width, false);
}

template <class T>
void dot_item(const Attention& a, const AttentionList& l, const Item& item, int64_t head, const HeadCache<T>& cache, const int32_t* slots, const Rows& rows, const DotBlock& m) {
    if constexpr (sizeof(T) == 2) {
        m.take_query(a, l, item, head);
        for (int64_t b = 0; b < item.keys(); b += m.block) {
            const int64_t count = std::min(m.block, item.keys() - b);
            m.take_keys(cache.keys, cache.key_stride, slots + b, count, l.key_dim);
            m.take_values(cache.values, cache.value_stride, slots + b, count, l.value_dim);
            by_runs<TILE_ROWS>(rows.count, [&](auto n, int64_t row) { dot_tile<n()>(a, m, rows, row, b, count); });
        }
    }
}

#else

struct DotBlock {
    int64_t columns = 0;
    DotBlock(const AttentionList&, int64_t) {}
    template <class Arrays>
    void take(Arrays&, int64_t) {}
};

template <class T>
void dot_item(const Attention&, const AttentionList&, const Item&, int64_t, const HeadCache<T>&, const int32_t*, const Rows&, const DotBlock&) {}

#endif

// Whether an item is computed so. Batch-invariant ones are not: how many pairs are summed depends on what others see.
template <class T>
bool by_dots(const AttentionList& l, const Item& item) {
#if defined(__AVX512BF16__)
    return l.dots && sizeof(T) == 2 && !l.block && !item.few(l) && many_block(l) % UNIT == 0;
#else
    return false;
#endif
}

}  // namespace
}  // namespace bg
