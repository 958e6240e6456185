// Few query rows, as in attention_rows.h, by the processor's bfloat16 dot instruction: keys and values are read in
// place, once. Rounds and flushes denormals as attention_dot.h does. Included only by attention.cpp.
#pragma once

#include "attention_dot.h"

namespace bg {
namespace {

// Whether an item's rows are computed this way.
template <class T>
bool few_by_dots(const AttentionList& l, const Item& item) {
#if defined(__AVX512BF16__)
    return l.dots && sizeof(T) == 2 && item.few(l) && l.key_dim % UNIT == 0 && l.value_dim % UNIT == 0;
#else
    return false;
#endif
}

#if defined(__AVX512BF16__)

inline vf add_dots(vf sums, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b); }

// Scores [R, FEW_BLOCK] of R queries and `count` keys, up to whole vectors.
template <int R>
void few_score_dots(
    const HeadCache<bf16>& cache, const int32_t* slots, int64_t count, int64_t dim, const bf16* const (&query)[R],
    float* scores, Prefetcher<bf16>& prefetcher) {
    constexpr int KEYS = FEW_KEYS<R>;
    for (int64_t k = 0; k < count; k += LANES) {
        vf acc[R][LANES];
        for (int first = 0; first < LANES; first += KEYS) {
            if (first % PREFETCH_KEYS == 0) prefetcher.step();
            const bf16* p[KEYS];
            for (int j = 0; j < KEYS; j++)
                p[j] = cache.keys + slots[std::min(k + first + j, count - 1)] * cache.key_stride;
            vf sums[R][KEYS] = {};
            for (int64_t d = 0; d < dim; d += UNIT) {
                vu q[R];
                for (int r = 0; r < R; r++) q[r] = load_as<vu>(query[r] + d);
#pragma GCC unroll 4
                for (int j = 0; j < KEYS; j++) {
                    const vu key = load_as<vu>(p[j] + d);
                    for (int r = 0; r < R; r++) sums[r][j] = add_dots(sums[r][j], q[r], key);
                }
            }
            for (int r = 0; r < R; r++)
                for (int j = 0; j < KEYS; j++) acc[r][first + j] = sums[r][j];
        }
        for (int r = 0; r < R; r++) store(scores + r * FEW_BLOCK + k, lane_sums(acc[r]));
    }
}

// sums[r] = sums[r] * decay[r] + weights[r] V over VECTORS vectors of each value, two values at a time.
template <int R, int VECTORS>
void few_value_dots(
    const bf16* values, int64_t stride, const int32_t* slots, int64_t count, const bf16* weights, const float* decay,
    float* sums, int64_t width, Prefetcher<bf16>& prefetcher) {
    const PairInterleaver interleave;
    vf acc[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = load(sums + r * width + v * LANES) * decay[r];
    for (int64_t k = 0; k < count; k += 2) {
        if (k % PREFETCH_KEYS == 0) prefetcher.step();
        const bf16 *p = values + slots[k] * stride, *next = k + 1 < count ? values + slots[k + 1] * stride : nullptr;
        vu pairs[VECTORS];
        for (int v = 0; v < VECTORS; v += 2) {
            const vu even = load_as<vu>(p + v * LANES), odd = next ? load_as<vu>(next + v * LANES) : vu{};
            pairs[v] = interleave.first(even, odd), pairs[v + 1] = interleave.second(even, odd);
        }
        for (int r = 0; r < R; r++) {
            const vu w = load_as<uint32_t>(weights + r * FEW_BLOCK + k) - vu{};
            for (int v = 0; v < VECTORS; v++) acc[r][v] = add_dots(acc[r][v], w, pairs[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * width + v * LANES, acc[r][v]);
}

#endif

// R query rows of one head times `count` keys at `slots`, which begin with the item's key b.
template <class T, int R>
void few_dots(
    const Attention& a, const AttentionList& l, const Item& item, int64_t head, const HeadCache<T>& cache,
    const int32_t* slots, int64_t b, int64_t count, const Rows& rows, Prefetcher<T>& prefetcher) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2) {
        const int64_t group = l.heads / l.kv_heads;
        const bf16* query[R];
        for (int r = 0; r < R; r++)
            query[r] = static_cast<const bf16*>(a.query) + item.tokens[r / group] * a.query_stride +
                       (head * group + r % group) * l.key_dim;
        alignas(64) float scores[R * FEW_BLOCK];
        few_score_dots<R>(cache, slots, count, l.key_dim, query, scores, prefetcher);
        alignas(64) bf16 weights[R * FEW_BLOCK];
        float decay[R];
        softmax_weights<R>(
            scores, FEW_BLOCK, round_up(count, UNIT), Edges<R>(rows, 0, b, count), a.scale, a.softcap, rows.max,
            rows.total, decay, weights);
        const auto add = [&](auto vectors, int64_t d) {
            few_value_dots<R, vectors()>(
                cache.values + d, cache.value_stride, slots, count, weights, decay, rows.sums + d, rows.width,
                prefetcher);
        };
        int64_t d = 0;
        for (; d + FEW_VECTORS * LANES <= l.value_dim; d += FEW_VECTORS * LANES)
            add(std::integral_constant<int, FEW_VECTORS>{}, d);
        for (; d < l.value_dim; d += UNIT) add(std::integral_constant<int, 2>{}, d);
    }
#endif
}

}  // namespace
}  // namespace bg
