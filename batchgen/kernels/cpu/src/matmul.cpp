#include "matmul.h"

#include "parallel.h"

#include <algorithm>
#include <type_traits>

namespace bg {
namespace {

constexpr int64_t ROW_BLOCK = 64;    // rows whose inputs are widened together
constexpr int64_t INNER_BLOCK = 1536;  // even: bfloat16 weights come in pairs

// acc[r][v] over k of a[r][k] * b[k][v]; b is a float32 panel.
template <int ROWS>
void tile(const float* a, int64_t a_stride, const float* b, int64_t inner, float* c, bool first) {
    vf acc[ROWS][PANEL_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = first ? vf{} : load(c + r * PANEL + v * LANES);
    for (int64_t k = 0; k < inner; k++, b += PANEL) {
        vf w[PANEL_VECTORS];
        for (int v = 0; v < PANEL_VECTORS; v++) w[v] = load(b + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const vf x = splat(a[r * a_stride + k]);
            for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] += x * w[v];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) store(c + r * PANEL + v * LANES, acc[r][v]);
}

// The same over bfloat16 pairs that are widened on the way: for few rows.
template <int ROWS>
void tile_pairs(const float* a, int64_t a_stride, const bf16* b, int64_t pairs, float* c, bool first) {
    vf acc[ROWS][PANEL_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = first ? vf{} : load(c + r * PANEL + v * LANES);
    for (int64_t k = 0; k < pairs; k++, b += 2 * PANEL) {
        for (int half = 0; half < 2; half++) {
            vf w[PANEL_VECTORS];
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const vu both = load_as<vu>(b + 2 * LANES * v);
                w[v] = (vf)(half ? both & 0xffff0000u : both << 16);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const vf x = splat(a[r * a_stride + 2 * k + half]);
                for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] += x * w[v];
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) store(c + r * PANEL + v * LANES, acc[r][v]);
}

#if defined(__AVX512BF16__)
template <int ROWS>
void tile_dot(const bf16* a, int64_t a_stride, const bf16* b, int64_t pairs, float* c, bool first) {
    __m512 acc[ROWS][PANEL_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PANEL_VECTORS; v++)
            acc[r][v] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * PANEL + v * LANES);
    for (int64_t k = 0; k < pairs; k++, b += 2 * PANEL) {
        __m512bh w[PANEL_VECTORS];
        for (int v = 0; v < PANEL_VECTORS; v++) w[v] = (__m512bh)_mm512_loadu_si512(b + 2 * LANES * v);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            std::memcpy(&pair, a + r * a_stride + 2 * k, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], x, w[v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) _mm512_storeu_ps(c + r * PANEL + v * LANES, acc[r][v]);
}
#endif

void widen_panel(const bf16* b, int64_t pairs, float* out) {
    for (int64_t k = 0; k < pairs; k++, b += 2 * PANEL, out += 2 * PANEL)
        for (int v = 0; v < PANEL_VECTORS; v++) {
            const vu both = load_as<vu>(b + 2 * LANES * v);
            store(out + v * LANES, (vf)(both << 16));
            store(out + PANEL + v * LANES, (vf)(both & 0xffff0000u));
        }
}

template <class Kernel>
void by_rows(int64_t rows, Kernel kernel) {
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS) kernel(std::integral_constant<int, TILE_ROWS>{}, r);
    switch (rows - r) {
        case 7: kernel(std::integral_constant<int, 7>{}, r); break;
        case 6: kernel(std::integral_constant<int, 6>{}, r); break;
        case 5: kernel(std::integral_constant<int, 5>{}, r); break;
        case 4: kernel(std::integral_constant<int, 4>{}, r); break;
        case 3: kernel(std::integral_constant<int, 3>{}, r); break;
        case 2: kernel(std::integral_constant<int, 2>{}, r); break;
        case 1: kernel(std::integral_constant<int, 1>{}, r); break;
        default: break;
    }
}

template <class T>
void write(const Matmul& m, const float* c, int64_t row, int64_t rows, int64_t column) {
    const int64_t width = std::min<int64_t>(PANEL, m.outer - column);
    for (int64_t r = 0; r < rows; r++, c += PANEL) {
        T* out = static_cast<T*>(m.out) + (row + r) * m.out_stride + column;
        if (width == PANEL) {
            for (int v = 0; v < PANEL_VECTORS; v++) {
                vf y = load(c + v * LANES);
                if (m.bias) y += load(m.bias + column + v * LANES);
                store(out + v * LANES, y);
            }
        } else {
            for (int64_t i = 0; i < width; i++) put(out + i, c[i] + (m.bias ? m.bias[column + i] : 0.0f));
        }
    }
}

void widen_rows(const Matmul& m, int64_t row, int64_t rows, int64_t from, int64_t count, float* out) {
    const int64_t even = (count + 1) & ~int64_t(1);
    for (int64_t r = 0; r < rows; r++, out += even) {
        const bf16* x = static_cast<const bf16*>(m.x) + (row + r) * m.x_stride + from;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(out + i, load(x + i));
        for (; i < count; i++) out[i] = widen(x[i]);
        if (even != count) out[count] = 0.0f;
    }
}

void pad_rows(const Matmul& m, int64_t row, int64_t rows, bf16* out) {
    const int64_t even = m.inner + 1;
    for (int64_t r = 0; r < rows; r++, out += even) {
        std::memcpy(out, static_cast<const bf16*>(m.x) + (row + r) * m.x_stride, 2 * m.inner);
        out[m.inner] = bf16{0};
    }
}

}  // namespace

int64_t matmul_scratch(int64_t inner, int64_t) {
    const int64_t block = std::min<int64_t>(inner + 1, INNER_BLOCK);
    return 4 * (ROW_BLOCK * PANEL + (ROW_BLOCK + PANEL) * (block + 1) + 64);
}

void matmul_part(const Matmul& m, int thread, int threads) {
    const int64_t panels = (m.outer + PANEL - 1) / PANEL;
    const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
    float* c = reinterpret_cast<float*>(static_cast<char*>(m.scratch) + thread * matmul_scratch(m.inner, m.method));
    float* wide = c + ROW_BLOCK * PANEL;            // [ROW_BLOCK, block]
    const int64_t block = std::min<int64_t>((m.inner + 1) & ~int64_t(1), INNER_BLOCK);
    float* panel = wide + ROW_BLOCK * block;        // [block, PANEL]
    const int64_t pairs_all = (m.inner + 1) / 2;
    for (int64_t row = 0; row < m.rows; row += ROW_BLOCK) {
        const int64_t rows = std::min(ROW_BLOCK, m.rows - row);
        const bool one_block = m.inner <= INNER_BLOCK;
        if (m.method == BF16_WIDENED && one_block) widen_rows(m, row, rows, 0, m.inner, wide);
        const bool pad = m.method == BF16_DOT && (m.inner & 1);
        bf16* padded = reinterpret_cast<bf16*>(wide);
        for (int64_t p = begin; p < end; p++) {
            if (m.method == F32) {
                const float* b = static_cast<const float*>(m.weight) + p * m.inner * PANEL;
                by_rows(rows, [&](auto n, int64_t r) {
                    tile<n()>(static_cast<const float*>(m.x) + (row + r) * m.x_stride, m.x_stride, b, m.inner, c + r * PANEL, true);
                });
                write<float>(m, c, row, rows, p * PANEL);
                continue;
            }
            const bf16* b = static_cast<const bf16*>(m.weight) + p * pairs_all * 2 * PANEL;
#if defined(__AVX512BF16__)
            if (m.method == BF16_DOT && !pad) {
                by_rows(rows, [&](auto n, int64_t r) {
                    tile_dot<n()>(static_cast<const bf16*>(m.x) + (row + r) * m.x_stride, m.x_stride, b, pairs_all, c + r * PANEL, true);
                });
                write<bf16>(m, c, row, rows, p * PANEL);
                continue;
            }
#endif
            (void)padded;
            for (int64_t k = 0; k < m.inner; k += INNER_BLOCK) {
                const int64_t count = std::min(INNER_BLOCK, m.inner - k);
                const int64_t even = (count + 1) & ~int64_t(1), pairs = even / 2;
                if (!one_block) widen_rows(m, row, rows, k, count, wide);
                if (rows <= 2 * TILE_ROWS) {
                    by_rows(rows, [&](auto n, int64_t r) {
                        tile_pairs<n()>(wide + r * even, even, b + k * PANEL, pairs, c + r * PANEL, k == 0);
                    });
                } else {
                    widen_panel(b + k * PANEL, pairs, panel);
                    by_rows(rows, [&](auto n, int64_t r) {
                        tile<n()>(wide + r * even, even, panel, even, c + r * PANEL, k == 0);
                    });
                }
            }
            write<bf16>(m, c, row, rows, p * PANEL);
        }
    }
}

}  // namespace bg

extern "C" void bg_matmul(const bg::Matmul* m, int64_t threads) {
#pragma omp parallel num_threads(threads)
    bg::matmul_part(*m, omp_get_thread_num(), omp_get_num_threads());
}
