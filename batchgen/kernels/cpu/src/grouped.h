// Products of integers in groups with a float32 scale, for int8.cpp and bfp.cpp.
//
// A `Kind` defines how the numbers of x are stored and multiplied:
//
//     Number           integer type of x; as many as fit 4 bytes are multiplied at once
//     Groups           groups of inputs
//     MOST, ZERO       the largest number, and the offset added to each
//     ROWS             rows of a tile
//     start(block, v)  initial sums of register v
//     add(sum, x, w)   sum += products
//     HEADER_BYTES     bytes before a panel's weights for each of its outputs; the scale comes first
//
// The weights follow as [size / inputs of an instruction][outputs of the panel][inputs of an instruction].
#pragma once

#include "groups.h"
#include "rows.h"
#include "tiles.h"

namespace bg {

template <class Kind>
int64_t grouped_stride(const typename Kind::Groups& groups) {
    return round_up(groups.count * groups.size, 64 / sizeof(typename Kind::Number));
}

// Bytes of a thread's workspace: sums, scales, numbers.
template <class Kind>
int64_t grouped_scratch(const typename Kind::Groups& groups) {
    const int64_t numbers = sizeof(typename Kind::Number) * grouped_stride<Kind>(groups);
    return ROW_BLOCK * (4 * PANEL + numbers + 4 * round_up(groups.count, 16));
}

static inline vi nearest(vf v) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX__)
    return (vi)_mm256_cvtps_epi32((__m256)v);
#else
    return (vi)(v + TO_INTEGER) - INTEGER_BITS;
#endif
}

static inline void store_whole(uint8_t* p, vi a, vi b) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    store_as(p, __builtin_convertvector(a, bytes));
    store_as(p + LANES, __builtin_convertvector(b, bytes));
}

static inline void store_whole(int16_t* p, vi a, vi b) {
#if defined(__AVX512BW__)  // the pack interleaves quarters of a and b; the permutation orders them
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    store_as(p, _mm512_permutexvar_epi64(order, _mm512_packs_epi32((__m512i)a, (__m512i)b)));
#elif defined(__AVX2__) && !defined(__AVX512F__)  // GCC scalarises the plain conversion
    store_as(p, _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)a, (__m256i)b), 0xd8));
#else
    store_as(p, __builtin_convertvector(a, vh));
    store_as(p + LANES, __builtin_convertvector(b, vh));
#endif
}

// Quantises `count` numbers of a group of a row, and pads with zeros to `size`. Returns the scale; NaN if a number is
// infinite or NaN.
template <class Kind, class T>
float quantise(const T* x, int64_t count, int64_t size, typename Kind::Number* out) {
    using Number = typename Kind::Number;
    const float top = magnitude(x, count), inverse = Kind::MOST / top;
    if (!std::isfinite(inverse)) {  // zeros, denormal numbers, infinity or NaN
        std::fill(out, out + size, Number(Kind::ZERO));
        return top == top ? 0.0f : top;
    }
    int64_t k = 0;
    const auto whole = [&](int64_t k) { return nearest(load(x + k) * inverse) + Kind::ZERO; };
    const auto both = [&](int64_t k) { store_whole(out + k, whole(k), whole(k + LANES)); };
    for (; k + 2 * LANES <= count; k += 2 * LANES) both(k);
    if (k && k < count) both(count - 2 * LANES), k = count;  // the last vectors overlap
    for (; k < count; k++) out[k] = Number(Kind::ZERO + std::lrintf(widen(x[k]) * inverse));
    for (; k < size; k++) out[k] = Kind::ZERO;
    return top / Kind::MOST;
}

// Adds one group's part to a tile c [ROWS, ACROSS registers], rows C_STRIDE apart, or `c_stride` if that is 0. x has
// ROWS rows of integers `stride` apart, with scales `scale_stride` apart. Not inlined, because GCC would spill the
// sums.
template <class Kind, int ROWS, Ahead AHEAD, int ACROSS = COLUMNS, int C_STRIDE = PANEL>
__attribute__((noinline)) void tile_grouped(
    const typename Kind::Number* x, int64_t stride, const float* x_scale, int64_t scale_stride, const char* block,
    int64_t size, float* c, bool first, int64_t c_stride, Lines ahead) {
    constexpr int64_t STEP = 4 / sizeof(*x), WIDTH = ACROSS * LANES;
    const float* scale = reinterpret_cast<const float*>(block);
    const char* w = block + Kind::HEADER_BYTES * WIDTH;
    vi sum[ROWS][ACROSS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < ACROSS; v++) {
            sum[r][v] = Kind::start(block, v);
            hold(sum[r][v]);
        }
    for (int64_t k = 0; k < size; k += STEP, w += 4 * WIDTH) {
        fetch_line<AHEAD>(ahead, k / STEP / 2);
        if (AHEAD == STREAM) stream<4 * WIDTH>(w);
        vi b[ACROSS];
#pragma GCC unroll 8
        for (int v = 0; v < ACROSS; v++) b[v] = load_as<vi>(w + 4 * LANES * v);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t some;
            std::memcpy(&some, x + r * stride + k, 4);
            const vi a = some - vi{};
#pragma GCC unroll 8
            for (int v = 0; v < ACROSS; v++) Kind::add(sum[r][v], a, b[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        const vf s = splat(x_scale[r * scale_stride]);
#pragma GCC unroll 8
        for (int v = 0; v < ACROSS; v++) {
            hold(sum[r][v]);
            const int64_t at = r * (C_STRIDE ? C_STRIDE : c_stride) + v * LANES;
            const vf part = __builtin_convertvector(sum[r][v], vf) * load(scale + v * LANES);
            store(c + at, fused(part, s, load(first ? NO_SUMS + v * LANES : c + at)));
        }
    }
}

// Multiplies rows of x, of type T, with some panels, and writes rows of y, of type Y.
template <class Kind, class T, class Y>
void grouped_rows(const Matmul& m, const Panels& s, const typename Kind::Groups& groups, int64_t row, int64_t rows) {
    using Number = typename Kind::Number;
    const int64_t stride = grouped_stride<Kind>(groups), scales = round_up(groups.count, 16);
    float* scale = reinterpret_cast<float*>(s.work);
    Number* numbers = reinterpret_cast<Number*>(scale + ROW_BLOCK * scales);
    constexpr int64_t STEP = 4 / sizeof(Number);
    // Inputs of a group; the last group may be shorter than the others.
    const auto inputs = [&](int64_t g) { return std::clamp<int64_t>(m.inner - g * groups.size, 0, groups.size); };
    for (int64_t r = 0; r < rows && s.fresh; r++)
        for (int64_t g = 0; g < groups.count; g++) {
            const int64_t k = g * groups.size, count = inputs(g);
            const T* x = static_cast<const T*>(m.x) + (row + r) * m.x_stride + k;
            scale[r * scales + g] = quantise<Kind>(x, count, round_up(count, STEP), numbers + r * stride + k);
        }
    for (int64_t p = s.panel; p < s.panel_end; p++) {
        const char* block = static_cast<const char*>(m.weight) + p * groups.count * groups.bytes();
        if (!groups.count) std::fill(s.c, s.c + rows * PANEL, 0.0f);
        for (int64_t g = 0; g < groups.count; g++, block += groups.bytes()) {
            const int64_t size = round_up(inputs(g), STEP);
            NextBlock next(s.next_weights(block, groups.bytes(), p, g + 1 == groups.count), rows, s.fetch);
            by_runs<Kind::ROWS>(rows, [&](auto n, int64_t r) {
                const Number* x = numbers + r * stride + g * groups.size;
                next.for_tile(size / STEP / 2, [&](auto ahead, Lines from) {
                    tile_grouped<Kind, n(), ahead()>(
                        x, stride, scale + r * scales + g, scales, block, size, s.c + r * PANEL, g == 0, PANEL, from);
                });
            });
        }
        write<Y>(m, s.c, row, rows, p * PANEL);
    }
}

}  // namespace bg
