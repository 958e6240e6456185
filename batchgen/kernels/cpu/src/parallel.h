// Division of an operation into parts. One OpenMP region runs the parts of one operation or of several in sequence.
#pragma once

#include <omp.h>

#include <cstdint>

namespace bg {

// Range [begin, end) of `count` items that part `part` of `parts` covers. A part belongs to a thread or is a unit of
// work.
struct Span {
    int64_t begin, end;
    Span(int64_t count, int part, int parts) : begin(count * part / parts), end(count * (part + 1) / parts) {}
};

}  // namespace bg
