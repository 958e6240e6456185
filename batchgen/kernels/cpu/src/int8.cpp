#include "int8.h"

#include "parallel.h"
#include "rows.h"
#include "tiles.h"

namespace bg {

int64_t int8_scratch(int64_t inner) {
    const Groups groups(inner);
    return ROW_BLOCK * (4 * PANEL + up(groups.count * groups.size, 64) + 4 * up(groups.count, 16));
}

#if defined(__AVX512VNNI__)

namespace {

// One group's part of a tile: x [ROWS] of bytes, `stride` apart, with scales `scale_stride` apart.
template <int ROWS, Ahead AHEAD>
void tile_int8(const uint8_t* x, int64_t stride, const float* x_scale, int64_t scale_stride, const char* block,
               int64_t size, float* c, bool first) {
    const float* scale = reinterpret_cast<const float*>(block);
    const int32_t* correction = reinterpret_cast<const int32_t*>(block) + PANEL;
    const int8_t* w = reinterpret_cast<const int8_t*>(block) + 8 * PANEL;
    __m512i sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < COLUMNS; v++)
            sum[r][v] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(correction + v * LANES));
    for (int64_t k = 0; k < size; k += 4, w += 4 * PANEL) {
        if (AHEAD == STREAM) stream<4 * PANEL>(w);
        __m512i b[COLUMNS];
#pragma GCC unroll 8
        for (int v = 0; v < COLUMNS; v++) b[v] = _mm512_loadu_si512(w + 4 * LANES * v);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t four;
            std::memcpy(&four, x + r * stride + k, 4);
            const __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 8
            for (int v = 0; v < COLUMNS; v++) {
                // By its name: GCC keeps the intrinsic's sums in memory beside the register.
                __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[r][v]) : "v"(a), "v"(b[v]));
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        const vf s = splat(x_scale[r * scale_stride]);
#pragma GCC unroll 8
        for (int v = 0; v < COLUMNS; v++) {
            const int at = r * PANEL + v * LANES;
            const vf part = (vf)_mm512_cvtepi32_ps(sum[r][v]) * load(scale + v * LANES);
            store(c + at, fused(part, s, load(first ? NO_SUMS + v * LANES : c + at)));
        }
    }
}

// One group of a row: its scale, and its numbers in bytes around 128. A group with a number that is none has a scale
// that is none.
template <class T>
float quantise(const T* x, int64_t count, int64_t size, uint8_t* out) {
    const float top = magnitude(x, count), inverse = 127.0f / top;
    if (!std::isfinite(inverse)) {  // zeros, denormal numbers, or none
        std::fill(out, out + size, uint8_t(128));
        return top == top ? 0.0f : top;
    }
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) {
        const vi whole = (vi)_mm512_cvtps_epi32((__m512)(load(x + k) * inverse)) + 128;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k), _mm512_cvtusepi32_epi8((__m512i)whole));
    }
    for (; k < count; k++) out[k] = uint8_t(128 + std::lrintf(widen(x[k]) * inverse));
    for (; k < size; k++) out[k] = 128;
    return top / 127.0f;
}

template <class T>
void rows_of(const Matmul& m, const Share& s, const Groups& groups, int64_t row, int64_t rows) {
    const int64_t stride = up(groups.count * groups.size, 64), scales = up(groups.count, 16);
    float* scale = reinterpret_cast<float*>(s.work);
    uint8_t* bytes = reinterpret_cast<uint8_t*>(scale + ROW_BLOCK * scales);
    for (int64_t r = 0; r < rows && s.fresh; r++)
        for (int64_t g = 0; g < groups.count; g++) {
            const int64_t k = g * groups.size, count = std::clamp<int64_t>(m.inner - k, 0, groups.size);
            const T* x = static_cast<const T*>(m.x) + (row + r) * m.x_stride + k;
            scale[r * scales + g] = quantise(x, count, groups.size, bytes + r * stride + k);
        }
    for (int64_t p = s.panel; p < s.panel_end; p++) {
        const char* block = static_cast<const char*>(m.weight) + p * groups.count * groups.bytes();
        if (!groups.count) std::fill(s.c, s.c + rows * PANEL, 0.0f);
        for (int64_t g = 0; g < groups.count; g++, block += groups.bytes())
            by_runs<TILE_ROWS>(rows, [&](auto n, int64_t r) {
                const uint8_t* x = bytes + r * stride + g * groups.size;
                const auto tile = r == 0 ? tile_int8<n(), STREAM> : tile_int8<n(), NOTHING>;
                tile(x, stride, scale + r * scales + g, scales, block, groups.size, s.c + r * PANEL, g == 0);
            });
        write<T>(m, s.c, row, rows, p * PANEL);
    }
}

}  // namespace

int64_t int8_part(const Matmul& m, Claims& claims, int thread, int threads) {
    const Groups groups(m.inner);
    return by_claims(m, claims, thread, threads, int8_scratch(m.inner), [&](const Share& s, int64_t row, int64_t rows) {
        if (m.method == INT8_F32) rows_of<float>(m, s, groups, row, rows);
        else rows_of<bf16>(m, s, groups, row, rows);
    });
}

#else

int64_t int8_part(const Matmul&, Claims&, int, int) { return 0; }

#endif

}  // namespace bg
