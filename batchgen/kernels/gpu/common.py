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


@triton.jit
def to_e4m3(x):
    """Codes (uint8) of `x` (float32) in E4M3: to nearest, ties to even; past 448 the largest number."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # the exponent's bias is 7 instead of 127
    # Below 2^-6 a code counts steps of 2^-9; the sum with 2^23 rounds to whole ones.
    small = (tl.minimum(tl.abs(x), 1.0) * 512 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude >= 0x3C800000, tl.minimum(normal, 0x7E), small)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)  # not-a-number
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def from_e4m3(b, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """Numbers of codes `b` (uint8) of E4M3 in `dtype`, exactly; by the chip's instruction with NATIVE."""
    if NATIVE:
        return b.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        # The bits of a float16 whose exponent is 8 less, right for denormal numbers, too.
        bits = ((b & 0x80).to(tl.uint16) << 8) | ((b & 0x7F).to(tl.uint16) << 7)
        x = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256
        return tl.where((b & 0x7F) == 0x7F, float("nan"), x).to(dtype)


@triton.jit
def cached(x, dtype: tl.constexpr):
    """`x` as a cache of `dtype` stores it: as codes of E4M3 if that is uint8."""
    if dtype == tl.uint8:
        return to_e4m3(x.to(tl.float32))
    else:
        return x
