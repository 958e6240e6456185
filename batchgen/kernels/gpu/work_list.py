"""One step's attention as flat lists of work items, arranged on the host in numpy and uploaded as one packed array.

A *tile* is up to `queries` tokens that attend to one run of consecutive positions: a piece of a prefill chunk, a decode
row with its own pages, some rows of a prefix group with the group's pages, tokens of many short chunks with the pages
that those begin with. Long runs are split into several *items* so
that every multiprocessor has work. A token that is in one item alone is written straight to the output. Otherwise its
items leave *parts* (float32 values and their log-sum-exp), which are merged: by the token's own item as it begins,
where that is the only one beside parts of earlier launches, or by a launch of its own.

Launches, in order: `LARGE` items (tiles that need many rows: chunks and groups), `GROUPS` (groups of few rows), `SMALL`
(decode rows and the ends of chunks), then the merge. Inside a launch the longest items come first.

Knows nothing of tensors, heads or layers beyond how many rows of a tile one token takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.kernels.chunk_prefixes import SharedPages, shared_pages
from batchgen.kernels.types import AttentionBatch, Ints

__all__ = ["FIELDS", "GROUPS", "LARGE", "SMALL", "ListShape", "TileSize", "WorkList", "plan_groups", "plan_step"]

LARGE, GROUPS, SMALL = range(3)
"""Launches by number."""

FIELDS = 12
"""int32 numbers of an item: `_NAMES`, then padding to a multiple of 16 bytes."""

_NAMES = (
    "rows_at",  # its tokens are rows[rows_at : rows_at + count]
    "count",  # may be 0: nothing to do
    "page_at",  # its page table begins at pages[page_at]
    "base",  # absolute position of the table's first slot; the positions below count from it
    "first",  # keys [first, end) are read, all of them stored
    "full_from",  # keys [full_from, full_to), multiples of the tile's keys, are seen by all its tokens
    "full_to",
    "end",
    "part_at",  # its tokens' parts go to part_at and on; -1: straight to the output
    "fold_at",  # parts[fold_at : fold_at + folds] are merged into its token's result
    "folds",
)

_ALIGNMENT = 4
"""Sections of the packed array begin at multiples of 16 bytes, so that no step compiles a kernel of its own."""

Words = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TileSize:
    """How much one item of a launch takes."""

    queries: int
    """Most tokens of a tile."""
    keys: int
    """Positions per step of the kernel's loop."""
    split: int
    """Least positions of an item that is a part of a longer run."""
    wanted: int
    """Items from which on the device is full: runs are split only as far as that takes."""


@dataclass(frozen=True, slots=True)
class ListShape:
    """What a work list is made for."""

    page_size: int
    window: int | None
    large: TileSize
    small: TileSize


@dataclass(frozen=True, slots=True)
class WorkList:
    """A step's items and the arrays that they point into."""

    packed: Words
    """All sections, one after the other."""
    items: tuple[slice, slice, slice]
    """Per launch: its items in `packed`, `FIELDS` numbers each."""
    rows: slice
    positions: slice
    """[T]: absolute position of each token."""
    pages: slice
    parts: slice
    """Part numbers, ordered by token."""
    merges: tuple[slice, slice, slice]
    """What the merge launch does: tokens [M], where each one's parts begin in `parts` [M], how many there are [M]."""
    num_parts: int
    keys_read: int
    """Positions loaded, summed over items: times key heads and head sizes, the traffic of one layer."""
    padded_rows: int
    """Query slots of tiles that hold no token."""

    def count(self, launch: int) -> int:
        """Items of a launch."""
        section = self.items[launch]
        return int(section.stop - section.start) // FIELDS

    @property
    def num_merges(self) -> int:
        """Tokens of the merge launch."""
        return int(self.merges[0].stop - self.merges[0].start)


def plan_step(batch: AttentionBatch, shape: ListShape, tokens: int | None = None) -> WorkList:
    """The work of a whole step; of `tokens` flat tokens if given, of which those past the batch's are in no item."""
    planner = _Planner(batch, shape, tokens)
    planner.add_groups()
    planner.add_chunks()
    planner.add_decodes()
    return planner.build()


def plan_groups(batch: AttentionBatch, shape: ListShape) -> WorkList:
    """The work of the prefix groups alone: parts only, and a merge for every decode row, those without parts too."""
    planner = _Planner(batch, shape)
    planner.add_groups()
    return planner.build(merge_from=batch.decode_start)


@dataclass(slots=True)
class _Tiles:
    """Columns [n] of tiles; `low` and `high` are the least and the greatest position of its tokens less `base`."""

    rows_at: Ints
    count: Ints
    page_at: Ints
    base: Ints
    first: Ints
    end: Ints
    low: Ints
    high: Ints

    def take(self, chosen: Flags | Ints) -> _Tiles:
        return _Tiles(*(getattr(self, name)[chosen] for name in _Tiles.__slots__))

    @staticmethod
    def join(tiles: list[_Tiles]) -> _Tiles:
        return _Tiles(*(np.concatenate([getattr(t, name) for t in tiles]) for name in _Tiles.__slots__))


_NO_TILES = _Tiles(*(np.empty(0, np.int64) for _ in _Tiles.__slots__))


class _Planner:
    def __init__(self, batch: AttentionBatch, shape: ListShape, tokens: int | None = None) -> None:
        self._batch = batch
        self._shape = shape
        self._chunks = [chunk for chunk in batch.chunks if chunk.q_len > 0]
        self._tokens = batch.slot_mapping.shape[0] if tokens is None else tokens
        self._positions = self._token_positions()
        self._rows: list[Ints] = [np.arange(self._tokens)]
        self._rows_end = self._tokens
        self._pages: list[Ints] = []
        self._pages_end = 0
        self._tiles: list[list[_Tiles]] = [[], [], []]

    def _token_positions(self) -> Ints:
        positions = np.zeros(self._tokens, np.int64)
        for chunk in self._chunks:
            positions[chunk.q_start : chunk.q_start + chunk.q_len] = np.arange(chunk.kv_len - chunk.q_len, chunk.kv_len)
        if self._batch.decode_lens is not None and self._batch.decode_own_start is not None:
            begin, rows = self._batch.decode_start, len(self._batch.decode_lens)
            positions[begin : begin + rows] = self._batch.decode_own_start + self._batch.decode_lens - 1
        return positions

    def add_groups(self) -> None:
        """Tiles of the groups' rows."""
        groups = self._batch.groups
        if not groups:
            return
        sizes = np.array([len(g.rows) for g in groups])
        tables = np.array([len(g.pages) for g in groups])
        page_at = self._add_pages([g.pages for g in groups], tables)
        tokens = np.concatenate([g.rows for g in groups]) + self._batch.decode_start
        base = np.array([g.start for g in groups])
        self._add_shared(tokens, sizes, page_at, base, np.zeros_like(base), tables * self._shape.page_size)

    def _add_shared(self, tokens: Ints, sizes: Ints, page_at: Ints, base: Ints, begin: Ints, end: Ints) -> None:
        """Tiles of sets of tokens over keys [begin, end) that all of a set stand behind."""
        if self._shape.window is not None:
            tokens, sizes = self._seeing(tokens, sizes, base + end)
        at = np.cumsum(sizes) - sizes
        of, start, count = _pieces(sizes, self._shape.large.queries)
        if len(of):
            positions = self._positions[tokens]
            edges = at[of] + start
            low = np.minimum.reduceat(positions, edges) - base[of]
            high = np.maximum.reduceat(positions, edges) - base[of]
            first = np.maximum(self._first(low), begin[of])
            tiles = _Tiles(self._rows_end + edges, count, page_at[of], base[of], first, end[of], low, high)
            self._add(tiles.take(end[of] > first), GROUPS)
        self._rows.append(tokens)
        self._rows_end += len(tokens)

    def _seeing(self, tokens: Ints, sizes: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """The groups' tokens whose window reaches their group, by position, and how many each group keeps."""
        assert self._shape.window is not None
        of = np.repeat(np.arange(len(sizes)), sizes)
        positions = self._positions[tokens]
        seen = positions - self._shape.window + 1 < ends[of]
        order = np.lexsort((positions[seen], of[seen]))
        return tokens[seen][order], np.bincount(of[seen], minlength=len(sizes))

    def add_chunks(self) -> None:
        """Tiles of the prefill chunks, each over its pages from position 0 on."""
        if not self._chunks:
            return
        q_start, q_len, kv_len, tables = np.array(
            [(c.q_start, c.q_len, c.kv_len, len(c.pages)) for c in self._chunks]
        ).T
        page_at = self._add_pages([c.pages for c in self._chunks], tables)
        shared, pages = shared_pages(self._chunks, self._shape.page_size, self._shape.large.queries)
        covered = pages * self._shape.page_size
        if shared:
            self._share(shared, q_start, q_len, page_at)
        of, begin, count = _pieces(q_len, self._shape.large.queries)
        low = (kv_len - q_len)[of] + begin
        high = low + count - 1
        base = np.zeros_like(low)
        first = np.maximum(self._first(low), covered[of])
        self._add(_Tiles(q_start[of] + begin, count, page_at[of], base, first, high + 1, low, high), SMALL)

    def _share(self, shared: list[SharedPages], q_start: Ints, q_len: Ints, page_at: Ints) -> None:
        """Tiles of the tokens of many chunks over pages that all of them begin with."""
        tokens = [_spans(q_start[s.chunks], q_len[s.chunks]) for s in shared]
        leaders = page_at[[int(s.chunks[0]) for s in shared]]
        begin = np.array([s.begin for s in shared]) * self._shape.page_size
        end = np.array([s.end for s in shared]) * self._shape.page_size
        sizes = np.array([len(t) for t in tokens])
        self._add_shared(np.concatenate(tokens), sizes, leaders, np.zeros_like(begin), begin, end)

    def add_decodes(self) -> None:
        """A tile per decode row, over its own pages."""
        batch = self._batch
        if batch.decode_pages is None or batch.decode_lens is None or batch.decode_own_start is None:
            return
        rows, width = batch.decode_pages.shape
        page_at = self._pages_end + np.arange(rows) * width
        self._add_pages([batch.decode_pages.reshape(-1)], np.array([rows * width]))
        last = batch.decode_lens - 1
        rows_at, count = batch.decode_start + np.arange(rows), np.ones(rows, np.int64)
        tiles = _Tiles(
            rows_at, count, page_at, batch.decode_own_start, self._first(last), batch.decode_lens, last, last
        )
        self._tiles[SMALL].append(tiles)

    def _add_pages(self, pages: list[Ints], lengths: Ints) -> Ints:
        """Where each of the tables begins."""
        at: Ints = self._pages_end + np.cumsum(lengths) - lengths
        self._pages += pages
        self._pages_end += int(lengths.sum())
        return at

    def _first(self, low: Ints) -> Ints:
        """The first key that any token of a tile sees."""
        if self._shape.window is None:
            return np.zeros_like(low)
        return np.maximum(low - self._shape.window + 1, 0)

    def _add(self, tiles: _Tiles, few: int) -> None:
        """Tiles of few tokens go to the launch `few`."""
        small = tiles.count <= self._shape.small.queries
        self._tiles[few].append(tiles.take(small))
        self._tiles[LARGE].append(tiles.take(~small))

    def build(self, merge_from: int | None = None) -> WorkList:
        """Split, sort and pack. With `merge_from`, every token from there on is merged, whatever it has."""
        rows = np.concatenate(self._rows)
        sizes = (self._shape.large, self._shape.small, self._shape.small)
        listed = [_split(_join(t), size) for t, size in zip(self._tiles, sizes, strict=True)]
        tiles = _Tiles.join([tiles for tiles, _ in listed])
        ends = np.cumsum([0] + [len(tiles.count) for tiles, _ in listed])
        split = np.concatenate([split for _, split in listed])
        shared = tiles.rows_at >= self._tokens  # a group's: its rows are indexed behind the tokens themselves
        partial = split | shared
        kept = np.where(partial | self._beside_parts(rows, tiles, partial, int(ends[SMALL])), tiles.count, 0)
        part_at = np.cumsum(kept) - kept
        num_parts = int(kept.sum())
        tokens = rows[_spans(tiles.rows_at[kept > 0], kept[kept > 0])]  # [parts]
        parts_of = np.bincount(tokens, minlength=self._tokens)
        begins = np.cumsum(parts_of) - parts_of
        direct = kept == 0
        token = rows[tiles.rows_at]
        fold_at = np.where(direct, begins[token], 0)
        folds = np.where(direct, parts_of[token], 0)
        assert not len(folds) or int((folds * (tiles.count > 1)).max()) == 0, "only single tokens take parts in"
        unmerged = parts_of.copy()
        unmerged[token[direct]] = 0
        merged = np.flatnonzero(unmerged) if merge_from is None else np.arange(merge_from, self._tokens)
        full_from, full_to = self._full(tiles, np.repeat([s.keys for s in sizes], np.diff(ends)))
        columns = (
            tiles.rows_at, tiles.count, tiles.page_at, tiles.base, tiles.first, full_from, full_to, tiles.end,
            np.where(direct, -1, part_at), fold_at, folds,
        )  # fmt: skip
        assert len(columns) == len(_NAMES)
        table = np.zeros((len(tiles.count), FIELDS), np.int32)
        table[:, : len(columns)] = np.stack(columns, 1)
        pages = np.concatenate(self._pages) if self._pages else np.empty(0, np.int64)
        sections: list[npt.NDArray[Any]] = [
            *(table[a:b].reshape(-1) for a, b in pairwise(ends)),
            rows, self._positions, pages, np.argsort(tokens, kind="stable"), merged, begins[merged], parts_of[merged],
        ]  # fmt: skip
        packed, at = _pack(sections)
        taken = np.array([sizes[launch].queries for launch in range(3)]) * np.diff(ends)
        return WorkList(
            packed=packed,
            items=(at[0], at[1], at[2]),
            rows=at[3],
            positions=at[4],
            pages=at[5],
            parts=at[6],
            merges=(at[7], at[8], at[9]),
            num_parts=num_parts,
            keys_read=int((tiles.end - tiles.first).sum()),
            padded_rows=int(taken.sum() - tiles.count.sum()),
        )

    def _beside_parts(self, rows: Ints, tiles: _Tiles, partial: Flags, small: int) -> Flags:
        """Items whose tokens have parts elsewhere, and that cannot take them in: tiles of chunks that share pages."""
        unable = ~partial & ((tiles.count > 1) | (np.arange(len(partial)) < small))
        result = np.zeros_like(partial)
        if not unable.any() or not partial.any():
            return result
        has_parts = np.zeros(self._tokens, np.bool_)
        has_parts[rows[_spans(tiles.rows_at[partial], tiles.count[partial])]] = True
        chosen = has_parts[rows[_spans(tiles.rows_at[unable], tiles.count[unable])]]
        counts = tiles.count[unable]
        result[unable] = np.maximum.reduceat(chosen, np.cumsum(counts) - counts)
        return result

    def _full(self, tiles: _Tiles, keys: Ints) -> tuple[Ints, Ints]:
        """The steps of each item that need no mask, as keys [from, to); empty ones stand at its first step."""
        begin = tiles.first
        if self._shape.window is not None:
            begin = np.maximum(begin, tiles.high - self._shape.window + 1)
        start = -(-begin // keys) * keys
        stop = np.minimum(tiles.end, tiles.low + 1) // keys * keys
        none = stop <= start
        step = tiles.first // keys * keys
        return np.where(none, step, start), np.where(none, step, stop)


def _join(tiles: list[_Tiles]) -> _Tiles:
    return _Tiles.join(tiles) if tiles else _NO_TILES


def _pieces(sizes: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Cut sets of `sizes` into pieces of up to `most`: each piece's set, where in it the piece begins, and its size."""
    counts = -(-sizes // most)
    of = np.repeat(np.arange(len(sizes)), counts)
    begin = (np.arange(len(of)) - (np.cumsum(counts) - counts)[of]) * most
    return of, begin, np.minimum(sizes[of] - begin, most)


def _spans(at: Ints, counts: Ints) -> Ints:
    """The ranges [at, at + count) one after the other."""
    before = np.cumsum(counts) - counts
    spans: Ints = np.repeat(at - before, counts) + np.arange(int(counts.sum()))
    return spans


def _split(tiles: _Tiles, size: TileSize) -> tuple[_Tiles, Flags]:
    """Cut long runs of keys, the longest items first; and which items are parts of a longer run."""
    step = tiles.first // size.keys * size.keys
    lengths = tiles.end - step
    share = -(-int(lengths.sum()) // size.wanted)
    most = max(size.split, -(-share // size.keys) * size.keys)
    parts = -(-lengths // most)
    length = -(-lengths // (np.maximum(parts, 1) * size.keys)) * size.keys  # even shares, of whole steps
    parts = -(-lengths // np.maximum(length, 1))
    of = np.repeat(np.arange(len(parts)), parts)
    begin = step[of] + (np.arange(len(of)) - (np.cumsum(parts) - parts)[of]) * length[of]
    items = tiles.take(of)
    items.end = np.minimum(items.end, begin + length[of])
    items.first = np.maximum(items.first, begin)
    order = np.argsort(items.first - items.end, kind="stable")
    return items.take(order), (parts > 1)[of][order]


def _pack(sections: list[npt.NDArray[Any]]) -> tuple[Words, list[slice]]:
    lengths = [len(section) for section in sections]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // _ALIGNMENT) * _ALIGNMENT)
    packed = np.zeros(starts[-1], np.int32)
    slices = [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    for section, place in zip(sections, slices, strict=True):
        packed[place] = section
    return packed, slices
