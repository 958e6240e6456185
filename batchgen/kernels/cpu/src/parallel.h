// One OpenMP region runs all parts of an operation, or of many with barriers between them.
#pragma once

#include <omp.h>

#include <cstdint>

namespace bg {

// The share [begin, end) of `count` that thread `thread` of `threads` takes.
struct Span {
    int64_t begin, end;
    Span(int64_t count, int thread, int threads)
        : begin(count * thread / threads), end(count * (thread + 1) / threads) {}
};

}  // namespace bg
