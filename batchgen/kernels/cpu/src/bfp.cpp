#include "bfp.h"

#include "bfp_kind.h"
#include "parallel.h"

namespace bg {

int64_t bfp_scratch(int64_t inner) { return grouped_scratch<Bfp>(BfpGroups(inner)); }

#if defined(BFP)

namespace {

struct BfpPacking {
    const bf16* weight;  // [N, K], rows `stride` elements apart
    char* packed;
    int64_t inner, outer, stride;
};

void pack(const BfpPacking& p) {
    const BfpGroups groups(p.inner);
    const int64_t panels = round_up(p.outer, PANEL) / PANEL;
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

int64_t bfp_part(const Matmul& m, const Worker& worker) {
    const BfpGroups groups(m.inner);
    const auto rows_of = [&](const Panels& s, int64_t row, int64_t rows) {
        if (m.x_wide) grouped_rows<Bfp, float, bf16>(m, s, groups, row, rows);
        else grouped_rows<Bfp, bf16, bf16>(m, s, groups, row, rows);
    };
    return for_each_claim(m, worker, groups.panel_bytes(), bfp_scratch(m.inner), rows_of);
}

extern "C" int64_t bg_matmul_has_bfp() { return 1; }

extern "C" void bg_matmul_pack_bfp(const BfpPacking* p, int64_t threads) {
#pragma omp parallel num_threads(threads)
    pack(*p);
}

#else

int64_t bfp_part(const Matmul&, const Worker&) { return 0; }

extern "C" int64_t bg_matmul_has_bfp() { return 0; }

#endif

}  // namespace bg
