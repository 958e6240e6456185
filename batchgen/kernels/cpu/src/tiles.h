// Tiles of a product: up to TILE_ROWS rows of x times one panel of weights, with sums in registers.
#pragma once

#include <type_traits>

#include "fetch.h"
#include "matmul.h"

namespace bg {

constexpr int COLUMNS = PANEL / LANES;  // registers across a panel

// How a tile prefetches later data into the L2 cache while it multiplies. With many tiles, each prefetches a part of
// the next block of weights, and when all of it is assigned, keys and values. With few tiles, the first streams the
// weights.
enum Ahead {
    NO_PREFETCH,
    SPREAD,   // one of adjacent lines for every two k
    SCATTER,  // one of lines in chunks for every two k
    STREAM,   // as much as is read, STREAM_BYTES ahead of it
};
constexpr int64_t STREAM_BYTES = 4096;

constexpr int64_t FEW_TILES = 3;  // fewer tiles than this cannot fetch the next block with one line for every two k

// Assigns the lines to prefetch to the tiles of a block: first the next weights, then those of `fetch`, which may be
// null.
class NextBlock {
  public:
    NextBlock(const Block& next, int64_t rows, KvFetch::Layer* fetch)
        : at(next.at),
          end(at + next.bytes),
          few(rows <= (FEW_TILES - 1) * TILE_ROWS),
          fetch(fetch) {}

    // Calls kernel(constant Ahead, Lines) for a tile that prefetches up to `lines` lines.
    template <class Kernel>
    inline __attribute__((always_inline)) void for_tile(int64_t lines, Kernel kernel) {
        if (few && at < end) {  // the first tile streams all
            at = end;
            return kernel(std::integral_constant<Ahead, STREAM>{}, Lines{});
        }
        if (at < end) {
            const Lines from{at, nullptr};
            at += lines * LINE;
            return kernel(std::integral_constant<Ahead, SPREAD>{}, from);
        }
        const Lines from = fetch ? fetch->take(lines) : Lines{};
        if (from.base) return kernel(std::integral_constant<Ahead, SCATTER>{}, from);
        kernel(std::integral_constant<Ahead, NO_PREFETCH>{}, from);
    }

  private:
    const char *at, *end;
    const bool few;
    KvFetch::Layer* const fetch;
};

// Prefetches line i of a tile's lines.
template <Ahead AHEAD>
inline __attribute__((always_inline)) void fetch_line(const Lines& from, uint64_t i) {
    if (AHEAD == SPREAD) __builtin_prefetch(from.base + i * LINE, 0, 2);
    if (AHEAD == SCATTER) __builtin_prefetch(from.at(i), 0, 2);
}

// Prefetches BYTES bytes, STREAM_BYTES after `p`.
template <int BYTES>
inline __attribute__((always_inline)) void stream(const void* p) {
#pragma GCC unroll 8
    for (int i = 0; i < BYTES; i += LINE) __builtin_prefetch(static_cast<const char*>(p) + STREAM_BYTES + i, 0, 2);
}

alignas(64) constexpr float NO_SUMS[PANEL] = {};

// Keeps x in a register: otherwise GCC moves a tile's sums through memory before and after the loop.
template <class V>
inline __attribute__((always_inline)) void hold(V& x) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(x));
#elif defined(__x86_64__)
    __asm__("" : "+x"(x));
#elif defined(__ARM_NEON)
    __asm__("" : "+w"(x));
#endif
}

// Sums of ROWS rows and ACROSS registers; in memory, rows are `c_stride` numbers apart.
template <int ROWS, int ACROSS = COLUMNS>
struct Sums {
    vf of[ROWS][ACROSS];

    __attribute__((always_inline)) Sums(const float* c, bool first, int64_t c_stride = PANEL) {
        if (first) c = NO_SUMS, c_stride = 0;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int v = 0; v < ACROSS; v++) {
                of[r][v] = load(c + r * c_stride + v * LANES);
                hold(of[r][v]);
            }
    }

    __attribute__((always_inline)) void save(float* c, int64_t c_stride = PANEL) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int v = 0; v < ACROSS; v++) {
                hold(of[r][v]);
                store(c + r * c_stride + v * LANES, of[r][v]);
            }
    }

    // Writes results: the sums, plus the bias if there is one.
    template <class T>
    __attribute__((always_inline)) void write(T* out, int64_t out_stride, const float* bias) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int v = 0; v < ACROSS; v++) {
                hold(of[r][v]);
                store(out + r * out_stride + v * LANES, bias ? of[r][v] + load(bias + v * LANES) : of[r][v]);
            }
    }

    // of[r][v] += x[r * stride] * w[v].
    __attribute__((always_inline)) void add(const float* x, int64_t stride, const vf (&w)[ACROSS]) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const vf a = splat(x[r * stride]);
#pragma GCC unroll 8
            for (int v = 0; v < ACROSS; v++) of[r][v] = fused(a, w[v], of[r][v]);
        }
    }

#if defined(__AVX512BF16__)
    // of[r][v] += the dot product of the pair x[r * stride] and the pairs at `at(v)`.
    template <class At>
    __attribute__((always_inline)) void dot(const bf16* x, int64_t stride, At at) {
        __m512bh b[ACROSS];
#pragma GCC unroll 8
        for (int v = 0; v < ACROSS; v++) b[v] = (__m512bh)_mm512_loadu_si512(at(v));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * stride, 4);
            const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
            for (int v = 0; v < ACROSS; v++) of[r][v] = (vf)_mm512_dpbf16_ps((__m512)of[r][v], a, b[v]);
        }
    }
#endif
};

// c [ROWS, PANEL] (+)= x [ROWS, count] b [count, PANEL], all float32.
template <int ROWS, Ahead AHEAD>
void tile(const float* x, int64_t stride, const float* b, int64_t count, float* c, bool first, Lines ahead) {
    Sums<ROWS> sums(c, first);
    for (int64_t k = 0; k < count; k++, b += PANEL) {
        fetch_line<AHEAD>(ahead, k / 2);
        if (AHEAD == STREAM) stream<4 * PANEL>(b);
        vf w[COLUMNS];
#pragma GCC unroll 8
        for (int v = 0; v < COLUMNS; v++) w[v] = load(b + v * LANES);
        sums.add(x + k, stride, w);
    }
    sums.save(c);
}

// The same over bfloat16 pairs, widened in registers; KEEP: also stored to `wide`, [2 * pairs, PANEL], for the tiles
// that follow.
template <int ROWS, bool KEEP, Ahead AHEAD>
void tile_pairs(const float* x, int64_t stride, const bf16* b, int64_t pairs, float* c, bool first, float* wide) {
    Sums<ROWS> sums(c, first);
    for (int64_t k = 0; k < pairs; k++, b += 2 * PANEL) {
        if (AHEAD == STREAM) stream<4 * PANEL>(b);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            vf w[COLUMNS];
#pragma GCC unroll 8
            for (int v = 0; v < COLUMNS; v++) {
                const vu both = load_as<vu>(b + 2 * LANES * v);
                w[v] = (vf)(half ? both & 0xffff0000u : both << 16);
                if (KEEP) store(wide + (2 * k + half) * PANEL + v * LANES, w[v]);
            }
            sums.add(x + 2 * k + half, stride, w);
        }
    }
    sums.save(c);
}

#if defined(__AVX512BF16__)
// The same with the dot instruction, for the panel's first ACROSS registers; the sums go to `out` if it is not null.
template <int ROWS, Ahead AHEAD, int ACROSS = COLUMNS>
void tile_dot(
    const bf16* x, int64_t stride, const bf16* b, int64_t pairs, float* c, bool first, Lines ahead, bf16* out,
    int64_t out_stride, const float* bias) {
    Sums<ROWS, ACROSS> sums(c, first);
    for (int64_t k = 0; k < pairs; k++, b += 2 * PANEL) {
        fetch_line<AHEAD>(ahead, k);
        if (AHEAD == STREAM) stream<4 * PANEL>(b);
        sums.dot(x + 2 * k, stride, [b](int v) { return b + 2 * LANES * v; });
    }
    out ? sums.write(out, out_stride, bias) : sums.save(c);
}
#endif

}  // namespace bg
