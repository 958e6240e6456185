// Inputs of a product by groups that share a scale.
#pragma once

#include <cmath>

#include "simd.h"

namespace bg {

// `inner` inputs in groups of at most `most`, as even as multiples of `multiple` can be.
struct Grouping {
    int64_t count, size;
    Grouping(int64_t inner, int64_t most, int64_t multiple) : count((inner + most - 1) / most), size(0) {
        if (count) size = ((inner + count - 1) / count + multiple - 1) / multiple * multiple;
    }
};

// The largest magnitude; no number where one is infinite or none.
template <class T>
float magnitude(const T* x, int64_t count) {
    // As integers: the order of magnitudes is that of their bits, and what is not finite comes last.
    vi most{};
    int64_t k = 0;
    const auto take = [&](vf v) {
        const vi bits = (vi)v & 0x7fffffff;
        most = bits > most ? bits : most;
    };
    for (; k + LANES <= count; k += LANES) take(load(x + k));
    if (k < count) take(load_some(x + k, count - k));
    return any(most >= 0x7f800000) ? __builtin_nanf("") : largest((vf)most);
}

}  // namespace bg
