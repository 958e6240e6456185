// From logits to tokens: what the sampler asks of whole rows. Rows are [V] float (dtype 0) or bf16 (dtype 1), computed
// in float32; see logprobs.py, top.py, sampling.py and noise.py for what is computed.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace bg {

struct Logits {
    const void* data;  // [R, V], rows `stride` elements apart
    int64_t rows, vocab, stride, dtype;
};

// The largest of each row and what turns it into a log-probability. Any of the results may be null.
struct RowScan {
    Logits logits;
    int64_t* ids;        // [R] of the largest, the lowest of equals
    float* largest;      // [R]
    float* normalizers;  // [R] log(sum(exp))
    uint8_t* bad;        // [R] nothing can be drawn: a not-a-number or +inf, or all -inf
};
void row_scan_part(const RowScan& s, int thread, int threads);

// The k largest of each row in falling order, ties by rising id.
struct Top {
    Logits logits;
    int64_t k;
    int64_t* ids;   // [R, k]
    float* values;  // [R, k]
};
void top_part(const Top& t, int thread, int threads);

// Keys of the rows' next draws.
struct RowKeys {
    const int64_t *seeds, *samples, *positions;  // [R] each
    int64_t* keys;                               // [R]
    int64_t rows;
};

// R draws of one token.
struct Sample {
    Logits logits;
    const int64_t* sample_rows;    // [R] of the logits, or null where each draw has its own, in order
    int64_t draws;                 // R
    const float* temperature;      // [R]
    const int64_t* top_k;          // [R]
    const float *top_p, *min_p;    // [R]
    const int64_t* keys;           // [R] of row_keys, or null where all rows are greedy
    int64_t* tokens;               // [R]
    uint8_t* bad;                  // [R]
};
void sample_part(const Sample& s, int thread, int threads);

}  // namespace bg
