// What products of every kind do alike: share out panels and rows, cut rows into tiles, write sums.
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

// One thread's panels, and where it works.
struct Share {
    int64_t panel, panel_end;
    float* c;  // [ROW_BLOCK, PANEL]
    float* work;
};

// Calls kernel(share, first row, rows) for the blocks of rows that are this thread's.
template <class Kernel>
void by_share(const Matmul& m, int thread, int threads, int64_t scratch, Kernel kernel) {
    const int64_t panels = up(m.outer, PANEL) / PANEL;
    if (panels == 0 || m.rows == 0) return;
    // Threads beyond the panels share the rows.
    const int64_t tiles = up(m.rows, TILE_ROWS) / TILE_ROWS;
    const int64_t groups = std::clamp<int64_t>(threads / panels, 1, tiles), across = threads / groups;
    if (thread >= groups * across) return;
    const int64_t group = thread / across, column = thread % across;
    float* c = reinterpret_cast<float*>(static_cast<char*>(m.scratch) + thread * scratch);
    const Share share{panels * column / across, panels * (column + 1) / across, c, c + ROW_BLOCK * PANEL};
    const int64_t begin = m.rows * group / groups, rows = m.rows * (group + 1) / groups - begin;
    const int64_t blocks = up(rows, ROW_BLOCK) / ROW_BLOCK;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t from = rows * i / blocks, to = rows * (i + 1) / blocks;
        kernel(share, begin + from, to - from);
    }
}

// Sums c [rows, PANEL] with the bias into columns [column, column + PANEL) of y, as far as there are so many.
template <class T>
void write(const Matmul& m, const float* c, int64_t row, int64_t rows, int64_t column) {
    const int64_t width = std::min<int64_t>(PANEL, m.outer - column);
    const float* bias = m.bias ? m.bias + column : nullptr;
    for (int64_t r = 0; r < rows; r++, c += PANEL) {
        T* out = static_cast<T*>(m.out) + (row + r) * m.out_stride + column;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(out + i, bias ? load(c + i) + load(bias + i) : load(c + i));
        for (; i < width; i++) put(out + i, bias ? c[i] + bias[i] : c[i]);
    }
}

}  // namespace bg
