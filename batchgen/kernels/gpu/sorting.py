"""Bitonic networks on tiles of 64-bit integers: the K largest of a tile, and joining two sorted lists.

A tile of 2^n numbers is seen as a cube of n axes of length 2, so that partners stand beside each other on one axis. A
partner's value is the pair's sum less one's own, in wrapping arithmetic: `tl.sort` finds it by exclusive or, of which
Triton's interpreter makes a loop over the elements in Python.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["join_rising", "top_falling"]


@triton.constexpr_function
def _log2(count):
    return count.bit_length() - 1


@triton.jit
def _bit(AXES: tl.constexpr, BIT: tl.constexpr):
    """Of each place in a cube of AXES axes, bit BIT of its index."""
    return tl.reshape(tl.arange(0, 2), [1] * (AXES - 1 - BIT) + [2] + [1] * BIT) == 1


@triton.jit
def _exchange(cube, falling, AXES: tl.constexpr, BIT: tl.constexpr):
    """Bring the pairs that differ in bit BIT of their index into order."""
    partner = tl.sum(cube, axis=AXES - 1 - BIT, keep_dims=True) - cube
    return tl.where((partner > cube) == (falling ^ _bit(AXES, BIT)), partner, cube)


@triton.jit
def _merge(cube, falling, AXES: tl.constexpr, LOG: tl.constexpr):
    """Sort each run of 2^LOG numbers of which the first part rises and the rest falls, or the other way round."""
    for step in tl.static_range(LOG):
        cube = _exchange(cube, falling, AXES, LOG - 1 - step)
    return cube


@triton.jit
def top_falling(x, K: tl.constexpr):
    """The K largest of [N] int64, all different, largest first: [K]. K and N are powers of 2, K below N or N."""
    LOG: tl.constexpr = _log2(K)
    AXES: tl.constexpr = _log2(x.shape[0])
    cube = tl.reshape(x, [2] * AXES)
    for stage in tl.static_range(1, LOG + 1):
        # Neighbouring runs are sorted in opposite ways, so that two make one run of the next stage.
        if stage < AXES:
            cube = _merge(cube, ~_bit(AXES, stage), AXES, stage)
        else:
            cube = _merge(cube, tl.full([1] * AXES, 1, tl.int1), AXES, stage)
    for halving in tl.static_range(1, AXES - LOG + 1):
        # Of a rising and a falling run of K, the element-wise larger are the K largest of both.
        cube = tl.max(cube, axis=AXES - halving - LOG)
        if halving < AXES - LOG:
            cube = _merge(cube, ~_bit(AXES - halving, LOG), AXES - halving, LOG)
        else:
            cube = _merge(cube, tl.full([1] * LOG, 1, tl.int1), LOG, LOG)
    return tl.reshape(cube, [K])


@triton.jit
def join_rising(rising, falling):
    """The K largest of two lists [K] int64, smallest first."""
    K: tl.constexpr = rising.shape[0]
    LOG: tl.constexpr = _log2(K)
    cube = tl.reshape(tl.maximum(rising, falling), [2] * LOG)
    return tl.reshape(_merge(cube, tl.full([1] * LOG, 0, tl.int1), LOG, LOG), [K])
