// Emulates the AVX-512 intrinsics that the kernels use with AVX2, by halves or lane by lane, as the processor's manual
// defines them. For tests only: comes before the compiler's header on the search path.
#pragma once

#undef __AVX512F__
#undef __AVX512DQ__
#undef __AVX512BF16__
#undef __AVX512VNNI__
#include_next <immintrin.h>
#define __AVX512F__ 1
#define __AVX512DQ__ 1
#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace wide {

template <class To, class From>
inline To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

struct Halves {
    __m256 low, high;
};

template <class Op>
inline __m512 by_halves(Op op, __m512 a, __m512 b) {
    const auto x = bits<Halves>(a), y = bits<Halves>(b);
    return bits<__m512>(Halves{op(x.low, y.low), op(x.high, y.high)});
}

template <class Op>
inline __m512 by_halves(Op op, __m512 a, __m512 b, __m512 c) {
    const auto x = bits<Halves>(a), y = bits<Halves>(b), z = bits<Halves>(c);
    return bits<__m512>(Halves{op(x.low, y.low, z.low), op(x.high, y.high, z.high)});
}

// A vector whose lane i is lane(i).
template <class V, class Lane>
inline V by_lanes(Lane lane) {
    V v{};
    for (unsigned i = 0; i < sizeof(V) / sizeof(v[0]); i++) v[i] = lane(i);
    return v;
}

typedef uint16_t shorts __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint64_t longs __attribute__((vector_size(64)));
typedef uint16_t half_shorts __attribute__((vector_size(32)));

// Not inlined: the kernels have thousands of them in a row.
__attribute__((noinline)) static __m512 fmadd(__m512 a, __m512 b, __m512 c) {
    return by_halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }, a, b, c);
}

inline __m512 fnmadd(__m512 a, __m512 b, __m512 c) {
    return by_halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fnmadd_ps(x, y, z); }, a, b, c);
}

inline __m512 max(__m512 a, __m512 b) {
    return by_halves([](__m256 x, __m256 y) { return _mm256_max_ps(x, y); }, a, b);
}

inline __m512 min(__m512 a, __m512 b) {
    return by_halves([](__m256 x, __m256 y) { return _mm256_min_ps(x, y); }, a, b);
}

inline __m512i loaded(const void* p) {
    __m512i v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Reduces all lanes to one: the upper half onto the lower, repeatedly.
template <class Op>
inline float reduced(__m512 v, Op op) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] = op(v[i], v[i + half]);
    return v[0];
}

// Within each 128 bits, the elements of their low or high half, of a and b interleaved.
template <class V, class T>
inline T unpacked(T a, T b, bool high) {
    const V x = bits<V>(a), y = bits<V>(b);
    constexpr unsigned EACH = 16 / sizeof(x[0]);
    return bits<T>(by_lanes<V>([&](unsigned i) {
        const unsigned from = i / EACH * EACH + i % EACH / 2 + (high ? EACH / 2 : 0);
        return i % 2 ? y[from] : x[from];
    }));
}

// Of the four 128-bit lanes of each: two of a, then two of b.
template <class T>
inline T shuffled(T a, T b, unsigned chosen) {
    const longs x = bits<longs>(a), y = bits<longs>(b);
    return bits<T>(by_lanes<longs>([&](unsigned i) {
        const unsigned from = 2 * (chosen >> i / 2 * 2 & 3) + i % 2;
        return i < 4 ? x[from] : y[from];
    }));
}

// To the nearest integers (how = 8).
inline __m512 rounded(__m512 v, int how) {
    return how == 8 ? by_lanes<__m512>([&](unsigned i) { return std::nearbyint(v[i]); }) : __m512{};
}

// x - floor(x) (how = 9); 0 for infinity.
inline __m512 reduced_down(__m512 v, int how) {
    return how == 9 ? by_lanes<__m512>([&](unsigned i) { return std::isinf(v[i]) ? 0.0f : v[i] - std::floor(v[i]); }) : __m512{};
}

// x * 2^floor(n) where the mask is set, else zero.
inline __m512 scaled(__mmask16 mask, __m512 x, __m512 n) {
    return by_lanes<__m512>([&](unsigned i) {
        if (!(mask >> i & 1)) return 0.0f;
        return n[i] == n[i] ? std::ldexp(x[i], int(std::clamp(std::floor(n[i]), -1000.0f, 1000.0f))) : n[i];
    });
}

template <class Lane>
inline __mmask16 mask(Lane lane) {
    unsigned m = 0;
    for (unsigned i = 0; i < 16; i++) m |= unsigned(bool(lane(i))) << i;
    return __mmask16(m);
}

// Not less, or NaN (how = _CMP_NLT_UQ).
inline __mmask16 compared(__m512 a, __m512 b, int how) {
    return how == _CMP_NLT_UQ ? mask([&](unsigned i) { return !(a[i] < b[i]); }) : __mmask16(0);
}

inline __mmask16 common_bits(__m512i a, __m512i b) {
    const words both = bits<words>(a) & bits<words>(b);
    return mask([&](unsigned i) { return both[i] != 0; });
}

inline __m512i from_shorts(__m256i h) {
    return bits<__m512i>(__builtin_convertvector(bits<half_shorts>(h), words));
}

// Flushes denormal numbers to zero, as the bfloat16 instructions do.
inline __m256 flushed(__m256 v) {
    const __m256 sign = _mm256_set1_ps(-0.0f), size = _mm256_andnot_ps(sign, v);
    const __m256 small = _mm256_cmp_ps(size, _mm256_set1_ps(0x1p-126f), _CMP_LT_OQ);
    return _mm256_blendv_ps(v, _mm256_and_ps(sign, v), small);
}

// To bfloat16: to the nearest, ties to even.
inline __m256i to_bfloat16(__m512 v) {
    const auto halves = bits<Halves>(v);
    const words b = bits<words>(Halves{flushed(halves.low), flushed(halves.high)});
    const words nearest = (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
    const words result = (b & 0x7fffffffu) > 0x7f800000u ? b >> 16 | 0x40u : nearest;
    return bits<__m256i>(__builtin_convertvector(result, half_shorts));
}

// Those of b, then those of a.
inline __m512i to_bfloat16(__m512 a, __m512 b) {
    struct {
        __m256i low, high;
    } both{to_bfloat16(b), to_bfloat16(a)};
    return bits<__m512i>(both);
}

// Picks 16-bit elements of a and b by the low bits of `chosen`.
inline __m512i picked(__m512i a, __m512i chosen, __m512i b) {
    const shorts x = bits<shorts>(a), y = bits<shorts>(b), at = bits<shorts>(chosen);
    return bits<__m512i>(by_lanes<shorts>([&](unsigned i) { return at[i] & 32 ? y[at[i] & 31] : x[at[i] & 31]; }));
}

// sum + a * b over pairs of bfloat16, the second of a pair first, each product added with one rounding.
template <class V>
__attribute__((noinline)) static __m512 dots(__m512 sum, V a, V b) {
    const words x = bits<words>(a), y = bits<words>(b);
    const auto add = [](__m256 s, __m256 p, __m256 q) {
        return flushed(_mm256_fmadd_ps(flushed(p), flushed(q), flushed(s)));
    };
    sum = by_halves(add, sum, bits<__m512>(x & 0xffff0000u), bits<__m512>(y & 0xffff0000u));
    return by_halves(add, sum, bits<__m512>(x << 16), bits<__m512>(y << 16));
}

// To the nearest integers.
inline __m512i to_integers(__m512 v) {
    const auto halves = bits<Halves>(v);
    struct {
        __m256i low, high;
    } whole{_mm256_cvtps_epi32(halves.low), _mm256_cvtps_epi32(halves.high)};
    return bits<__m512i>(whole);
}

// sum + products of the A and B in each 32 bits.
template <class A, class B>
__attribute__((noinline)) static __m512i integer_dots(__m512i sum, __m512i a, __m512i b) {
    typedef A as __attribute__((vector_size(64)));
    typedef B bs __attribute__((vector_size(64)));
    constexpr unsigned EACH = 4 / sizeof(A);
    const as x = bits<as>(a);
    const bs y = bits<bs>(b);
    words total = bits<words>(sum);
    for (unsigned i = 0; i < 16 * EACH; i++) total[i / EACH] += uint32_t(int32_t(x[i]) * int32_t(y[i]));
    return bits<__m512i>(total);
}

}  // namespace wide

#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_i32x4
#undef _mm512_roundscale_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_reduce_ps

#define _mm512_set1_ps(x) (float(x) - __m512{})
#define _mm512_set1_epi32(x) wide::bits<__m512i>(uint32_t(x) - wide::words{})
#define _mm512_loadu_si512 wide::loaded
#define _mm512_fmadd_ps wide::fmadd
#define _mm512_fnmadd_ps wide::fnmadd
#define _mm512_mul_ps(a, b) ((a) * (b))
#define _mm512_max_ps wide::max
#define _mm512_min_ps wide::min
#define _mm512_reduce_add_ps(v) wide::reduced(v, [](float a, float b) { return a + b; })
#define _mm512_reduce_max_ps(v) wide::reduced(v, [](float a, float b) { return a > b ? a : b; })
#define _mm512_unpacklo_ps(a, b) wide::unpacked<wide::words>(a, b, false)
#define _mm512_unpackhi_ps(a, b) wide::unpacked<wide::words>(a, b, true)
#define _mm512_unpacklo_pd(a, b) wide::unpacked<wide::longs>(a, b, false)
#define _mm512_unpackhi_pd(a, b) wide::unpacked<wide::longs>(a, b, true)
#define _mm512_unpacklo_epi32(a, b) wide::unpacked<wide::words>(a, b, false)
#define _mm512_unpackhi_epi32(a, b) wide::unpacked<wide::words>(a, b, true)
#define _mm512_unpacklo_epi64(a, b) wide::unpacked<wide::longs>(a, b, false)
#define _mm512_unpackhi_epi64(a, b) wide::unpacked<wide::longs>(a, b, true)
#define _mm512_shuffle_f32x4 wide::shuffled
#define _mm512_shuffle_i32x4 wide::shuffled
#define _mm512_roundscale_ps wide::rounded
#define _mm512_reduce_ps wide::reduced_down
#define _mm512_maskz_scalef_ps wide::scaled
#define _mm512_scalef_ps(x, n) wide::scaled(0xffff, x, n)
#define _mm512_rcp14_ps(x) (1.0f / (x))
#define _mm512_cmp_ps_mask wide::compared
#define _mm512_test_epi32_mask wide::common_bits
#define _mm512_cvtepu16_epi32 wide::from_shorts
#define _mm512_cvtneps_pbh wide::to_bfloat16
#define _mm512_cvtne2ps_pbh wide::to_bfloat16
#define _mm512_permutex2var_epi16 wide::picked
#define _mm512_dpbf16_ps wide::dots
#define _mm512_cvtps_epi32 wide::to_integers
#define _mm512_dpbusd_epi32(sum, a, b) wide::integer_dots<uint8_t, int8_t>(sum, a, b)
#define _mm512_dpwssd_epi32(sum, a, b) wide::integer_dots<int16_t, int16_t>(sum, a, b)

#define __asm__(...)  // the statements that keep a vector in one register do not apply here
