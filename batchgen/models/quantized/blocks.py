"""Blocks of values that share a scale, from the shapes of both; does not import torch."""

from __future__ import annotations

import math


def aligned(scale: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The scale's shape with the axes of the values; empty if they do not fit."""
    if math.prod(scale) == 1:
        return (1,) * len(shape)
    if len(scale) == len(shape):
        return scale
    if len(scale) == 1 and shape and scale[0] == shape[0]:
        return (*scale, *(1,) * (len(shape) - 1))
    if len(scale) == len(shape) - 1 and scale == shape[:-1]:
        return (*scale, 1)
    return ()


def block_size(size: int, count: int, known: int | None) -> int:
    """Size of the `count` blocks of an axis; 0 if there is none.

    Only the last block may be shorter. Blocks of a power of two are preferred, since the sizes that quantisers use are.
    """
    if count == 1:
        return max(1, size, known or 0)
    if count == size:
        return 1
    candidates = [known, *(1 << power for power in range(16)), size // count if count and size % count == 0 else None]
    return next((each for each in candidates if each and -(-size // each) == count), 0)


def granularity(shape: tuple[int, ...], blocks: tuple[int, ...]) -> str:
    """The blocks in words, as "in groups of 128"."""
    rows, columns = blocks[-2] if len(blocks) > 1 else 1, blocks[-1]
    whole_row = columns == shape[-1]
    if whole_row and rows == (shape[-2] if len(shape) > 1 else 1):
        return "per tensor"
    if whole_row and rows == 1:
        return "per channel"
    return f"in groups of {columns}" if rows == 1 else f"in blocks of {rows} x {columns}"
