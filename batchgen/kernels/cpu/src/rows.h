// Common to all products: division of panels and rows among threads, tiles of rows, output.
#pragma once

#include <algorithm>
#include <type_traits>

#include "matmul.h"

namespace bg {

constexpr int64_t ROW_BLOCK = 64;   // rows of x that share one widening of a panel
constexpr int64_t LEAST_ROWS = 32;  // least rows of a share for which reading weights is not slower than computing
constexpr int MOST_BY_ROWS = 4;     // most shares for which rows are divided instead of panels

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Calls kernel(constant n, args...) with n == count, for 1 <= count <= MOST.
template <int MOST, class Kernel, class... Args>
inline __attribute__((always_inline)) void with_constant(int64_t count, Kernel& kernel, Args... args) {
    if (count == MOST) kernel(std::integral_constant<int, MOST>{}, args...);
    else if constexpr (MOST > 1) with_constant<MOST - 1>(count, kernel, args...);
}

// Calls kernel(constant n, first) for runs of n <= MOST of even length: a last tile of one row would be bound by the
// latency of its sums.
template <int MOST, class Kernel>
inline __attribute__((always_inline)) void by_runs(int64_t count, Kernel kernel) {
    const int64_t runs = round_up(count, MOST) / MOST;
    for (int64_t i = 0, at = 0; i < runs; i++) {
        const int64_t end = count * (i + 1) / runs;
        with_constant<MOST>(end - at, kernel, at);
        at = end;
    }
}

// Panels that a thread has claimed, and its workspace.
struct Panels {
    int64_t panel, panel_end;
    bool fresh;  // these are the thread's first panels for these rows
    float* c;    // [ROW_BLOCK, PANEL]
    float* work;
    KvFetch::Layer* fetch;  // or null
    Block after;            // the weights that it multiplies after these panels, if known

    // The weights that follow the `bytes` at `block`; `last`: the block is the last one of panel p.
    Block next_weights(const void* block, int64_t bytes, int64_t p, bool last) const {
        return last && p + 1 == panel_end ? after : Block{static_cast<const char*>(block) + bytes, bytes};
    }
};

// Division of a product's units, one for each panel and block of rows, into shares. With few shares of many rows, a
// share is some of the rows: its thread has them in its cache from the previous operation, and reads all weights.
// Otherwise a share is some of the panels, for all rows.
struct Shares {
    const int64_t panels, rows;
    int64_t blocks;  // number of blocks of rows
    const int count;
    const bool by_rows;

    Shares(const Matmul& m, int64_t rows, const WorkStealingQueue& queue)
        : panels(round_up(m.outer, PANEL) / PANEL), rows(rows), count(queue.shares),
          by_rows(count <= MOST_BY_ROWS && rows >= LEAST_ROWS * count) {
        // With fewer panels than threads, rows are divided into more blocks.
        const int64_t tiles = round_up(rows, TILE_ROWS) / TILE_ROWS,
                      wanted = panels ? round_up(queue.threads, panels) / panels : 1;
        blocks = by_rows ? round_up(rows, ROW_BLOCK * count) / ROW_BLOCK
                         : std::max(round_up(rows, ROW_BLOCK) / ROW_BLOCK, std::min(wanted, tiles));
    }

    // Share s is the units [begin(s), begin(s + 1)): the panels [first_panel(s), first_panel(s) + width(s)) of block
    // first_block(s), then those of the next block, and so on.
    int64_t first_panel(int share) const { return by_rows ? 0 : panels * share / count; }
    int64_t width(int share) const { return by_rows ? panels : first_panel(share + 1) - first_panel(share); }
    int64_t first_block(int share) const { return by_rows ? blocks / count * share : 0; }
    int64_t begin(int share) const { return by_rows ? first_block(share) * panels : first_panel(share) * blocks; }
    int64_t first_row(int64_t block) const { return rows * block / blocks; }
};

// Calls kernel(panels, first row, rows) for the units that this thread claims, one block of rows after the other.
// Returns the number of units of all threads.
template <class Kernel>
int64_t for_each_claim(const Matmul& m, const Worker& w, int64_t panel_bytes, int64_t scratch, Kernel kernel) {
    const Shares shares(m, m.rows, w.queue);
    if (shares.panels == 0 || m.rows == 0) return 0;
    float* c = reinterpret_cast<float*>(static_cast<char*>(m.scratch) + w.thread * scratch);
    const char* const weights = static_cast<const char*>(m.weight);
    int64_t held = -1;
    while (const Claim claim = w.queue.pop(w.thread, [&](int share) { return shares.begin(share); })) {
        const int64_t share_begin = shares.begin(claim.share), share_end = shares.begin(claim.share + 1);
        const int64_t first = shares.first_panel(claim.share), width = shares.width(claim.share);
        for (int64_t at = claim.begin; at < claim.end;) {
            const int64_t turn = (at - share_begin) / width,
                          end = std::min(claim.end, share_begin + (turn + 1) * width);
            const int64_t block = shares.first_block(claim.share) + turn;
            const int64_t row = shares.first_row(block), rows = shares.first_row(block + 1) - row;
            const int64_t panel = first + (at - share_begin) % width;
            Block after{weights + (first + (end - share_begin) % width) * panel_bytes, panel_bytes};
            if (end == share_end) after = w.next ? first_weights(*w.next, m.rows, w) : Block{};
            kernel(Panels{panel, panel + end - at, block != held, c, c + ROW_BLOCK * PANEL, w.fetch, after}, row, rows);
            held = block, at = end;
        }
        w.queue.done(claim);
    }
    return shares.begin(shares.count);
}

// Writes sums c [rows, PANEL] plus the bias to columns [column, column + PANEL) of y, without those beyond N.
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
