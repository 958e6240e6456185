// Multiplication of the integers of block floating point, as a `Kind` of grouped.h.
#pragma once

#include "bfp.h"
#include "grouped.h"

// Processors that may multiply 16-bit integers faster than float32. AVX-512 without the dot product gains nothing.
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define BFP 1
#endif

namespace bg {

struct Bfp {
    using Number = int16_t;
    using Groups = BfpGroups;
    static constexpr int MOST = BFP_MOST, ZERO = 0, HEADER_BYTES = 4;

#if defined(BFP)
#if defined(__AVX512VNNI__)
    static constexpr int ROWS = TILE_ROWS;

    static void add(vi& sum, vi x, vi w) { sum = (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)w); }
#elif defined(__AVXVNNI__)
    static constexpr int ROWS = TILE_ROWS;

    static void add(vi& sum, vi x, vi w) { sum = (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w); }
#else
    static constexpr int ROWS = 5;  // a sixth row leaves no register for intermediate products

    static void add(vi& sum, vi x, vi w) {
        // Inline assembly with one named register, because GCC computes all products first and spills sums for them.
        __asm__("vpmaddwd %2, %1, %%ymm15\n\tvpaddd %%ymm15, %0, %0" : "+x"(sum) : "x"(x), "x"(w) : "xmm15");
    }
#endif

    static vi start(const char*, int) { return vi{}; }
#endif
};

}  // namespace bg
