// One OpenMP region runs all parts of an operation, or of many, one after the other.
#pragma once

#include <omp.h>

#include <cstdint>

namespace bg {

// The share [begin, end) of `count` that part `part` of `parts` is: a thread's, or a unit of work that threads claim.
struct Span {
    int64_t begin, end;
    Span(int64_t count, int part, int parts) : begin(count * part / parts), end(count * (part + 1) / parts) {}
};

}  // namespace bg
