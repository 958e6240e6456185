// Attention over a paged pool by a flat work list. See attention_list.py for how the list is made.
//
// An item is a run of queries (consecutive entries of `tokens`) against positions [start, start + length) of a page
// table, causal where a query's position lies inside. Items that are alone with their queries write `out`; the others
// write partials with their log-sum-exp, which a second pass merges in float32, in a fixed order.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace bg {

struct Attention;  // its fields are attention.cpp's and attention.py's own

// Two phases with a barrier between them: the items, then the merges. `work` holds the shared counters of dynamic
// scheduling, zero before the first phase.
void attention_items_part(const Attention& a, int64_t layer, int thread, int threads);
void attention_merge_part(const Attention& a, int64_t layer, int thread, int threads);

}  // namespace bg
