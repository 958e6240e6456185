// Vectors by the compiler's extensions, as wide as the processor's registers: wider ones would be split and spilled.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace bg {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__ARM_NEON)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));  // bfloat16

struct bf16 {
    uint16_t bits;
};

static inline vf splat(float x) { return x - vf{}; }

template <class V, class T>
static inline V load_as(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class T>
static inline void store_as(T* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

static inline vf load(const float* p) { return load_as<vf>(p); }
static inline void store(float* p, vf v) { store_as(p, v); }

static inline float widen(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

static inline float widen(float x) { return x; }

// Rounds to nearest, ties to even; NaN stays NaN.
static inline bf16 narrow(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((bits >> 16) | 0x40u)};
    return bf16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

static inline vf widen(vh h) {
#if defined(__AVX512F__)
    return (vf)((vu)_mm512_cvtepu16_epi32((__m256i)h) << 16);  // the plain conversion takes five instructions with GCC
#elif defined(__AVX2__)
    return (vf)((vu)_mm256_cvtepu16_epi32((__m128i)h) << 16);  // the plain conversion takes four
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

#if !defined(__AVX512BF16__)
// bfloat16 in the upper halves, rounded like `narrow` above; the lower halves are undefined.
static inline vu upper_bf16(vf v) {
    const vu bits = (vu)v, near = bits + 0x7fffu + (bits >> 16 & 1u);
    return v == v ? near : bits | 0x400000u;
}
#endif

static inline vh narrow(vf v) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)v);  // flushes denormal numbers to zero
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i kept = (__m256i)(upper_bf16(v) >> 16);
    const __m256i packed = _mm256_packus_epi32(kept, kept);  // each half is stored twice
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
    return __builtin_convertvector(upper_bf16(v) >> 16, vh);
#endif
}

static inline vf load(const bf16* p) { return widen(load_as<vh>(p)); }
static inline void store(bf16* p, vf v) { store_as(p, narrow(v)); }

// Stores two adjacent vectors.
static inline void store(float* p, vf a, vf b) {
    store_as(p, a);
    store_as(p + LANES, b);
}

static inline void store(bf16* p, vf a, vf b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i halves = _mm256_packus_epi32((__m256i)(upper_bf16(a) >> 16), (__m256i)(upper_bf16(b) >> 16));
    store_as(p, _mm256_permute4x64_epi64(halves, 0xd8));
#else
    store(p, a);
    store(p + LANES, b);
#endif
}

// 0, 1, 2, ...
template <class V>
static inline V lane_numbers() {
    V v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

// Loads the first `count` elements, at most LANES; the other lanes are zero.
template <class T>
static inline vf load_some(const T* p, int64_t count) {
    T lanes[LANES] = {};
    std::memcpy(lanes, p, count * sizeof(T));
    return load(lanes);
}

template <class T>
static inline void store_some(T* p, vf v, int64_t count) {
    T lanes[LANES];
    store(lanes, v);
    std::memcpy(p, lanes, count * sizeof(T));
}

// Calls body(index, load, store) for `count` numbers, LANES at a time; the last call loads and stores the rest.
template <class Body>
static inline void by_vectors(int64_t count, Body body) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        body(i, [](const auto* p) { return load(p); }, [](auto* p, vf v) { store(p, v); });
    if (i < count) {
        const int64_t rest = count - i;
        body(i, [rest](const auto* p) { return load_some(p, rest); },
             [rest](auto* p, vf v) { store_some(p, v, rest); });
    }
}

// Whether any lane of a comparison is true.
static inline bool any(vi mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= mask[i];
    return bits != 0;
#endif
}

// x rounded to T, as float32.
template <class T>
static inline float rounded(float x);
template <>
inline float rounded<float>(float x) { return x; }
template <>
inline float rounded<bf16>(float x) { return widen(narrow(x)); }

template <class T>
static inline vf rounded(vf v);
template <>
inline vf rounded<float>(vf v) { return v; }
template <>
inline vf rounded<bf16>(vf v) {
#if defined(__AVX512BF16__)
    return widen(narrow(v));
#else  // in place: packing to 16 bits and back would cost more than the rounding
    return (vf)(upper_bf16(v) & 0xffff0000u);
#endif
}

static inline void put(float* p, float x) { *p = x; }
static inline void put(bf16* p, float x) { *p = narrow(x); }

static inline float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX__)
    __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
#endif
}

static inline float largest(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX__)
    __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

// Maximum and minimum; the second operand if either is NaN.
static inline vf max(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

static inline vf min(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

// a * b + c, with one rounding if the processor can. Explicit, because the compiler may fuse one sum of a tile and not
// another, and a row's result would depend on its position in the tile.
inline __attribute__((always_inline)) vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds a small number to the nearest integer,
constexpr int32_t INTEGER_BITS = 0x4b400000;  // which is the sum's bits minus these

// e^x to about 2 units in the last place; 0 or a denormal number below -87.3, infinity above 88.7, keeps NaN.
static inline vf exp(vf x) {
#if defined(__AVX512F__)
    const __m512 wide = (__m512)x, lowest = _mm512_set1_ps(-87.33655f);
    const __mmask16 above = _mm512_cmp_ps_mask(wide, lowest, _CMP_NLT_UQ);
    // These return the second operand if either is NaN.
    const __m512 clamped = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(lowest, wide));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    const vf v = (vf)r;
    p = p * v + 1.3981999507e-3f;
    p = p * v + 8.3334519073e-3f;
    p = p * v + 4.1665795894e-2f;
    p = p * v + 1.6666665459e-1f;
    p = p * v + 5.0000001201e-1f;
    p = p * (v * v) + v + 1.0f;
    return (vf)_mm512_maskz_scalef_ps(above, (__m512)p, n);
#else
    // Beyond these limits the two factors give 0 and infinity; NaN passes as the second operand.
    const vf clamped = min(splat(89.0f), max(splat(-104.0f), x));
    const vf shifted = clamped * 1.44269504f + TO_INTEGER;
    const vf n = shifted - TO_INTEGER;
    vf r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    // 2^n in two factors, as n may be 128. The bits above n are shifted out.
    const vu all = (vu)shifted, half = all >> 1, one = (vu)splat(1.0f);
    return p * (vf)((half << 23) + one) * (vf)(((all - half) << 23) + one);
#endif
}

#if defined(__AVX512DQ__)
// 2^x, 0 far below -126; keeps NaN. Relative error 3e-6, a thousandth of that of rounding to bfloat16.
static inline vf power_of_two(vf x) {
    const vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // [0, 1); 0 for infinity
    vf p = splat(0.01353417f);
    p = fused(p, r, splat(0.05201146f));
    p = fused(p, r, splat(0.24144276f));
    p = fused(p, r, splat(0.69300383f));
    p = fused(p, r, splat(1.00000259f));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);  // times 2^floor(x)
}
#endif

}  // namespace bg
