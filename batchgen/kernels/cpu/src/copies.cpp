#include "copies.h"

#include <cstring>

#include "parallel.h"

namespace bg {

// One thread makes the copies of a cache, in order: a source may be the target of a later copy.
void page_copies_part(const PageCopies& p, int part, int parts) {
    const Span span(p.num_caches, part, parts);
    for (int64_t c = span.begin; c < span.end; c++)
        for (const int64_t* copy = p.copies; copy < p.copies + 3 * p.num_copies; copy += 3) {
            const int64_t page = p.page_size * p.bytes[c];
            std::memcpy(p.caches[c] + copy[1] * page, p.caches[c] + copy[0] * page, copy[2] * p.bytes[c]);
        }
}

}  // namespace bg

extern "C" {

void bg_page_copies(const bg::PageCopies* p, int threads) {
#pragma omp parallel num_threads(threads)
    bg::page_copies_part(*p, omp_get_thread_num(), omp_get_num_threads());
}
}
