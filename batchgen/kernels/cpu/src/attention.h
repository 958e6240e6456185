// Attention over a paged KV pool by a flat work list, which attention_list.py makes.
//
// An item is a run of `tokens` that attend to the stored positions [first, end) of one page table: softmax(scale Q K^T)
// V, causal, within the window. Tokens that are in one item only are written to `out`; the others leave parts (float32
// values and their log-sum-exp), which a second phase merges in the order of `parts`.
//
// Keys and values are read in place, once for all query heads that share them. Slots that no item names are never read.
//
// A list with a `block` is deterministic: a token's result does not depend on which tokens share its items, bit for
// bit. All items are computed as tiles. Blocks begin at multiples of `block` positions. Each block has separate sums,
// which are merged into those of the blocks before it in a fixed order, within the item or in the merge phase. So an
// item of several blocks must be the first of all its tokens, and parts are unnormalised sums with their maximum and
// total.
#pragma once

#include <vector>

#include "work_stealing.h"
#include "parallel.h"
#include "simd.h"

namespace bg {

enum ItemField { ROWS_AT, COUNT, PAGE_AT, BASE, FIRST, END, PART_AT, HEAD, ITEM_FIELDS };

// HEAD: a key head; -1: all key heads, one after the other.

// Work list of a step, for layers with the same sizes and window.
struct AttentionList {
    const int32_t* items;      // [num_items, ITEM_FIELDS] by share, within a share by falling cost
    const int32_t* shares;     // [num_shares + 1] first item of each share
    const int32_t* tokens;     // those of an item are tokens[ROWS_AT : ROWS_AT + COUNT]
    const int32_t* positions;  // [T] absolute position of each token
    const int32_t* pages;      // page tables; that of an item begins at PAGE_AT with position BASE
    const int32_t* versions;   // version of each of `pages` for its packed units; negative: units are read, but not
                               // stored; 0: no units. Or null
    const int32_t* parts;      // part numbers; those of a merge are adjacent
    const int32_t* merges;     // [num_merges, 3]: token, index of its first part in `parts`, number of parts
    float* part_out;           // [E, N, Dv]
    float* part_lse;           // [E, N] log-sum-exp; deterministic: [E, N, 2] maximum and total
    int64_t num_items, num_shares, num_merges;
    int64_t heads, kv_heads, key_dim, value_dim, page_size;
    int64_t value_stride;      // elements from a position's values to the next one's: more than kv_heads * value_dim
                               // where values are the first numbers of the keys
    int64_t window;            // a token sees itself and window - 1 positions before; 0: all
    int64_t dtype;             // of pool, queries and results
    int64_t block;             // positions of a block of a deterministic list; else 0
    int64_t dots;              // whether to use the bfloat16 dot instruction, if the processor has it
};

// Packed units of one layer's keys and values, cached for some pages (attention_units.h, packed_pages.py).
struct Packed {
    int32_t* words;   // [K, pages, S / LANES, words of a unit]
    int32_t* stamps;  // [K, pages, S / LANES] page version that each unit was packed from
    int64_t pages;
};

// Attention of a step: lists and pointers of L layers; queries and results of the current layer. The caller owns the
// arrays.
struct Attention {
    const AttentionList* const* lists;  // [L]
    const void* const* keys;            // [L] -> [P, S, K, D]
    const void* const* values;          // [L] -> [P, S, K, Dv], positions `value_stride` apart
    const float* const* sinks;          // [L] -> [N] or null
    const Packed* packed;               // [L] or null
    const void* query;                  // [T, N, D], a token's heads adjacent, tokens `query_stride` elements apart
    void* out;                          // [T, N, Dv] likewise
    int64_t query_stride, out_stride;
    float scale;
    float softcap;                      // 0: no softcap
};

// The two phases; the second starts after all items of the first. Items are the units of `queue`; results do not depend
// on which thread computes them.
void attention_items_part(const Attention& a, int64_t layer, const WorkStealingQueue& queue, int thread);
void attention_merge_part(const Attention& a, int64_t layer, int part, int parts);

// Pages that a share's items of few query rows read, in the order of the items; at most `most` pages.
std::vector<int32_t> attention_pages(const AttentionList& l, int64_t share, int64_t most);

}  // namespace bg
