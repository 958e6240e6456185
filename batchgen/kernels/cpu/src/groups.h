// Groups of a product's inputs that share a quantisation scale.
#pragma once

#include <cmath>

#include "simd.h"

namespace bg {

// `inner` inputs in groups of at most `most`, of even size, rounded up to a multiple of `multiple`.
struct Grouping {
    int64_t count, size;
    Grouping(int64_t inner, int64_t most, int64_t multiple) : count((inner + most - 1) / most), size(0) {
        if (count) size = ((inner + count - 1) / count + multiple - 1) / multiple * multiple;
    }
};

// The largest magnitude; NaN if any is infinite or NaN. Magnitudes are compared by their bits as integers, which have
// the same order and put infinity and NaN last.
inline float magnitude_of(vi bits) { return any(bits >= 0x7f800000) ? __builtin_nanf("") : largest((vf)bits); }

inline float magnitude(const float* x, int64_t count) {
    vi most{};
    int64_t k = 0;
    const auto take = [&](vf v) {
        const vi bits = (vi)v & 0x7fffffff;
        most = bits > most ? bits : most;
    };
    for (; k + LANES <= count; k += LANES) take(load(x + k));
    if (k < count) take(k ? load(x + count - LANES) : load_some(x, count));
    return magnitude_of(most);
}

// bfloat16 as 16-bit integers: twice as many per register, not widened.
typedef int16_t vs __attribute__((vector_size(4 * LANES)));

inline float magnitude(const bf16* x, int64_t count) {
    vs most{};
    int64_t k = 0;
    const auto take = [&](vs v) {
        const vs bits = v & 0x7fff;
        most = bits > most ? bits : most;
    };
    for (; k + 2 * LANES <= count; k += 2 * LANES) take(load_as<vs>(x + k));
    if (k && k < count) {
        take(load_as<vs>(x + count - 2 * LANES));
    } else if (k < count) {
        bf16 rest[2 * LANES] = {};
        std::memcpy(rest, x, count * sizeof(bf16));
        take(load_as<vs>(rest));
    }
    const vi odd = (vi)most & 0x7fff0000, even = (vi)((vu)most << 16);
    return magnitude_of(odd > even ? odd : even);
}

}  // namespace bg
