// What products of every kind do alike: hand out panels and rows, cut rows into tiles, write sums.
#pragma once

#include <algorithm>
#include <type_traits>

#include "matmul.h"

namespace bg {

constexpr int64_t ROW_BLOCK = 64;  // rows of x that share one widening of a panel

constexpr int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Calls kernel(constant n, args...) for the n <= MOST that `count` is.
template <int MOST, class Kernel, class... Args>
inline __attribute__((always_inline)) void with_constant(int64_t count, Kernel& kernel, Args... args) {
    if (count == MOST) kernel(std::integral_constant<int, MOST>{}, args...);
    else if constexpr (MOST > 1) with_constant<MOST - 1>(count, kernel, args...);
}

// Calls kernel(constant n, first) for runs of n <= MOST, as even as can be: a last tile of one row would wait for its
// own sums.
template <int MOST, class Kernel>
inline __attribute__((always_inline)) void by_runs(int64_t count, Kernel kernel) {
    const int64_t runs = up(count, MOST) / MOST;
    for (int64_t i = 0, at = 0; i < runs; i++) {
        const int64_t end = count * (i + 1) / runs;
        with_constant<MOST>(end - at, kernel, at);
        at = end;
    }
}

// Panels that a thread has claimed, and where it works.
struct Share {
    int64_t panel, panel_end;
    bool fresh;  // the thread's first panels of these rows
    float* c;    // [ROW_BLOCK, PANEL]
    float* work;
    KvFetch::Layer* fetch;  // or null
};

// Calls kernel(share, first row, rows) for the panels of one block of rows after the other, as far as this thread
// claims them. Returns how many units there are for all threads.
template <class Kernel>
int64_t by_claims(const Matmul& m, Claims& claims, int thread, int threads, KvFetch::Layer* fetch, int64_t scratch, Kernel kernel) {
    const int64_t panels = up(m.outer, PANEL) / PANEL;
    if (panels == 0 || m.rows == 0) return 0;
    // Of fewer panels than threads the rows make more blocks.
    const int64_t tiles = up(m.rows, TILE_ROWS) / TILE_ROWS, wanted = up(threads, panels) / panels;
    const int64_t blocks = std::max(up(m.rows, ROW_BLOCK) / ROW_BLOCK, std::min(wanted, tiles));
    float* c = reinterpret_cast<float*>(static_cast<char*>(m.scratch) + thread * scratch);
    int64_t held = -1;
    while (const Claim claim = claims.next(blocks * panels, threads)) {
        for (int64_t at = claim.begin; at < claim.end;) {
            const int64_t block = at / panels, end = std::min(claim.end, (block + 1) * panels);
            const int64_t row = m.rows * block / blocks, rows = m.rows * (block + 1) / blocks - row;
            const int64_t panel = at - block * panels;
            kernel(Share{panel, panel + end - at, block != held, c, c + ROW_BLOCK * PANEL, fetch}, row, rows);
            held = block, at = end;
        }
        claims.done(claim.units());
    }
    return blocks * panels;
}

// Sums c [rows, PANEL] with the bias into columns [column, column + PANEL) of y, as far as there are so many.
template <class T>
void write(const Matmul& m, const float* c, int64_t row, int64_t rows, int64_t column) {
    const int64_t width = std::min<int64_t>(PANEL, m.outer - column);
    const float* bias = m.bias ? m.bias + column : nullptr;
    for (int64_t r = 0; r < rows; r++, c += PANEL) {
        T* out = static_cast<T*>(m.out) + (row + r) * m.out_stride + column;
        int64_t i = 0;
        const auto at = [&](int64_t i) { return bias ? load(c + i) + load(bias + i) : load(c + i); };
        for (; i + 2 * LANES <= width; i += 2 * LANES) store(out + i, at(i), at(i + LANES));
        for (; i + LANES <= width; i += LANES) store(out + i, at(i));
        for (; i < width; i++) put(out + i, bias ? c[i] + bias[i] : c[i]);
    }
}

}  // namespace bg
