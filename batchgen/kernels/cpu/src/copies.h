// Copies the first positions of pages of the KV pool to other pages, in every layer (ops.py).
#pragma once

#include <cstdint>

namespace bg {

struct PageCopies {
    char* const* caches;    // [C]: each [P, S, K, D]
    const int64_t* bytes;   // [C] bytes of a position
    const int64_t* copies;  // [n, 3]: source, target, positions
    int64_t num_caches, num_copies, page_size;
};
void page_copies_part(const PageCopies& p, int part, int parts);

}  // namespace bg
