"""Plan of `attention.deterministic`: which queries of a tile meet which blocks of keys, as lists and index tensors.

A unit is a few queries that read the same pages: neighbours in a prefill chunk, one decode row, or rows of a prefix
group. Units of similar length are processed together, block by block (a `Portion`). Portions are ordered so that every
token meets its blocks by rising position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.kernels.attention.torch_plan import HeadShape
from batchgen.kernels.types import AttentionBatch, Ints

__all__ = ["BLOCK", "Portion", "TilePlan", "plan_tile"]

BLOCK = 64
"""Positions per block of keys; blocks begin at multiples of it."""
_GATHER_BYTES = 8 << 20
"""Bytes of float32 keys and values that a portion gathers at once, unless a block of one unit needs more."""


@dataclass(frozen=True, slots=True)
class Portion:
    """U units and I (unit, block) pairs, ordered by block, then unit."""

    height: int
    """M, rows of a unit's product."""
    tokens: Tensor
    """[U, t] int64: the tile's tokens of each unit, padded with the unit's first"""
    real: Tensor
    """[r] int64: indexes into [U * t] that are not padding; no token twice"""
    unit: Tensor
    """[I] int64: unit of each pair"""
    blocks: list[tuple[int, int]]
    """By block: its first pair, and how many of the first units have it."""
    head_rows: Tensor
    """[I * K * BLOCK] int64: rows of the pool viewed as [P * S * K, D]"""
    hidden: Tensor
    """[I, 1, M, BLOCK] bool: which keys a row does not see"""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """All portions of a tile for layers of one shape and window."""

    shape: HeadShape
    portions: list[Portion]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Tokens that read blocks [first, end) of the same pages, after `level` earlier units of theirs."""

    tokens: Ints
    positions: Ints
    pages: Ints
    base: int
    """Position of the first slot of the pages."""
    first: int
    end: int
    level: int


def plan_tile(
    batch: AttentionBatch,
    page_size: int,
    start: int,
    end: int,
    shape: HeadShape,
    heights: tuple[int, int],
    window: int | None,
) -> TilePlan:
    """Plan the attention of flat tokens [start, end).

    Args:
        batch: the step.
        page_size: S.
        start: first token of the tile.
        end: one past the last token.
        shape: of the layers.
        heights: rows of a small and of a large product.
        window: positions that a token sees; None: all.
    """
    group = shape.heads // shape.kv_heads
    most = max(1, heights[1] // group)
    units = [*_of_chunks(batch, start, end, most, window), *_of_decodes(batch, page_size, start, end, most, window)]
    at_once = max(1, _GATHER_BYTES // (4 * shape.kv_heads * BLOCK * (shape.key_dim + shape.value_dim)))
    buckets: dict[tuple[int, int, int], list[_Unit]] = {}
    for unit in units:
        height = heights[0] if len(unit.tokens) * group <= heights[0] else heights[1]
        for part, first in enumerate(range(unit.first, unit.end, at_once)):
            piece = replace(unit, first=first, end=min(unit.end, first + at_once))
            buckets.setdefault((unit.level, part, height), []).append(piece)
    portions = []
    for level, part, height in sorted(buckets):
        for together in _limited(buckets[level, part, height], at_once):
            portions.append(_portion(together, page_size, shape, height, window))
    return TilePlan(shape, portions)


def _of_chunks(batch: AttentionBatch, start: int, end: int, most: int, window: int | None) -> Iterator[_Unit]:
    """Units of prefill chunks, of at most `most` tokens each."""
    for chunk in batch.chunks:
        low, high = max(chunk.q_start, start), min(chunk.q_start + chunk.q_len, end)
        for at in range(low, high, most):
            tokens = np.arange(at, min(at + most, high))
            positions = tokens + (chunk.kv_len - chunk.q_len - chunk.q_start)
            first = _first_block(int(positions[0]), window)
            yield _Unit(tokens - start, positions, chunk.pages, 0, first, int(positions[-1]) // BLOCK + 1, 0)


def _of_decodes(
    batch: AttentionBatch, page_size: int, start: int, end: int, most: int, window: int | None
) -> Iterator[_Unit]:
    """Units of decode rows: a group's pages for up to `most` of its rows together, the rest row by row."""
    if batch.decode_lens is None or batch.decode_pages is None or batch.decode_own_start is None:
        return
    offset = batch.decode_start
    rows = range(max(0, start - offset), max(0, min(len(batch.decode_lens), end - offset)))
    if not rows:
        return
    positions = (batch.decode_own_start + batch.decode_lens - 1).tolist()
    pages: dict[int, list[Ints]] = {row: [] for row in rows}
    cursor = {row: _first_block(positions[row], window) for row in rows}
    level = dict.fromkeys(rows, 0)

    def unit(members: list[int], table: Ints, base: int, first: int, last: int) -> _Unit:
        found = _Unit(
            np.array(members, np.int64) + (offset - start),
            np.array([positions[row] for row in members], np.int64),
            table,
            base,
            first,
            last,
            max(level[row] for row in members),
        )
        level.update(dict.fromkeys(members, found.level + 1))
        cursor.update(dict.fromkeys(members, last))
        return found

    for group in sorted(batch.groups, key=lambda g: g.start):
        first, last = -(-group.start // BLOCK), (group.start + len(group.pages) * page_size) // BLOCK
        present = [row for row in group.rows.tolist() if row in pages]
        for row in present:
            pages[row].append(group.pages)
        reading = [row for row in present if cursor[row] < last]
        if len(reading) < 2 or first >= last:
            continue
        for row in reading:
            if cursor[row] < first:
                yield unit([row], np.concatenate(pages[row]), 0, cursor[row], first)
        for at in range(0, len(reading), most):
            members = reading[at : at + most]
            begin = max(first, min(cursor[row] for row in members))
            yield unit(members, group.pages, group.start, begin, last)
    for row in rows:
        own = -(-int(batch.decode_lens[row]) // page_size)
        table = np.concatenate([*pages[row], batch.decode_pages[row, :own]])
        assert sum(map(len, pages[row])) * page_size == batch.decode_own_start[row], "groups leave no gap"
        if cursor[row] < positions[row] // BLOCK + 1:
            yield unit([row], table, 0, cursor[row], positions[row] // BLOCK + 1)


def _first_block(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1) // BLOCK


def _limited(units: list[_Unit], most: int) -> Iterator[list[_Unit]]:
    """Units by falling length, in lists of at most `most` blocks in total."""
    units = sorted(units, key=lambda unit: unit.first - unit.end)
    begin = blocks = 0
    for at, unit in enumerate(units):
        size = unit.end - unit.first
        if at > begin and blocks + size > most:
            yield units[begin:at]
            begin, blocks = at, 0
        blocks += size
    yield units[begin:]


def _portion(units: list[_Unit], page_size: int, shape: HeadShape, height: int, window: int | None) -> Portion:
    group = shape.heads // shape.kv_heads
    width = height // group
    tokens = np.array([np.concatenate([u.tokens, np.repeat(u.tokens[:1], width - len(u.tokens))]) for u in units])
    positions = np.array(
        [np.concatenate([u.positions, np.repeat(u.positions[:1], width - len(u.positions))]) for u in units]
    )  # [U, t]
    real = np.concatenate([np.arange(len(u.tokens)) + i * width for i, u in enumerate(units)])
    sizes = np.array([u.end - u.first for u in units])
    counts = [int((sizes > block).sum()) for block in range(sizes[0])]
    firsts = np.cumsum([0, *counts])
    unit = np.concatenate([np.arange(count) for count in counts])  # [I]
    number = np.repeat(np.arange(len(counts)), counts) + np.array([u.first for u in units])[unit]  # [I]
    keys = number[:, None] * BLOCK + np.arange(BLOCK)  # [I, BLOCK] positions
    head_rows = _slots(units, unit, keys, page_size, window)[:, None] * shape.kv_heads  # [I, 1, BLOCK]
    head_rows = head_rows + np.arange(shape.kv_heads)[:, None]  # [I, K, BLOCK]
    at = positions[unit][:, :, None]  # [I, t, 1]
    hidden = keys[:, None] > at
    if window is not None:
        hidden |= keys[:, None] <= at - window
    filled = np.zeros((len(unit), 1, height, BLOCK), np.bool_)
    filled[:, 0, : width * group] = np.repeat(hidden, group, axis=1)
    return Portion(
        height,
        torch.from_numpy(tokens),
        torch.from_numpy(real),
        torch.from_numpy(unit),
        list(zip(firsts[:-1].tolist(), counts, strict=True)),
        torch.from_numpy(head_rows.reshape(-1)),
        torch.from_numpy(filled),
    )


def _slots(
    units: list[_Unit], unit: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], page_size: int, window: int | None
) -> npt.NDArray[np.int64]:
    """[I, BLOCK] slots of key positions; positions that no token of the unit sees are clipped to one that is seen.

    No other slot is read: it may hold not-a-numbers.
    """
    slots = np.empty_like(keys)
    for i, each in enumerate(units):
        mine = unit == i
        low = 0 if window is None else max(0, int(each.positions.min()) - window + 1)
        seen = np.clip(keys[mine], low, int(each.positions.max())) - each.base
        slots[mine] = each.pages[seen // page_size] * page_size + seen % page_size
    return slots
