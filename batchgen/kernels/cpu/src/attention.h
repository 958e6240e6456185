// Attention over a paged pool by a flat work list, which attention_list.py makes.
//
// An item is a run of `tokens` that attend to the stored positions [first, end) of one page table: softmax(scale Q K^T)
// V, causal, within the window. Tokens that are in one item alone are written to `out`; the others leave parts (float32
// values and their log-sum-exp), which a second phase merges in the order of `parts`.
//
// Keys and values are read where they stand, once for all query heads that share them. What stands in slots that no
// item names is never read.
//
// A list with a `block` is batch-invariant: a token's bits do not depend on the items that it shares with others. All
// items take the same path, as tiles. Blocks begin at multiples of so many positions; each gives sums of its own, which
// join those of the blocks before it in one order, in the item or in the merge. So an item of several blocks has to be
// the first of all its tokens, and parts are sums as they stand, with their maximum and total.
#pragma once

#include <vector>

#include "claims.h"
#include "parallel.h"
#include "simd.h"

namespace bg {

enum ItemField { ROWS_AT, COUNT, PAGE_AT, BASE, FIRST, END, PART_AT, HEAD, ITEM_FIELDS };

// HEAD: the key head that is meant; -1: all of them, one after the other.

// One step's work for the layers that share it: same sizes, same window.
struct AttentionList {
    const int32_t* items;      // [num_items, ITEM_FIELDS] by threads' shares, each costliest first
    const int32_t* shares;     // [num_shares + 1] where each share begins
    const int32_t* tokens;     // an item's are tokens[ROWS_AT : ROWS_AT + COUNT]
    const int32_t* positions;  // [T] absolute position of each token
    const int32_t* pages;      // page tables; an item's begins at PAGE_AT, its first slot is position BASE
    const int32_t* versions;   // beside `pages`: what is stamped on that page's units that are kept; negative: the same,
                               // but none is added; 0: none is kept. Or null
    const int32_t* parts;      // part numbers, those of a merge adjacent
    const int32_t* merges;     // [num_merges, 3]: token, where its parts begin in `parts`, how many
    float* part_out;           // [E, N, Dv]
    float* part_lse;           // [E, N] natural logarithm; batch-invariant: [E, N, 2] the maximum and the total
    int64_t num_items, num_shares, num_merges;
    int64_t heads, kv_heads, key_dim, value_dim, page_size;
    int64_t window;            // a token sees itself and the window - 1 before it; 0: all
    int64_t dtype;             // of pool, queries and results
    int64_t block;             // of a batch-invariant list; else 0
    int64_t dots;              // whether tiles in bfloat16 are multiplied by its dot instruction, where there is one
};

// One layer's keys and values of some pages, kept in the order in which they are multiplied (attention_dot.h).
struct Packed {
    int32_t* words;   // [K, pages, S / LANES, words of a unit]
    int32_t* stamps;  // [K, pages, S / LANES] the version of its page that a unit was made of
    int64_t pages;
};

// A step: lists and pointers of L layers; queries and results of the layer at hand. Arrays are the caller's.
struct Attention {
    const AttentionList* const* lists;  // [L]
    const void* const* keys;            // [L] -> [P, S, K, D]
    const void* const* values;          // [L] -> [P, S, K, Dv]
    const float* const* sinks;          // [L] -> [N] or null
    const Packed* packed;               // [L] or null
    const void* query;                  // [T, N, D], a token's heads adjacent, tokens `query_stride` elements apart
    void* out;                          // [T, N, Dv] likewise
    int64_t query_stride, out_stride;
    float scale;
    float softcap;                      // 0: none
};

// Two phases, the second after all items of the first. The items are units of `claims`; what is computed does not depend
// on who does them.
void attention_items_part(const Attention& a, int64_t layer, const Claims& claims, int thread);
void attention_merge_part(const Attention& a, int64_t layer, int part, int parts);

// Pages that a share's items of few query rows read, in the order of the items; at most so many.
std::vector<int32_t> attention_pages(const AttentionList& l, int64_t share, int64_t most);

}  // namespace bg
