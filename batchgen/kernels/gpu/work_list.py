"""Work lists of Triton attention: a step's items, planned on the host in numpy and uploaded as one packed array.

A *tile* is one of the items of `attention.work_items`, of up to `queries` tokens. Long runs of keys are split into
several *items* so that every multiprocessor has work. The result of a token that is in one item only is written
straight to the output. Other tokens' items write *parts* (float32 values and their log-sum-exp), which are merged: by
the token's last item, if all other parts come from earlier launches, or by a separate launch.

Launches, in order: `LARGE` items (tiles that need many rows: chunks and groups), `GROUPS` (groups of few rows), `SMALL`
(decode rows and the ends of chunks), then the merge. Within a launch the longest items come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.kernels.attention.work_items import ItemPlanner, Items, ItemShape, Words, numbered, spans
from batchgen.kernels.types import AttentionBatch, Ints

LARGE, GROUPS, SMALL = range(3)
"""Launches, by number."""

FIELDS = 12
"""int32 fields per item: `_NAMES`, then padding to a multiple of 16 bytes."""

_NAMES = (
    "rows_at",  # the item's tokens are rows[rows_at : rows_at + count]
    "count",  # may be 0: nothing to do
    "page_at",  # index in pages of the item's page table
    "base",  # absolute position of the table's first slot; the positions below are relative to it
    "first",  # keys [first, end) are read, all of them stored
    "full_from",  # keys [full_from, full_to), multiples of the tile's keys, are visible to all its tokens
    "full_to",
    "end",
    "part_at",  # the tokens' parts are written from part_at on; -1: straight to the output
    "fold_at",  # parts[fold_at : fold_at + folds] are merged into the token's result
    "folds",
)

_ALIGNMENT = 4
"""int32 numbers that sections are aligned to (16 bytes), so that no step compiles another specialisation."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TileSize:
    """Sizes of a launch's items."""

    queries: int
    """Most tokens of a tile."""
    keys: int
    """Positions per step of the kernel's loop."""
    split: int
    """Least positions of an item that is part of a longer run."""
    wanted: int
    """Number of items at which the device is full: runs are split only to reach it."""


@dataclass(frozen=True, slots=True)
class ListShape:
    """Sizes that a work list is made for."""

    page_size: int
    window: int | None
    large: TileSize
    small: TileSize
    groups_only: bool = False
    """Whether a list has the prefix groups only."""

    def plan(self, batch: AttentionBatch, tokens: int | None = None) -> WorkList:
        """The work list of a step. See `plan_step` and `plan_groups`."""
        return plan_groups(batch, self) if self.groups_only else plan_step(batch, self, tokens)


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of a step, and the arrays that they index."""

    packed: Words
    """All sections, concatenated."""
    items: tuple[slice, ...]
    """By launch: its items in `packed`, `FIELDS` numbers each."""
    rows: slice
    positions: slice
    """[T]: absolute position of each token."""
    pages: slice
    parts: slice
    """Part numbers, ordered by token."""
    merges: tuple[slice, slice, slice]
    """Merge launch: tokens [M], index in `parts` of each token's first part [M], number of its parts [M]."""
    num_parts: int
    keys_read: int
    """Positions loaded, summed over items; times kv heads and head sizes, the traffic of one layer."""
    padded_rows: int
    """Query slots of tiles without a token."""
    split_items: int = 0
    """Most items by which the last launch exceeds the decode rows, because long runs are split."""
    direct: int = -1
    """Field 8 of items whose results are written to the output (`part_at`)."""

    def count(self, launch: int) -> int:
        """Number of items of a launch."""
        section = self.items[launch]
        return int(section.stop - section.start) // FIELDS

    @property
    def num_merges(self) -> int:
        """Number of tokens of the merge launch."""
        return int(self.merges[0].stop - self.merges[0].start)


def plan_step(batch: AttentionBatch, shape: ListShape, tokens: int | None = None) -> WorkList:
    """The work list of a step, of `tokens` flat tokens if given; tokens past the batch's are in no item."""
    planner = _planner(batch, shape, batch.slot_mapping.shape[0] if tokens is None else tokens)
    planner.add_groups()
    planner.add_chunks()
    planner.add_decodes()
    return _finish(planner, shape)


def plan_groups(batch: AttentionBatch, shape: ListShape) -> WorkList:
    """The work list of prefix groups only: parts, and a merge for every decode row, also those without parts."""
    planner = _planner(batch, shape, batch.slot_mapping.shape[0])
    planner.add_groups()
    return _finish(planner, shape, merge_from=batch.decode_start)


def _planner(batch: AttentionBatch, shape: ListShape, tokens: int) -> ItemPlanner:
    queries = shape.large.queries
    return ItemPlanner(batch, ItemShape(shape.page_size, shape.window, queries, queries, shape.page_size), tokens)


def _finish(planner: ItemPlanner, shape: ListShape, merge_from: int | None = None) -> WorkList:
    """Split, sort and pack. With `merge_from`, every token from there on is merged, whatever parts it has."""
    rows = planner.rows()
    sizes = (shape.large, shape.small, shape.small)
    listed = [_split(*launch) for launch in zip(_launches(planner, shape), sizes, strict=True)]
    items = Items.join([items for items, _ in listed])
    ends = np.cumsum([0] + [len(items) for items, _ in listed])
    split = np.concatenate([split for _, split in listed])
    parts = _parts(planner, rows, items, split, int(ends[SMALL]), merge_from)
    table = np.zeros((len(items), FIELDS), np.int32)
    table[:, :5] = items.columns[:5].T
    keys = np.repeat([size.keys for size in sizes], np.diff(ends))
    table[:, 5], table[:, 6] = _full(items, planner.positions[rows], shape.window, keys)
    table[:, 7] = items.end
    for index, column in enumerate((parts.at, parts.fold_at, parts.folds), 8):
        table[:, index] = column
    assert len(_NAMES) == 11
    sections: list[npt.NDArray[Any]] = [
        *(table[a:b].reshape(-1) for a, b in pairwise(ends)),
        rows, planner.positions, planner.pages(), parts.by_token, *parts.merges,
    ]  # fmt: skip
    packed, at = pack(sections)
    taken = np.array([size.queries for size in sizes]) * np.diff(ends)
    return WorkList(
        packed=packed,
        items=(at[0], at[1], at[2]),
        rows=at[3],
        positions=at[4],
        pages=at[5],
        parts=at[6],
        merges=(at[7], at[8], at[9]),
        num_parts=len(parts.by_token),
        keys_read=int((items.end - items.first).sum()),
        padded_rows=int(taken.sum() - items.count.sum()),
        split_items=shape.small.wanted,
    )


def _launches(planner: ItemPlanner, shape: ListShape) -> list[Items]:
    """The tiles of each launch."""
    launches: list[list[Items]] = [[], [], []]
    for few, tiles in ((GROUPS, planner.shared), (SMALL, planner.chunks)):
        for some in tiles:
            small = some.count <= shape.small.queries
            launches[few].append(some.take(small))
            launches[LARGE].append(some.take(~small))
    launches[SMALL] += planner.decodes
    return [Items.join(launch) for launch in launches]


@dataclass(frozen=True, slots=True)
class _Parts:
    at: Ints
    """By item: index of its tokens' first part, or -1."""
    fold_at: Ints
    folds: Ints
    by_token: Ints
    """Part numbers, ordered by token."""
    merges: tuple[Ints, Ints, Ints]


def _parts(planner: ItemPlanner, rows: Words, items: Items, split: Flags, small: int, merge_from: int | None) -> _Parts:
    """Find the items that write parts and those that merge them; items from `small` on are in the last launch."""
    shared = items.rows_at >= planner.tokens  # their rows are indexed after the tokens themselves
    partial = split | shared
    kept = np.where(partial | _have_other_parts(planner.tokens, rows, items, partial, small), items.count, 0)
    tokens = rows[spans(items.rows_at, kept)]  # [parts]
    parts_of = np.bincount(tokens, minlength=planner.tokens)
    begins = np.cumsum(parts_of) - parts_of
    direct = kept == 0
    token = rows[items.rows_at]
    folds = np.where(direct, parts_of[token], 0)
    assert not (folds * (items.count > 1)).any(), "only items of single tokens can merge parts"
    unmerged = parts_of.copy()
    unmerged[token[direct]] = 0
    merged = np.flatnonzero(unmerged) if merge_from is None else np.arange(merge_from, planner.tokens)
    return _Parts(
        at=np.where(direct, -1, np.cumsum(kept) - kept),
        fold_at=np.where(direct, begins[token], 0),
        folds=folds,
        by_token=np.argsort(tokens, kind="stable"),
        merges=(merged, begins[merged], parts_of[merged]),
    )


def _have_other_parts(num_tokens: int, rows: Words, items: Items, partial: Flags, small: int) -> Flags:
    """Items whose tokens have parts elsewhere that they cannot merge: tiles of chunks that share pages."""
    result = np.zeros_like(partial)
    if not partial.any():
        return result
    unable = ~partial & ((items.count > 1) | (np.arange(len(partial)) < small))
    if not unable.any():
        return result
    having, lacking = items.take(partial), items.take(unable)
    has_parts = np.zeros(num_tokens, np.bool_)
    has_parts[rows[spans(having.rows_at, having.count)]] = True
    chosen = has_parts[rows[spans(lacking.rows_at, lacking.count)]]
    result[unable] = np.maximum.reduceat(chosen, np.cumsum(lacking.count) - lacking.count)
    return result


def _full(items: Items, positions: Ints, window: int | None, keys: Ints) -> tuple[Ints, Ints]:
    """The steps of each item that need no mask, as keys [from, to); empty ranges are at the item's first step.

    `positions` are those of the rows. An item's tokens are ordered by position wherever that matters: not in items of
    shared keys without a window, which all tokens see entirely.
    """
    begin = items.first
    if window is not None:
        begin = np.maximum(begin, positions[items.rows_at + items.count - 1] - items.base - window + 1)
    start = -(-begin // keys) * keys
    stop = np.minimum(items.end, positions[items.rows_at] - items.base + 1) // keys * keys
    none = stop <= start
    step = items.first // keys * keys
    return np.where(none, step, start), np.where(none, step, stop)


def _split(tiles: Items, size: TileSize) -> tuple[Items, Flags]:
    """Split long runs of keys, the longest items first; returns the items, and which are parts of a longer run."""
    if not len(tiles):
        return tiles, np.empty(0, np.bool_)
    step = tiles.first // size.keys * size.keys
    lengths = tiles.end - step
    share = -(-int(lengths.sum()) // size.wanted)
    most = max(size.split, -(-share // size.keys) * size.keys)
    parts = -(-lengths // most)
    length = -(-lengths // (np.maximum(parts, 1) * size.keys)) * size.keys  # even shares of whole steps
    parts = -(-lengths // np.maximum(length, 1))
    of, number = numbered(parts)
    begin = step[of] + number * length[of]
    items = tiles.take(of)
    np.minimum(items.end, begin + length[of], out=items.end)
    np.maximum(items.first, begin, out=items.first)
    order = np.argsort(items.first - items.end, kind="stable")
    return items.take(order), (parts > 1)[of][order]


def pack(sections: list[npt.NDArray[Any]]) -> tuple[Words, list[slice]]:
    """Concatenate sections, aligned, as int32; returns the array and the place of each."""
    lengths = [len(section) for section in sections]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // _ALIGNMENT) * _ALIGNMENT)
    packed = np.zeros(starts[-1], np.int32)
    slices = [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    for section, place in zip(sections, slices, strict=True):
        packed[place] = section
    return packed, slices
