"""Functions shared by several kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.kernels.gpu import launch as _launch

INTERPRETED = tl.constexpr(_launch.INTERPRETED)


def power_of_2(count: int, least: int = 1) -> int:
    """Smallest power of 2 that is at least `count` and `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())


@triton.jit
def dot(a, b, acc):
    """Add the product of `a` and `b` to `acc`, with float32 sums; float32 operands are not rounded to tf32."""
    if INTERPRETED:
        # The interpreter's product of bfloat16 operands is silently wrong (Triton 3.6 to 3.9).
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round `x` (float32) to `dtype`, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter's conversion truncates (Triton 3.6).
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)
