#include "bfp.h"

#include "parallel.h"
#include "rows.h"
#include "tiles.h"

namespace bg {

int64_t bfp_scratch(int64_t inner) {
    const BfpGroups groups(inner);
    return ROW_BLOCK * (4 * PANEL + up(2 * groups.count * groups.size, 64) + 4 * up(groups.count, 16));
}

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace {

constexpr int BFP_ROWS = 5;  // of a tile: a sixth leaves no register for a product on its way to a sum

// One group's part of a tile: x [ROWS] of integers, `stride` apart, with scales `scale_stride` apart.
template <int ROWS, Ahead AHEAD>
void tile_bfp(const int16_t* x, int64_t stride, const float* x_scale, int64_t scale_stride, const char* block,
              int64_t size, float* c, bool first) {
    const float* scale = reinterpret_cast<const float*>(block);
    const int16_t* w = reinterpret_cast<const int16_t*>(scale + PANEL);
    vi sum[ROWS][COLUMNS] = {};
    for (int64_t k = 0; k < size; k += 2, w += 2 * PANEL) {
        if (AHEAD == STREAM) stream<4 * PANEL>(w);
        vi b[COLUMNS];
#pragma GCC unroll 8
        for (int v = 0; v < COLUMNS; v++) b[v] = load_as<vi>(w + 2 * LANES * v);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * stride + k, 4);
            const vi a = pair - vi{};
#pragma GCC unroll 8
            for (int v = 0; v < COLUMNS; v++) {
                // By their names, side by side and through one register: GCC makes all products first, and moves sums
                // through memory for them.
                __asm__("vpmaddwd %2, %1, %%ymm15\n\tvpaddd %%ymm15, %0, %0" : "+x"(sum[r][v]) : "x"(a), "x"(b[v]) : "xmm15");
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        const vf s = splat(x_scale[r * scale_stride]);
#pragma GCC unroll 8
        for (int v = 0; v < COLUMNS; v++) {
            const int at = r * PANEL + v * LANES;
            const vf part = __builtin_convertvector(sum[r][v], vf) * load(scale + v * LANES);
            store(c + at, fused(part, s, load(first ? NO_SUMS + v * LANES : c + at)));
        }
    }
}

// One group of a row: its scale, and its integers. A group with a number that is none has a scale
// that is none.
template <class T>
float quantise(const T* x, int64_t count, int64_t size, int16_t* out) {
    const float top = magnitude(x, count), inverse = BFP_MOST / top;
    if (!std::isfinite(inverse)) {  // zeros, denormal numbers, or none
        std::fill(out, out + size, int16_t(0));
        return top == top ? 0.0f : top;
    }
    const auto whole = [&](int64_t k) { return _mm256_cvtps_epi32((__m256)(load(x + k) * inverse)); };
    int64_t k = 0;
    for (; k + 2 * LANES <= count; k += 2 * LANES) {
        const __m256i packed = _mm256_packs_epi32(whole(k), whole(k + LANES));  // by halves: 0 to 3, 8 to 11, ...
        store_as(out + k, _mm256_permute4x64_epi64(packed, 0xd8));
    }
    for (; k < count; k++) out[k] = int16_t(std::lrintf(widen(x[k]) * inverse));
    for (; k < size; k++) out[k] = 0;
    return top / BFP_MOST;
}

template <class T>
void rows_of(const Matmul& m, const Share& s, const BfpGroups& groups, int64_t row, int64_t rows) {
    const int64_t stride = up(groups.count * groups.size, 32), scales = up(groups.count, 16);
    float* scale = reinterpret_cast<float*>(s.work);
    int16_t* numbers = reinterpret_cast<int16_t*>(scale + ROW_BLOCK * scales);
    for (int64_t r = 0; r < rows && s.fresh; r++)
        for (int64_t g = 0; g < groups.count; g++) {
            const int64_t k = g * groups.size, count = std::clamp<int64_t>(m.inner - k, 0, groups.size);
            const T* x = static_cast<const T*>(m.x) + (row + r) * m.x_stride + k;
            scale[r * scales + g] = quantise(x, count, groups.size, numbers + r * stride + k);
        }
    for (int64_t p = s.panel; p < s.panel_end; p++) {
        const char* block = static_cast<const char*>(m.weight) + p * groups.count * groups.bytes();
        if (!groups.count) std::fill(s.c, s.c + rows * PANEL, 0.0f);
        for (int64_t g = 0; g < groups.count; g++, block += groups.bytes())
            by_runs<BFP_ROWS>(rows, [&](auto n, int64_t r) {
                const int16_t* x = numbers + r * stride + g * groups.size;
                const auto tile = r == 0 ? tile_bfp<n(), STREAM> : tile_bfp<n(), NOTHING>;
                tile(x, stride, scale + r * scales + g, scales, block, groups.size, s.c + r * PANEL, g == 0);
            });
        write<bf16>(m, s.c, row, rows, p * PANEL);
    }
}

struct BfpPacking {
    const bf16* weight;  // [N, K], rows `stride` elements apart
    char* packed;
    int64_t inner, outer, stride;
};

void pack(const BfpPacking& p) {
    const BfpGroups groups(p.inner);
    const int64_t panels = up(p.outer, PANEL) / PANEL;
#pragma omp for
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t g = 0; g < groups.count; g++) {
            char* block = p.packed + (panel * groups.count + g) * groups.bytes();
            float* scale = reinterpret_cast<float*>(block);
            int16_t* w = reinterpret_cast<int16_t*>(scale + PANEL);
            const int64_t k = g * groups.size, count = std::clamp<int64_t>(p.inner - k, 0, groups.size);
            for (int64_t n = 0; n < PANEL; n++) {
                const int64_t row = std::min(panel * PANEL + n, p.outer - 1);
                const int64_t filled = row == panel * PANEL + n ? count : 0;
                int16_t numbers[BFP_GROUP];
                scale[n] = quantise(p.weight + row * p.stride + k, filled, groups.size, numbers);
                for (int64_t i = 0; i < groups.size; i++) w[(i / 2 * PANEL + n) * 2 + i % 2] = numbers[i];
            }
        }
}

}  // namespace

int64_t bfp_part(const Matmul& m, Claims& claims, int thread, int threads) {
    const BfpGroups groups(m.inner);
    return by_claims(m, claims, thread, threads, bfp_scratch(m.inner), [&](const Share& s, int64_t row, int64_t rows) {
        if (m.x_wide) rows_of<float>(m, s, groups, row, rows);
        else rows_of<bf16>(m, s, groups, row, rows);
    });
}

extern "C" int64_t bg_matmul_has_bfp() { return 1; }

extern "C" void bg_matmul_pack_bfp(const BfpPacking* p, int64_t threads) {
#pragma omp parallel num_threads(threads)
    pack(*p);
}

#else

int64_t bfp_part(const Matmul&, Claims&, int, int) { return 0; }

extern "C" int64_t bg_matmul_has_bfp() { return 0; }

#endif

}  // namespace bg
