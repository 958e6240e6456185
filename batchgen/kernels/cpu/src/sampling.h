// Operations on whole rows of logits, from log-probabilities to sampled tokens. Rows are [V] float (dtype 0) or bf16
// (dtype 1), computed in float32; logprobs.py, sampling.py and noise.py define the results.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace bg {

struct Logits {
    const void* data;  // [R, V], rows `stride` elements apart
    int64_t rows, vocab, stride, dtype;
};

// Maximum and log normalizer of each row. Any of the results may be null.
struct RowScan {
    Logits logits;
    int64_t* ids;        // [R] argmax, the lowest id of equal ones
    float* largest;      // [R]
    float* normalizers;  // [R] log(sum(exp))
    uint8_t* bad;        // [R] nothing can be sampled: any NaN or +inf, or all -inf
};
void row_scan_part(const RowScan& s, int thread, int threads);

// The k largest logits of each row in falling order, ties by rising id.
struct Top {
    Logits logits;
    int64_t k;
    int64_t* ids;   // [R, k]
    float* values;  // [R, k]
};
void top_part(const Top& t, int thread, int threads);

// Noise keys of the rows' next samples.
struct RowKeys {
    const int64_t *seeds, *samples, *positions;  // [R] each
    int64_t* keys;                               // [R]
    int64_t rows;
};

// Samples one token for each of R draws.
struct Sample {
    Logits logits;
    const int64_t* sample_rows;    // [R] row of the logits of each draw; null: draw i uses row i
    int64_t draws;                 // R
    const float* temperature;      // [R]
    const int64_t* top_k;          // [R]
    const float *top_p, *min_p;    // [R]
    const int64_t* keys;           // [R] as RowKeys; null: all rows are greedy
    int64_t* tokens;               // [R]
    uint8_t* bad;                  // [R]
};
void sample_part(const Sample& s, int thread, int threads);

}  // namespace bg
