#include "lora.h"

#include <algorithm>
#include <type_traits>

#include "parallel.h"
#include "rows.h"
#include "tiles.h"

namespace bg {
namespace {

// Tile sizes whose sums fit into the registers.
constexpr int DOWN_ROWS = REGISTERS == 32 ? 3 : 2, DOWN_RANKS = REGISTERS / 4, UP_ROWS = REGISTERS == 32 ? 6 : 2;
constexpr int UP_REGISTERS = 4, CHUNK = UP_REGISTERS * LANES;  // outputs at a time
static_assert(LORA_BLOCK % CHUNK == 0 && CHUNK % LANES == 0);

// Up to a tile's number of tokens of one adapter.
struct Tile {
    int64_t adapter, first, tokens;
};

// Calls unit(tile, block) for this thread's share of the blocks of all tiles, `blocks(adapter)` each. The cost of a
// block is its number of tokens, plus one for the tile.
template <class Blocks, class Unit>
void for_each_unit(const LoraStep& s, int thread, int threads, Blocks blocks, Unit unit) {
    int64_t work = 0, at = 0;
    for (int64_t i = 0; i < s.num_tiles; i++) work += (s.tiles[i][2] + 1) * blocks(s.tiles[i][0]);
    for (int64_t i = 0; i < s.num_tiles; i++) {
        const Tile tile{s.tiles[i][0], s.tiles[i][1], s.tiles[i][2]};
        const int64_t count = blocks(tile.adapter);
        for (int64_t b = 0; b < count; b++, at += tile.tokens + 1)
            if (at * threads / work == thread) unit(tile, b);
    }
}

// sums [ROWS, RANKS] = x [ROWS, inner] a [RANKS, inner]^T.
template <int ROWS, int RANKS, class T>
void dots(const T* const (&x)[ROWS], const T* a, int64_t inner, float* sums, int64_t width) {
    vf acc[ROWS][RANKS] = {};
    const auto add = [&](int64_t k, auto load) __attribute__((always_inline)) {
        vf wide[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) wide[r] = load(x[r] + k);
#pragma GCC unroll 8
        for (int j = 0; j < RANKS; j++) {
            const vf w = load(a + j * inner + k);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) acc[r][j] = fused(wide[r], w, acc[r][j]);
        }
    };
    int64_t k = 0;
    for (; k + LANES <= inner; k += LANES) add(k, [](const T* p) { return bg::load(p); });
    if (k < inner) add(k, [rest = inner - k](const T* p) { return load_some(p, rest); });
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int j = 0; j < RANKS; j++) sums[r * width + j] = sum(acc[r][j]);
}

template <class T>
void down(const LoraStack& l, const LoraStep& s, const T* x, int64_t stride, int thread, int threads) {
    const auto blocks = [&](int64_t adapter) { return round_up(l.ranges[adapter][1], DOWN_RANKS) / DOWN_RANKS; };
    for_each_unit(s, thread, threads, blocks, [&](const Tile& tile, int64_t block) {
        const int64_t rank = block * DOWN_RANKS;
        const int64_t ranks = std::min<int64_t>(DOWN_RANKS, l.ranges[tile.adapter][1] - rank);
        const T* a = static_cast<const T*>(l.down) + (l.ranges[tile.adapter][0] + rank) * l.inner;
        by_runs<DOWN_ROWS>(tile.tokens, [&](auto rows, int64_t row) {
            const int64_t place = tile.first + row;
            const T* from[rows()];
            for (int r = 0; r < rows(); r++) from[r] = x + s.order[place + r] * stride;
            float* sums = s.sums + place * s.width + rank;
            by_runs<DOWN_RANKS>(ranks, [&](auto n, int64_t) { dots<rows(), n()>(from, a, l.inner, sums, s.width); });
        });
    });
}

// out [ROWS, count] += sums [ROWS, ranks] b [ranks, count]; FULL: count is CHUNK.
template <int ROWS, bool FULL, class T>
void expand(T* const (&out)[ROWS], const T* b, int64_t outer, int64_t ranks, const float* sums, int64_t width,
            int64_t count) {
    vf acc[ROWS][UP_REGISTERS] = {};
    for (int64_t j = 0; j < ranks; j++, b += outer) {
        vf w[UP_REGISTERS];
#pragma GCC unroll 8
        for (int v = 0; v < UP_REGISTERS; v++)
            w[v] =
                FULL ? load(b + v * LANES) : load_some(b + v * LANES, std::clamp<int64_t>(count - v * LANES, 0, LANES));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const vf a = splat(sums[r * width + j]);
#pragma GCC unroll 8
            for (int v = 0; v < UP_REGISTERS; v++) acc[r][v] = fused(a, w[v], acc[r][v]);
        }
    }
    alignas(64) float change[CHUNK];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < UP_REGISTERS; v++) store(change + v * LANES, acc[r][v]);
        by_vectors(FULL ? CHUNK : count,
                   [&](int64_t i, auto load, auto store) { store(out[r] + i, load(out[r] + i) + load(change + i)); });
    }
}

template <class T>
void add_up(const LoraStack& l, const LoraStep& s, T* out, int64_t stride, int thread, int threads) {
    const int64_t all = round_up(l.outer, LORA_BLOCK) / LORA_BLOCK;
    const auto blocks = [&](int64_t adapter) { return l.ranges[adapter][1] ? all : 0; };
    for_each_unit(s, thread, threads, blocks, [&](const Tile& tile, int64_t block) {
        const int64_t from = l.spans[tile.adapter * all + block][0], to = l.spans[tile.adapter * all + block][1];
        if (from >= to) return;
        const int64_t end = std::min((block + 1) * LORA_BLOCK, l.outer);
        for (int64_t column = block * LORA_BLOCK; column < end; column += CHUNK) {
            const T* b = static_cast<const T*>(l.up) + from * l.outer + column;
            const int64_t ranks = to - from, count = end - column;
            by_runs<UP_ROWS>(tile.tokens, [&](auto rows, int64_t row) {
                const int64_t place = tile.first + row;
                T* to_row[rows()];
                for (int r = 0; r < rows(); r++) to_row[r] = out + s.order[place + r] * stride + column;
                const float* sums = s.sums + place * s.width + (from - l.ranges[tile.adapter][0]);
                const auto add = count >= CHUNK ? expand<rows(), true, T> : expand<rows(), false, T>;
                add(to_row, b, l.outer, ranks, sums, s.width, count);
            });
        }
    });
}

}  // namespace

void lora_down_part(const LoraStack& stack, const LoraStep& step, const void* x, int64_t stride, int thread,
                    int threads) {
    if (stack.dtype) down(stack, step, static_cast<const bf16*>(x), stride, thread, threads);
    else down(stack, step, static_cast<const float*>(x), stride, thread, threads);
}

void lora_up_part(const LoraStack& stack, const LoraStep& step, void* out, int64_t stride, int thread, int threads) {
    if (stack.dtype) add_up(stack, step, static_cast<bf16*>(out), stride, thread, threads);
    else add_up(stack, step, static_cast<float*>(out), stride, thread, threads);
}

}  // namespace bg

namespace {

struct LoraCall {
    const bg::LoraStack* stack;
    const bg::LoraStep* step;
    const void* x;
    void* out;
    int64_t x_stride, out_stride;
};

}  // namespace

extern "C" void bg_lora(const LoraCall* c, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), count = omp_get_num_threads();
        bg::lora_down_part(*c->stack, *c->step, c->x, c->x_stride, thread, count);
#pragma omp barrier
        bg::lora_up_part(*c->stack, *c->step, c->out, c->out_stride, thread, count);
    }
}
