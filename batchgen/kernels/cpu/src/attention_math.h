// Arithmetic of attention.cpp, independent of work items: loads of pairs of vectors, transposition, sums across lanes,
// softmax of rows, small products.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "tiles.h"

namespace bg {

constexpr float LOWEST = -1e30f;  // start of running maxima: finite, to avoid differences of infinities
constexpr int UNIT = 2 * LANES;

// Loads a unit of UNIT numbers as two vectors. For bfloat16 they are the even and the odd elements, which takes one
// load and no shuffle; their products and sums stay in this order until they are stored.
static inline void load_unit(const float* p, vf& a, vf& b) {
    a = load(p);
    b = load(p + LANES);
}

static inline void load_unit(const bf16* p, vf& a, vf& b) {
    const vu both = load_as<vu>(p);
    a = (vf)(both << 16);
    b = (vf)(both & 0xffff0000u);
}

// 2 * LANES numbers in memory order, zeros after the first `count`.
template <class T>
static inline vu load_pairs(const T* p, int64_t count) {
    if (count >= 2 * LANES) return load_as<vu>(p);
    T some[2 * LANES] = {};
    std::memcpy(some, p, std::max<int64_t>(count, 0) * sizeof(T));
    return load_as<vu>(some);
}

// The reverse: stores two vectors in the order of `load_unit<T>` as a unit of U in plain order.
template <class T, class U>
static inline void store_unit(U* p, vf a, vf b) {
    if constexpr (sizeof(T) == 4) {
        store(p, a);
        store(p + LANES, b);
    } else if constexpr (sizeof(U) == 2) {
        store_as(p, (((vu)rounded<bf16>(a)) >> 16) | (vu)rounded<bf16>(b));
    } else {
        for (int i = 0; i < LANES; i++) p[2 * i] = a[i], p[2 * i + 1] = b[i];
    }
}

// e^x for x <= 0, to about 1 unit in the last place: 0 below -87, keeps NaN.
static inline vf exp_nonpositive(vf x) {
    const vf shifted = x * 1.44269504f + TO_INTEGER;
    const vf n = shifted - TO_INTEGER;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 above = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(above, (__m512)p, (__m512)n);
#else
    const vf result = p * (vf)(((vu)shifted - INTEGER_BITS + 127) << 23);
    return x < splat(-87.0f) ? vf{} : result;
#endif
}

static inline float exp_nonpositive(float x) { return x < -87.0f ? 0.0f : std::exp(x); }

// cap * tanh(x / cap), through e^(-2 |x| / cap).
static inline vf soft_capped(vf x, float cap) {
    const vf y = x / cap;
    const vf e = exp_nonpositive((y < 0.0f ? y : -y) * 2.0f);
    const vf t = (1.0f - e) / (1.0f + e);
    return (y < 0.0f ? -t : t) * cap;
}

// Lane j is v[j]'s lanes reduced by `op`, which must be associative and commutative.
template <class Op>
static inline vf reduce_lanes(const vf (&v)[LANES], Op op) {
#if defined(__AVX512F__)
    vf x[4];
    for (int i = 0; i < 4; i++) {
        const __m512 a = (__m512)v[4 * i], b = (__m512)v[4 * i + 1];
        const __m512 c = (__m512)v[4 * i + 2], d = (__m512)v[4 * i + 3];
        const __m512d ab = (__m512d)op((vf)_mm512_unpacklo_ps(a, b), (vf)_mm512_unpackhi_ps(a, b));
        const __m512d cd = (__m512d)op((vf)_mm512_unpacklo_ps(c, d), (vf)_mm512_unpackhi_ps(c, d));
        x[i] = op((vf)_mm512_unpacklo_pd(ab, cd), (vf)_mm512_unpackhi_pd(ab, cd));
    }
    const auto halves = [&](vf a, vf b) {
        const __m512 low = _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88);
        return op((vf)low, (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd));
    };
    return halves(halves(x[0], x[1]), halves(x[2], x[3]));
#elif defined(__AVX__)
    vf x[2];
    for (int i = 0; i < 2; i++) {
        const __m256 a = (__m256)v[4 * i], b = (__m256)v[4 * i + 1];
        const __m256 c = (__m256)v[4 * i + 2], d = (__m256)v[4 * i + 3];
        const __m256d ab = (__m256d)op((vf)_mm256_unpacklo_ps(a, b), (vf)_mm256_unpackhi_ps(a, b));
        const __m256d cd = (__m256d)op((vf)_mm256_unpacklo_ps(c, d), (vf)_mm256_unpackhi_ps(c, d));
        x[i] = op((vf)_mm256_unpacklo_pd(ab, cd), (vf)_mm256_unpackhi_pd(ab, cd));
    }
    const __m256 low = _mm256_permute2f128_ps((__m256)x[0], (__m256)x[1], 0x20);
    return op((vf)low, (vf)_mm256_permute2f128_ps((__m256)x[0], (__m256)x[1], 0x31));
#else
    vf result;
    for (int j = 0; j < LANES; j++) {
        vf x = v[j];
        for (int half = LANES / 2; half; half /= 2) {
            vf other = x;
            for (int i = 0; i < half; i++) other[i] = x[i + half];
            x = op(x, other);
        }
        result[j] = x[0];
    }
    return result;
#endif
}

static inline vf lane_sums(const vf (&v)[LANES]) {
    return reduce_lanes(v, [](vf a, vf b) { return a + b; });
}

static inline vf lane_maxima(const vf (&v)[LANES]) { return reduce_lanes(v, max); }

// rows[i][j] = rows[j][i], 32-bit words.
static inline void transpose(vu (&rows)[LANES]) {
#if defined(__AVX512F__)
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; h++) {
            u[i + 2 * h] = _mm512_unpacklo_epi64(t[i + h], t[i + 2 + h]);
            u[i + 2 * h + 1] = _mm512_unpackhi_epi64(t[i + h], t[i + 2 + h]);
        }
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(u[i], u[i + 4], 0x88), b = _mm512_shuffle_i32x4(u[i], u[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0xdd);
        rows[i] = (vu)_mm512_shuffle_i32x4(a, c, 0x88);
        rows[i + 8] = (vu)_mm512_shuffle_i32x4(a, c, 0xdd);
        rows[i + 4] = (vu)_mm512_shuffle_i32x4(b, d, 0x88);
        rows[i + 12] = (vu)_mm512_shuffle_i32x4(b, d, 0xdd);
    }
#elif defined(__AVX__)
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
    }
    for (int i = 0; i < 4; i++) {  // columns i and i + 4
        const __m256d a = (__m256d)t[i / 2], b = (__m256d)t[2 + i / 2], c = (__m256d)t[4 + i / 2],
                      d = (__m256d)t[6 + i / 2];
        const __m256d low = i % 2 ? _mm256_unpackhi_pd(a, b) : _mm256_unpacklo_pd(a, b);
        const __m256d high = i % 2 ? _mm256_unpackhi_pd(c, d) : _mm256_unpacklo_pd(c, d);
        rows[i] = (vu)_mm256_permute2f128_pd(low, high, 0x20);
        rows[i + 4] = (vu)_mm256_permute2f128_pd(low, high, 0x31);
    }
#else
    uint32_t words[LANES][LANES];
    std::memcpy(words, rows, sizeof words);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) rows[i][j] = words[j][i];
#endif
}

// Online softmax: scores [R, count] become e^(score - largest), 0 outside [from[r], to[r]), and the rows' running
// maxima and sums are updated. `decay[r]` is the factor for the row's previous sums. `count` is rounded up to whole
// vectors.
template <int R>
static inline void softmax_rows(
    float* scores, int64_t stride, int64_t count, const int64_t* from, const int64_t* to, float softcap,
    float* row_max, float* row_sum, float* decay) {
    constexpr int VECTORS = (R + LANES - 1) / LANES, LANES_TAKEN = VECTORS * LANES;
    const vf lane = lane_numbers<vf>();
    alignas(64) float old_max[LANES_TAKEN], new_max[LANES_TAKEN], decays[LANES_TAKEN], sums[LANES_TAKEN];
    vf tops[VECTORS][LANES], totals[VECTORS][LANES];
    for (int r = 0; r < LANES_TAKEN; r++) {
        tops[r / LANES][r % LANES] = splat(LOWEST), totals[r / LANES][r % LANES] = vf{};
        old_max[r] = LOWEST;
    }
    for (int r = 0; r < R; r++) {
        float* row = scores + r * stride;
        old_max[r] = row_max[r];
        vf top = splat(LOWEST);
        for (int64_t k = 0; k < count; k += LANES) {
            vf s = load(row + k);
            const bool edge = k < from[r] || k + LANES > to[r];
            if (softcap != 0.0f) s = soft_capped(s, softcap);
            if (edge) {
                s = lane < splat(float(from[r] - k)) ? splat(-__builtin_inff()) : s;
                s = lane >= splat(float(to[r] - k)) ? splat(-__builtin_inff()) : s;
            }
            if (edge || softcap != 0.0f) store(row + k, s);
            top = max(s, top);
        }
        tops[r / LANES][r % LANES] = top;
    }
    for (int v = 0; v < VECTORS; v++) {
        const vf old = load(old_max + v * LANES), maxima = max(lane_maxima(tops[v]), old);
        store(new_max + v * LANES, maxima);
        store(decays + v * LANES, exp_nonpositive(old - maxima));
    }
    for (int r = 0; r < R; r++) {
        float* row = scores + r * stride;
        const vf top = splat(new_max[r]);
        vf total{};
        for (int64_t k = 0; k < count; k += LANES) {
            const vf p = exp_nonpositive(load(row + k) - top);
            store(row + k, p);
            total += p;
        }
        totals[r / LANES][r % LANES] = total;
    }
    for (int v = 0; v < VECTORS; v++) store(sums + v * LANES, lane_sums(totals[v]));
    for (int r = 0; r < R; r++) {
        row_max[r] = new_max[r];
        row_sum[r] = row_sum[r] * decays[r] + sums[r];
        decay[r] = decays[r];
    }
}

// State of a row's softmax: sums of e^(score - max) * value [dim], their maximum and total. `merge` adds the state of
// later positions. Every rounding is explicit, so that results do not depend on where this is compiled.
struct SoftmaxState {
    float *sums, *max, *total;

    void merge(const float* other, float other_max, float other_total, int64_t dim) const {
        const float top = std::max(*max, other_max);
        const float keep = exp_nonpositive(*max - top), take = exp_nonpositive(other_max - top);
        *max = top;
        *total = std::fma(other_total, take, *total * keep);
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES)
            store(sums + d, fused(load(other + d), splat(take), load(sums + d) * keep));
        for (; d < dim; d++) sums[d] = std::fma(other[d], take, sums[d] * keep);
    }
};

// c [ROWS, VECTORS * LANES] = (first) or += a [ROWS, inner] b [inner, VECTORS * LANES]. Not inlined, because GCC would
// keep b in memory.
template <int ROWS, int VECTORS>
static __attribute__((noinline)) void small_product(
    const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t inner, float* c, int64_t c_stride,
    bool first) {
    Sums<ROWS, VECTORS> sums(c, first, c_stride);
    for (int64_t k = 0; k < inner; k++, b += b_stride) {
        vf w[VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) w[i] = load(b + i * LANES);
        sums.add(a + k, a_stride, w);
    }
    sums.save(c, c_stride);
}

}  // namespace bg
