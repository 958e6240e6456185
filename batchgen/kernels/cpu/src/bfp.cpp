#include "bfp.h"

#include "grouped.h"
#include "parallel.h"

// Where 16-bit integers may be multiplied faster than float32: AVX-512 without their dot product would gain nothing.
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define BFP 1
#endif

namespace bg {

namespace {

struct Bfp {
    using Number = int16_t;
    using Groups = BfpGroups;
    static constexpr int MOST = BFP_MOST, ZERO = 0;

#if defined(BFP)
#if defined(__AVX512VNNI__)
    static constexpr int ROWS = TILE_ROWS;

    static void add(vi& sum, vi x, vi w) { sum = (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)w); }
#elif defined(__AVXVNNI__)
    static constexpr int ROWS = TILE_ROWS;

    static void add(vi& sum, vi x, vi w) { sum = (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w); }
#else
    static constexpr int ROWS = 5;  // a sixth leaves no register for a product on its way to a sum

    static void add(vi& sum, vi x, vi w) {
        // By their names, side by side and through one register: GCC makes all products first, and moves sums through
        // memory for them.
        __asm__("vpmaddwd %2, %1, %%ymm15\n\tvpaddd %%ymm15, %0, %0" : "+x"(sum) : "x"(x), "x"(w) : "xmm15");
    }
#endif

    static vi start(const char*, int) { return vi{}; }

    static const char* weights(const char* block) { return block + 4 * PANEL; }
#endif
};

}  // namespace

int64_t bfp_scratch(int64_t inner) { return grouped_scratch<Bfp>(inner); }

#if defined(BFP)

namespace {

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
                scale[n] = quantise<Bfp>(p.weight + row * p.stride + k, filled, groups.size, numbers);
                for (int64_t i = 0; i < groups.size; i++) w[(i / 2 * PANEL + n) * 2 + i % 2] = numbers[i];
            }
        }
}

}  // namespace

int64_t bfp_part(const Matmul& m, Claims& claims, int thread, int threads) {
    const BfpGroups groups(m.inner);
    return by_claims(m, claims, thread, threads, bfp_scratch(m.inner), [&](const Share& s, int64_t row, int64_t rows) {
        if (m.x_wide) grouped_rows<Bfp, float, bf16>(m, s, groups, row, rows);
        else grouped_rows<Bfp, bf16, bf16>(m, s, groups, row, rows);
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
