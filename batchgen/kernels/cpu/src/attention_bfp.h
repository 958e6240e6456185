// Tiles of query rows, as in attention_rows.h, in block floating point (bfp.h). Included only by attention.cpp.
//
// Queries and keys have a scale for each group of a head's numbers. Softmax weights have a scale for every `shared`
// positions and are relative to the largest score among them, so that small weights keep their precision. Values have a
// scale for every `shared` positions of a column. Sums are float32, of parts that are exact in 32 bits.
#pragma once

#include "attention_rows.h"
#include "bfp_kind.h"

namespace bg {
namespace {

#if defined(BFP)

constexpr int64_t MOST_SHARED = 64;  // positions
constexpr int WEIGHT_MOST = 8191, VALUE_MOST = 4095;
static_assert(MOST_SHARED * WEIGHT_MOST * VALUE_MOST < (int64_t(1) << 31));
constexpr int MOST_GROUPS = 4;  // most groups of a block's positions

// Positions that share a scale: whole units that divide a block, for most head sizes.
constexpr int64_t shared_positions(int64_t block) {
    if (block % MOST_SHARED == 0) return MOST_SHARED;
    return 48 % UNIT ? UNIT : 48;
}

// Groups of a head's numbers, smaller than those of weights: in some models a few channels of the keys are many times
// larger than the others. Sizes are whole vectors, as rows of integers are transposed.
constexpr int64_t HEAD_GROUP = 32;
struct HeadGroups : Grouping {
    explicit HeadGroups(int64_t dim) : Grouping(dim, HEAD_GROUP, 2 * LANES) {}
};

struct HeadNumbers : Bfp {
    static constexpr int MOST = 8191;
    static_assert(HEAD_GROUP * MOST * MOST < (int64_t(1) << 31));
};

// Registers and numbers across a panel of values; narrow, as heads are small.
constexpr int VALUE_COLUMNS = 2, VALUE_PANEL = VALUE_COLUMNS * LANES;

inline vi larger(vi a, vi b) { return a > b ? a : b; }

// Bytes of one group of one panel, in the layout of bfp.h.
constexpr int64_t block_bytes(int64_t panel, int64_t size) { return panel * (4 + 2 * size); }

// Workspace: a block of keys and values, and the query rows.
struct BfpBlock {
    HeadGroups groups;
    int64_t block, shared, columns;  // positions, positions that share a scale, padded value size
    char *keys, *values;             // [panels of positions][groups], [panels of columns][groups of positions]
    int16_t* query;                  // [rows, groups of a head]
    float* query_scales;             // [rows, groups]
    float* scores;                   // [ROWS, block]
    int16_t* weights;                // [ROWS, block]
    float* weight_scales;            // [ROWS, groups of positions]

    BfpBlock(const AttentionList& l, int64_t positions)
        : groups(l.key_dim),
          block(positions),
          shared(shared_positions(positions)),
          columns(round_up(l.value_dim, VALUE_PANEL)) {}

    template <class Arrays>
    void take(Arrays& arrays, int64_t rows) {
        keys = arrays.template take<char>(block / PANEL * groups.count * block_bytes(PANEL, groups.size));
        values =
            arrays.template take<char>(columns / VALUE_PANEL * (block / shared) * block_bytes(VALUE_PANEL, shared));
        query = arrays.template take<int16_t>(rows * groups.count * groups.size);
        query_scales = arrays.template take<float>(rows * groups.count);
        scores = arrays.template take<float>(Bfp::ROWS * block);
        weights = arrays.template take<int16_t>(Bfp::ROWS * block);
        weight_scales = arrays.template take<float>(Bfp::ROWS * MOST_GROUPS);
    }

    char* key_block(int64_t k, int64_t group) const {
        return keys + (k / PANEL * groups.count + group) * block_bytes(PANEL, groups.size);
    }
    char* value_block(int64_t column, int64_t k) const {
        return values + (column / VALUE_PANEL * (block / shared) + k / shared) * block_bytes(VALUE_PANEL, shared);
    }

    void load_query(const Rows& rows, int64_t dim) const {
        for (int64_t r = 0; r < rows.count; r++)
            for (int64_t g = 0; g < groups.count; g++) {
                const int64_t d = g * groups.size, at = r * groups.count + g;
                const int64_t count = std::clamp<int64_t>(dim - d, 0, groups.size);
                query_scales[at] =
                    quantise<HeadNumbers>(rows.query + r * dim + d, count, groups.size, query + at * groups.size);
            }
    }

    // Quantises the keys of `count` slots, with zeros up to whole panels: the results of `quantise`, for LANES keys at
    // a time. Numbers stay in pairs, the order of memory and of the words.
    template <class T>
    void load_keys(const T* from, int64_t stride, const int32_t* slots, int64_t count, int64_t dim) const {
        constexpr int64_t PAIRS = HEAD_GROUP / 2 / LANES;  // registers of a key's group
        const int64_t pairs = groups.size / 2 / LANES;
        const auto even = [](vu both) { return (vf)(both << 16); };
        const auto odd = [](vu both) { return (vf)(both & 0xffff0000u); };
        for (int64_t k = 0; k < round_up(count, PANEL); k += LANES)
            for (int64_t g = 0; g < groups.count; g++) {
                float* scale = reinterpret_cast<float*>(key_block(k, g)) + k % PANEL;
                int32_t* words = reinterpret_cast<int32_t*>(scale) + PANEL;
                const int64_t d = g * groups.size;
                vu both[PAIRS][LANES];
                vf largest_of[LANES];
                for (int64_t j = 0; j < LANES; j++) {
                    const int64_t filled = k + j < count ? dim - d : 0;
                    const T* key = from + slots[std::min(k + j, count - 1)] * stride + d;
                    vi most{};  // magnitudes, compared by their bits
                    for (int64_t i = 0; i < pairs; i++) {
                        const vu found = both[i][j] = load_pairs(key + 2 * LANES * i, filled - 2 * LANES * i);
                        most = larger(larger((vi)even(found) & 0x7fffffff, (vi)odd(found) & 0x7fffffff), most);
                    }
                    largest_of[j] = (vf)most;
                }
                const vi top = (vi)reduce_lanes(largest_of, [](vf a, vf b) { return (vf)larger((vi)a, (vi)b); });
                const vf inverse = float(HeadNumbers::MOST) / (vf)top;
                const vi usable = inverse < splat(__builtin_inff()), none = top >= 0x7f800000;
                store(scale, none ? splat(__builtin_nanf("")) : usable ? (vf)top / float(HeadNumbers::MOST) : vf{});
                const vf factor = usable & ~none ? inverse : vf{};
                for (int64_t i = 0; i < pairs; i++, words += LANES * PANEL) {
                    for (int64_t j = 0; j < LANES; j++) {
                        const vf f = splat(factor[j]);
                        const vu low = (vu)nearest(even(both[i][j]) * f), high = (vu)nearest(odd(both[i][j]) * f);
                        both[i][j] = (low & 0xffffu) | high << 16;
                    }
                    transpose(both[i]);
                    for (int w = 0; w < LANES; w++) store_as(words + w * PANEL, both[i][w]);
                }
            }
    }

    // Quantises the values of `count` slots, with zeros up to whole groups.
    template <class T>
    void load_values(const T* from, int64_t stride, const int32_t* slots, int64_t count, int64_t dim) const {
        for (int64_t k = 0; k < count; k += shared)
            for (int64_t d = 0; d < columns; d += LANES) {
                float* scale = reinterpret_cast<float*>(value_block(d, k)) + d % VALUE_PANEL;
                int32_t* words = reinterpret_cast<int32_t*>(scale) + VALUE_PANEL;
                const int64_t filled = std::clamp<int64_t>(dim - d, 0, LANES), end = std::min(shared, count - k);
                alignas(64) float wide[MOST_SHARED][LANES];
                vi most{};  // magnitudes, compared by their bits
                for (int64_t i = 0; i < end; i++) {
                    const T* p = from + slots[k + i] * stride + d;
                    const vf v = filled == LANES ? load(p) : load_some(p, filled);
                    const vi bits = (vi)v & 0x7fffffff;
                    most = bits > most ? bits : most;
                    store(wide[i], v);
                }
                for (int64_t i = end; i < shared; i++) store(wide[i], vf{});
                const vf inverse = float(VALUE_MOST) / (vf)most;
                const vi usable = inverse < splat(__builtin_inff()), none = most >= 0x7f800000;
                store(scale, none ? splat(__builtin_nanf("")) : usable ? (vf)most * (1.0f / VALUE_MOST) : vf{});
                const vf factor = usable ? inverse : vf{};
                for (int64_t i = 0; i < shared; i += 2, words += VALUE_PANEL) {
                    const vi even = nearest(load(wide[i]) * factor), odd = nearest(load(wide[i + 1]) * factor);
                    store_as(words, (even & 0xffff) | (vi)((vu)odd << 16));
                }
            }
    }
};

// Online softmax of scores [R, count] into integers of e^(score - largest of its `shared` positions), 0 outside a row's
// edges, and scales, rows `scale_stride` apart. Running maxima and sums are updated as by `softmax_rows`.
template <int R>
__attribute__((noinline)) void softmax_numbers(
    float* scores, int64_t stride, int64_t count, int64_t shared, const Edges<R>& edges, float softcap,
    float* row_max, float* row_sum, float* decay, int16_t* numbers, float* scales, int64_t scale_stride) {
    static_assert(R <= LANES);  // below, a lane is a row
    vf old = splat(LOWEST), tops[MOST_GROUPS], sums[LANES] = {};
    for (int r = 0; r < R; r++) old[r] = row_max[r];
    vf most = old;
    for (int r = 0; r < R; r++) {
        float* row = scores + r * stride;
        for (int64_t k = 0; k < count && softcap != 0.0f; k += LANES)
            store(row + k, soft_capped(load(row + k), softcap));
        mask_unseen(row, round_up(count, shared), edges.from[r], edges.to[r]);
    }
    for (int64_t g = 0; g * shared < count; g++) {
        vf largest_of[LANES];
        for (int r = 0; r < LANES; r++) largest_of[r] = splat(LOWEST);
        for (int r = 0; r < R; r++) {
            vf x = splat(LOWEST), y = x;
            for (int64_t k = g * shared; k < (g + 1) * shared; k += UNIT) {
                x = max(load(scores + r * stride + k), x);
                y = max(load(scores + r * stride + k + LANES), y);
            }
            largest_of[r] = max(x, y);
        }
        tops[g] = lane_maxima(largest_of);
        most = max(tops[g], most);
    }
    for (int64_t g = 0; g * shared < count; g++) {
        const vf share = exp_nonpositive(tops[g] - most);
        for (int r = 0; r < R; r++) {
            const vf top = splat(tops[g][r]);
            vf sum{};
            for (int64_t k = g * shared; k < (g + 1) * shared; k += UNIT) {
                const vf x = exp_nonpositive(load(scores + r * stride + k) - top);
                const vf y = exp_nonpositive(load(scores + r * stride + k + LANES) - top);
                sum += x + y;
                store_whole(numbers + r * stride + k, nearest(x * float(WEIGHT_MOST)), nearest(y * float(WEIGHT_MOST)));
            }
            sums[r] = fused(sum, splat(share[r]), sums[r]);
            scales[r * scale_stride + g] = share[r] * (1.0f / WEIGHT_MOST);
        }
    }
    update_totals<R>(old, most, lane_sums(sums), row_max, row_sum, decay);
}

// R rows from row `row` on against the block's `count` positions, which begin with the item's key b.
template <int R>
void bfp_tile(const Attention& a, const BfpBlock& m, const Rows& rows, int64_t row, int64_t b, int64_t count) {
    auto [from, to] = visible_range<R>(rows, row, b, count);
    if (from >= to) return;
    const HeadGroups& groups = m.groups;
    const int64_t query_stride = groups.count * groups.size;
    for (int64_t k = from / PANEL * PANEL; k < to; k += PANEL)
        for (int64_t g = 0; g < groups.count; g++)
            tile_grouped<Bfp, R, NO_PREFETCH, COLUMNS, 0>(
                m.query + row * query_stride + g * groups.size, query_stride, m.query_scales + row * groups.count + g,
                groups.count, m.key_block(k, g), groups.size, m.scores + k, g == 0, m.block, {});
    from = from / m.shared * m.shared;
    float* sums = rows.sums + row * rows.width;
    float decay[R];
    softmax_numbers<R>(
        m.scores + from, m.block, to - from, m.shared, Edges<R>(rows, row, b + from, count - from), a.softcap,
        rows.max + row, rows.total + row, decay, m.weights + from, m.weight_scales, MOST_GROUPS);
    scale_rows<R>(sums, rows.width, decay);
    for (int64_t d = 0; d < m.columns; d += VALUE_PANEL)
        for (int64_t k = from; k < to; k += m.shared)
            tile_grouped<Bfp, R, NO_PREFETCH, VALUE_COLUMNS, 0>(
                m.weights + k, m.block, m.weight_scales + (k - from) / m.shared, MOST_GROUPS, m.value_block(d, k),
                m.shared, sums + d, false, rows.width, {});
}

template <class T>
void bfp_rows(
    const Attention& a, const AttentionList& l, const Item& item, const HeadCache<T>& cache, const int32_t* slots,
    const Rows& rows, const BfpBlock& m) {
    m.load_query(rows, l.key_dim);
    for (int64_t b = 0; b < item.keys(); b += m.block) {
        const int64_t count = std::min(m.block, item.keys() - b);
        m.load_keys(cache.keys, cache.key_stride, slots + b, count, l.key_dim);
        m.load_values(cache.values, cache.value_stride, slots + b, count, l.value_dim);
        by_runs<Bfp::ROWS>(rows.count, [&](auto n, int64_t row) { bfp_tile<n()>(a, m, rows, row, b, count); });
    }
}

#else

struct BfpBlock {
    int64_t columns = 0;
    BfpBlock(const AttentionList&, int64_t) {}
    template <class Arrays>
    void take(Arrays&, int64_t) {}
};

template <class T>
void bfp_rows(
    const Attention&, const AttentionList&, const Item&, const HeadCache<T>&, const int32_t*, const Rows&,
    const BfpBlock&) {}

#endif

// Whether an item is computed this way. Not in deterministic lists, as a scale depends on positions that a row does not
// see.
template <class T>
bool by_bfp(const AttentionList& l, const Item& item) {
#if defined(BFP)
    const int64_t block = many_block(l);
    return sizeof(T) == 2 && !l.block && !item.few(l) && block % shared_positions(block) == 0;
#else
    return false;
#endif
}

}  // namespace
}  // namespace bg
