#include "matmul.h"

#include <algorithm>
#include <type_traits>

#include "bfp.h"
#include "int8.h"
#include "parallel.h"
#include "rows.h"
#include "tiles.h"

namespace bg {
namespace {

constexpr int64_t INNER_BLOCK = 192;  // even; a block of a widened panel fits the L1 cache
// Even. The dot instruction reads weights less often: a block and the next one fit the L2 cache. Most products have one
// block, so that their sums go from registers directly to results.
constexpr int64_t DOT_BLOCK = 2048;

// A thread's part of a product: its panels, with the workspace of these methods.
struct Part : Panels {
    const Matmul& m;
    float* wide_panel;  // [INNER_BLOCK, PANEL]
    void* wide_x;       // [ROW_BLOCK, K rounded up to 2]
    Part(const Matmul& of, const Panels& panels)
        : Panels(panels), m(of), wide_panel(panels.work), wide_x(panels.work + INNER_BLOCK * PANEL) {}
};

void float32_rows(const Part& s, int64_t row, int64_t rows) {
    const Matmul& m = s.m;
    const float* x = static_cast<const float*>(m.x) + row * m.x_stride;
    for (int64_t p = s.panel; p < s.panel_end; p++) {
        const float* b = static_cast<const float*>(m.weight) + p * m.inner * PANEL;
        for (int64_t k = 0; k < m.inner; k += INNER_BLOCK, b += INNER_BLOCK * PANEL) {
            const int64_t count = std::min(INNER_BLOCK, m.inner - k);
            NextBlock next(s.next_weights(b, 4 * PANEL * count, p, k + count == m.inner), rows, s.fetch);
            by_runs<TILE_ROWS>(rows, [&](auto n, int64_t r) {
                next.for_tile(count / 2, [&](auto ahead, Lines from) {
                    tile<n(), ahead()>(x + r * m.x_stride + k, m.x_stride, b, count, s.c + r * PANEL, k == 0, from);
                });
            });
        }
        write<float>(m, s.c, row, rows, p * PANEL);
    }
}

void widen_rows(const Matmul& m, int64_t row, int64_t rows, float* out) {
    const int64_t stride = round_up(m.inner, 2);
    for (int64_t r = 0; r < rows; r++, out += stride) {
        const bf16* x = static_cast<const bf16*>(m.x) + (row + r) * m.x_stride;
        int64_t i = 0;
        for (; i + LANES <= m.inner; i += LANES) store(out + i, load(x + i));
        for (; i < m.inner; i++) out[i] = widen(x[i]);
        if (i < stride) out[i] = 0.0f;
    }
}

void widened_rows(const Part& s, int64_t row, int64_t rows) {
    const Matmul& m = s.m;
    const int64_t even = round_up(m.inner, 2), stride = m.x_wide ? m.x_stride : even;
    if (!m.x_wide && s.fresh) widen_rows(m, row, rows, static_cast<float*>(s.wide_x));
    const float* x = m.x_wide ? static_cast<const float*>(m.x) + row * stride : static_cast<float*>(s.wide_x);
    for (int64_t p = s.panel; p < s.panel_end; p++) {
        const bf16* b = static_cast<const bf16*>(m.weight) + p * even * PANEL;
        for (int64_t k = 0; k < even; k += INNER_BLOCK, b += INNER_BLOCK * PANEL) {
            const int64_t count = std::min(INNER_BLOCK, even - k);
            NextBlock next(s.next_weights(b, 2 * PANEL * count, p, k + count == even), rows, s.fetch);
            by_runs<TILE_ROWS>(rows, [&](auto n, int64_t r) {
                const float* a = x + r * stride + k;
                float* c = s.c + r * PANEL;
                if (n() == rows) {
                    tile_pairs<n(), false, STREAM>(a, stride, b, count / 2, c, k == 0, nullptr);
                } else if (r > 0) {
                    next.for_tile(count / 2, [&](auto ahead, Lines from) {
                        tile<n(), ahead() == STREAM ? NO_PREFETCH : ahead()>(
                            a, stride, s.wide_panel, count, c, k == 0, from);
                    });
                } else if (rows <= (FEW_TILES - 1) * TILE_ROWS) {
                    tile_pairs<n(), true, STREAM>(a, stride, b, count / 2, c, k == 0, s.wide_panel);
                } else {
                    tile_pairs<n(), true, NO_PREFETCH>(a, stride, b, count / 2, c, k == 0, s.wide_panel);
                }
            });
        }
        write<bf16>(m, s.c, row, rows, p * PANEL);
    }
}

#if defined(__AVX512BF16__)
void dot_rows(const Part& s, int64_t row, int64_t rows) {
    const Matmul& m = s.m;
    const int64_t even = round_up(m.inner, 2);
    const bf16* x = static_cast<const bf16*>(m.x) + row * m.x_stride;
    int64_t stride = m.x_stride;
    if (even != m.inner) {  // pad the last pair with zero, not with memory beyond the row
        bf16* padded = static_cast<bf16*>(s.wide_x);
        for (int64_t r = 0; r < rows && s.fresh; r++) {
            std::memcpy(padded + r * even, x + r * stride, 2 * m.inner);
            padded[r * even + m.inner] = bf16{0};
        }
        x = padded;
        stride = even;
    }
    for (int64_t p = s.panel; p < s.panel_end; p++) {
        const bf16* b = static_cast<const bf16*>(m.weight) + p * even * PANEL;
        const int64_t width = std::min<int64_t>(PANEL, m.outer - p * PANEL);
        const bool whole = width % LANES == 0;
        for (int64_t k = 0; k < even; k += DOT_BLOCK, b += DOT_BLOCK * PANEL) {
            const int64_t count = std::min(DOT_BLOCK, even - k);
            NextBlock next(s.next_weights(b, 2 * PANEL * count, p, k + count == even), rows, s.fetch);
            bf16* out = nullptr;
            if (whole && k + count == even) out = static_cast<bf16*>(m.out) + row * m.out_stride + p * PANEL;
            const float* bias = m.bias ? m.bias + p * PANEL : nullptr;
            const auto runs = [&](auto across) {
                by_runs<TILE_ROWS>(rows, [&](auto n, int64_t r) {
                    const auto run = [&](auto ahead, Lines from) {
                        tile_dot<n(), ahead(), across()>(
                            x + r * stride + k, stride, b, count / 2, s.c + r * PANEL, k == 0, from,
                            out ? out + r * m.out_stride : nullptr, m.out_stride, bias);
                    };
                    if constexpr (across() == COLUMNS) next.for_tile(count / 2, run);
                    else
                        run(std::integral_constant<Ahead, NO_PREFETCH>{},
                            Lines{});  // the last panel: there is no next block
                });
            };
            with_constant<COLUMNS>(round_up(width, LANES) / LANES, runs);
        }
        if (!whole) write<bf16>(m, s.c, row, rows, p * PANEL);
    }
}
#endif

// The result for K = 0.
template <class T>
void no_products(const Part& s, int64_t row, int64_t rows) {
    std::fill(s.c, s.c + ROW_BLOCK * PANEL, 0.0f);
    for (int64_t p = s.panel; p < s.panel_end; p++) write<T>(s.m, s.c, row, rows, p * PANEL);
}

void rows_of(const Part& s, int64_t row, int64_t rows) {
    const int64_t method = s.m.method;
    if (s.m.inner == 0) return method == F32 ? no_products<float>(s, row, rows) : no_products<bf16>(s, row, rows);
    if (method == F32) float32_rows(s, row, rows);
    if (method == BF16_WIDENED) widened_rows(s, row, rows);
#if defined(__AVX512BF16__)
    if (method == BF16_DOT) dot_rows(s, row, rows);
#endif
}

// Bytes of a panel of weights.
int64_t panel_bytes(const Matmul& m) {
    switch (m.method) {
        case INT8_F32:
        case INT8_BF16: return Groups(m.inner, m.group).panel_bytes();
        case BF16_BFP: return BfpGroups(m.inner).panel_bytes();
        case F32: return m.inner * PANEL * 4;
        default: return round_up(m.inner, 2) * PANEL * 2;
    }
}

}  // namespace

int64_t matmul_scratch(int64_t inner, int64_t method, int64_t group) {
    if (method == INT8_F32 || method == INT8_BF16) return int8_scratch(inner, group);
    if (method == BF16_BFP) return bfp_scratch(inner);
    return 4 * (ROW_BLOCK * PANEL + INNER_BLOCK * PANEL + ROW_BLOCK * round_up(inner, 16));
}

int64_t matmul_part(const Matmul& m, const Worker& worker) {
    if (m.method == INT8_F32 || m.method == INT8_BF16) return int8_part(m, worker);
    if (m.method == BF16_BFP) return bfp_part(m, worker);
    return for_each_claim(
        m, worker, panel_bytes(m), matmul_scratch(m.inner, m.method, m.group),
        [&](const Panels& s, int64_t row, int64_t rows) { rows_of(Part(m, s), row, rows); });
}

Block first_weights(const Matmul& m, int64_t rows, const Worker& worker) {
    const Shares shares(m, rows, worker.queue);
    const int64_t bytes = panel_bytes(m), panel = shares.first_panel(worker.thread % shares.count);
    return {static_cast<const char*>(m.weight) + panel * bytes, bytes};
}

}  // namespace bg

extern "C" void bg_matmul(const bg::Matmul* m, int64_t threads) {
    bg::WorkStealingQueues queues(1, int(threads));
#pragma omp parallel num_threads(threads)
    bg::matmul_part(*m, {queues.of(0), omp_get_thread_num(), nullptr});
}
