// Emulates AVX-VNNI's dot product of 16-bit integers with AVX2. For tests only: comes before the compiler's header on the
// search path.
#pragma once

#include_next <immintrin.h>
#define __AVXVNNI__ 1
#define _mm256_dpwssd_avx_epi32(sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
