// y = x W^T + b with W in int8 by groups of inputs. x is quantised to eight bits when it is read, by row and group.
//
// K is cut into groups of `size` inputs, at most `Matmul::group`. Within a group W[n][k] = scale[n] * w[n][k] and x[k] = s * (u[k] - 128),
// so that a group's part of y[n] is s * scale[n] * (sum of u[k] w[n][k] - correction[n]), correction = 128 * sum of w:
// sums of integers, exact. Parts are added in float32 in the order of k: a row's result is bitwise the same in every
// batch.
//
// Layout: [panels][groups] of { float scale[PANEL]; int32 correction[PANEL]; int8 w[size / 4][PANEL][4]; }, zero
// beyond N and K.
#pragma once

#include "groups.h"
#include "matmul.h"

namespace bg {

struct Groups : Grouping {
    Groups(int64_t inner, int64_t group) : Grouping(inner, group, 4) {}
    int64_t bytes() const { return PANEL * (8 + size); }  // bytes of one group of one panel
    int64_t panel_bytes() const { return count * bytes(); }
};

int64_t int8_scratch(int64_t inner, int64_t group);
int64_t int8_part(const Matmul& m, const Worker& worker);

}  // namespace bg
