// y = x W^T + b in block floating point, for bfloat16 on processors that multiply 16-bit integers faster than float32.
//
// K is cut into groups. The numbers of a group of a row of W, and of x, are integers of at most BFP_MOST with one
// float32 scale: 13 bits and a sign for the largest, where bfloat16 has 8 bits for each. A group's part of y is x_scale
// * scale[n] * (sum of integers, exact in 32 bits). Parts are added in float32 in the order of k: a row's result is
// bitwise the same in every batch.
//
// Layout: [panels][groups] of { float scale[PANEL]; int16 w[size / 2][PANEL][2]; }, zero beyond N and K.
#pragma once

#include "groups.h"
#include "matmul.h"

namespace bg {

constexpr int64_t BFP_GROUP = 96;  // most inputs of a group
constexpr int BFP_MOST = 4729;     // BFP_GROUP * BFP_MOST^2 < 2^31

struct BfpGroups : Grouping {
    explicit BfpGroups(int64_t inner) : Grouping(inner, BFP_GROUP, 2) {}
    int64_t bytes() const { return PANEL * (4 + 2 * size); }  // bytes of one group of one panel
    int64_t panel_bytes() const { return count * bytes(); }
};

int64_t bfp_scratch(int64_t inner);
int64_t bfp_part(const Matmul& m, const Worker& worker);

}  // namespace bg
