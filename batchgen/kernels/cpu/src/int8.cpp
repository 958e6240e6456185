#include "int8.h"

#include "grouped.h"

namespace bg {

namespace {

struct Int8 {
    using Number = uint8_t;
    using Groups = bg::Groups;
    static constexpr int MOST = 127, ZERO = 128, HEADER_BYTES = 8;

#if defined(__AVX512VNNI__)
    static constexpr int ROWS = TILE_ROWS;

    static vi start(const char* block, int v) {
        return -load_as<vi>(reinterpret_cast<const int32_t*>(block) + PANEL + v * LANES);
    }

    static void add(vi& sum, vi x, vi w) { sum = (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w); }
#endif
};

}  // namespace

int64_t int8_scratch(int64_t inner, int64_t group) { return grouped_scratch<Int8>(Groups(inner, group)); }

#if defined(__AVX512VNNI__)

int64_t int8_part(const Matmul& m, const Worker& worker) {
    const Groups groups(m.inner, m.group);
    const auto rows_of = [&](const Panels& s, int64_t row, int64_t rows) {
        if (m.method == INT8_F32) grouped_rows<Int8, float, float>(m, s, groups, row, rows);
        else grouped_rows<Int8, bf16, bf16>(m, s, groups, row, rows);
    };
    return for_each_claim(m, worker, groups.panel_bytes(), int8_scratch(m.inner, m.group), rows_of);
}

#else

int64_t int8_part(const Matmul&, const Worker&) { return 0; }

#endif

}  // namespace bg
