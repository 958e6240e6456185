"""One step's attention as a flat list of work items for the compiled kernels, arranged in numpy.

An *item* is a run of tokens that attend to one run of consecutive stored positions: a piece of a prefill chunk with the
pages from its past to itself, a decode row with its own pages, rows of a prefix group with the group's pages, tokens of
many short chunks with the pages that those begin with. An item that is
more than threads could share evenly is listed once for each key head, and a long run of positions is cut into several.

A token that is in one item alone is written straight to the output. The items of every other token leave *parts*, which
are merged in this order: groups as the step lists them (those that begin first come first), pages shared by chunks, the
token's own; within each from the lowest position on.

Nothing here is done row by row in Python: a step of decode rows costs a fixed number of array operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from batchgen.kernels.chunk_prefixes import SharedPages, shared_pages
from batchgen.kernels.types import AttentionBatch, Ints

__all__ = ["FIELDS", "ListShape", "WorkList", "plan_list"]

FIELDS: Final = 8
"""int32 numbers of an item, in the order of `ItemField` of attention.h."""

FEW: Final = 6
"""Query rows of one key head up to which the kernel reads keys row by row; above, they make tiles."""
TILE: Final = 8
"""Query rows that the kernel multiplies together."""

_ROWS: Final = 192
"""Most query rows of an item for one key head, unless one token has more: their sums fit beside a block of keys."""
_SHARED_ROWS: Final = 64
"""Chunks of half as many query rows, or fewer, share a pass over pages that they have in common."""
_MOST_KEYS: Final = 8192
"""Positions of an item."""
_LEAST_KEYS: Final = 512
"""Positions of an item that is cut off a longer run for the threads' sake."""
_STEP: Final = 64
"""Runs are cut at multiples of so many positions from their beginning."""
_PER_THREAD: Final = 4
"""An item takes at most one in so many parts of a thread's share."""
_KEY_COST: Final = 8
"""What reading a position costs, in query rows that see it."""

Words = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ListShape:
    """What a list is made for."""

    page_size: int
    window: int | None
    kv_heads: int
    group: int
    """Query heads that share a key head."""
    threads: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """A step's items, and what is counted of them."""

    items: Words
    """[n, FIELDS], costliest first; an item whose key heads are shared out stands there once for each."""
    tokens: Words
    positions: Words
    """[T] absolute position of each token."""
    pages: Words
    parts: Words
    """[E] part numbers, those of a merge adjacent."""
    merges: Words
    """[M, 3]: token, where its parts begin in `parts`, how many."""
    num_items: int
    """Items, each counted once."""
    keys_read: int
    """Positions read, summed over items: times key heads, head sizes and bytes, what a layer reads."""
    padded_rows: int
    """Query rows of one key head by which tiles are not full, in items of more than `FEW` rows."""

    @property
    def num_parts(self) -> int:
        """Parts left by all items."""
        return len(self.parts)

    @property
    def num_merges(self) -> int:
        """Tokens whose results are merged."""
        return len(self.merges)


def plan_list(batch: AttentionBatch, shape: ListShape) -> WorkList:
    """The work of a step for layers of `shape`. The batch's slots are not looked at."""
    planner = _Planner(batch, shape)
    planner.add_groups()
    planner.add_chunks()
    planner.add_decodes()
    return planner.build()


@dataclass(slots=True)
class _Items:
    """Columns [n]; keys [first, end) are counted from `base`, the position of the page table's first slot."""

    rows_at: Ints
    count: Ints
    page_at: Ints
    base: Ints
    first: Ints
    end: Ints

    @staticmethod
    def join(items: list[_Items]) -> _Items:
        if not items:
            return _Items(*(np.empty(0, np.int64) for _ in _Items.__slots__))
        return _Items(*(np.concatenate([getattr(i, name) for i in items]) for name in _Items.__slots__))


class _Planner:
    def __init__(self, batch: AttentionBatch, shape: ListShape) -> None:
        self._batch = batch
        self._shape = shape
        self._queries = max(1, _ROWS // shape.group)
        self._chunks = [chunk for chunk in batch.chunks if chunk.q_len > 0]
        rows = 0 if batch.decode_lens is None else len(batch.decode_lens)
        self._tokens = batch.decode_start + rows
        self._positions = self._token_positions()
        self._rows: list[Ints] = [np.arange(self._tokens)]
        self._rows_end = self._tokens
        self._pages: list[Ints] = []
        self._pages_end = 0
        self._items: list[_Items] = []

    def _token_positions(self) -> Ints:
        batch = self._batch
        positions = np.zeros(self._tokens, np.int64)
        for chunk in self._chunks:
            positions[chunk.q_start : chunk.q_start + chunk.q_len] = np.arange(chunk.kv_len - chunk.q_len, chunk.kv_len)
        if batch.decode_lens is not None and batch.decode_own_start is not None:
            positions[batch.decode_start :] = batch.decode_own_start + batch.decode_lens - 1
        return positions

    def add_groups(self) -> None:
        """Items of the groups' rows."""
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
        """Items of sets of tokens over keys [begin, end) that all of a set stand behind."""
        if self._shape.window is not None:
            tokens, sizes = self._seeing(tokens, sizes, base + end)
        of, start, count = _pieces(sizes, self._queries)
        if len(of):
            edges = (np.cumsum(sizes) - sizes)[of] + start
            low = np.minimum.reduceat(self._positions[tokens], edges) - base[of]
            first = np.maximum(self._first(low), begin[of])
            self._items.append(_Items(self._rows_end + edges, count, page_at[of], base[of], first, end[of]))
        self._rows.append(tokens)
        self._rows_end += len(tokens)

    def _seeing(self, tokens: Ints, sizes: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """Tokens whose window reaches their set's keys, by position, and how many each set keeps."""
        assert self._shape.window is not None
        of = np.repeat(np.arange(len(sizes)), sizes)
        positions = self._positions[tokens]
        seen = positions - self._shape.window + 1 < ends[of]
        order = np.lexsort((positions[seen], of[seen]))
        return tokens[seen][order], np.bincount(of[seen], minlength=len(sizes))

    def add_chunks(self) -> None:
        """Items of the prefill chunks."""
        if not self._chunks:
            return
        size = self._shape.page_size
        columns = np.array([(c.q_start, c.q_len, c.kv_len, len(c.pages)) for c in self._chunks])
        q_start, q_len, kv_len, tables = columns.T
        page_at = self._add_pages([c.pages for c in self._chunks], tables)
        shared, covered = shared_pages(self._chunks, size, max(1, _SHARED_ROWS // self._shape.group))
        if shared:
            self._share(shared, q_start, q_len, page_at)
        of, begin, count = _pieces(q_len, self._queries)
        low = (kv_len - q_len)[of] + begin
        first = np.maximum(self._first(low), covered[of] * size)
        self._items.append(_Items(q_start[of] + begin, count, page_at[of], np.zeros_like(low), first, low + count))

    def _share(self, shared: list[SharedPages], q_start: Ints, q_len: Ints, page_at: Ints) -> None:
        """Items of the tokens of many chunks over pages that all of them begin with."""
        tokens = [_spans(q_start[s.chunks], q_len[s.chunks]) for s in shared]
        leaders = page_at[[int(s.chunks[0]) for s in shared]]
        begin = np.array([s.begin for s in shared]) * self._shape.page_size
        end = np.array([s.end for s in shared]) * self._shape.page_size
        sizes = np.array([len(t) for t in tokens])
        self._add_shared(np.concatenate(tokens), sizes, leaders, np.zeros_like(begin), begin, end)

    def add_decodes(self) -> None:
        """An item per decode row, over its own pages."""
        batch = self._batch
        if batch.decode_pages is None or batch.decode_lens is None or batch.decode_own_start is None:
            return
        rows, width = batch.decode_pages.shape
        page_at = self._pages_end + np.arange(rows) * width
        self._add_pages([batch.decode_pages.reshape(-1)], np.array([rows * width]))
        first = self._first(batch.decode_lens - 1)
        tokens, count = batch.decode_start + np.arange(rows), np.ones(rows, np.int64)
        self._items.append(_Items(tokens, count, page_at, batch.decode_own_start, first, batch.decode_lens))

    def _add_pages(self, pages: list[Ints], lengths: Ints) -> Ints:
        """Where each of the tables begins."""
        at: Ints = self._pages_end + np.cumsum(lengths) - lengths
        self._pages += pages
        self._pages_end += int(lengths.sum())
        return at

    def _first(self, low: Ints) -> Ints:
        """The first key that any token of an item sees, its lowest at `low`."""
        if self._shape.window is None:
            return np.zeros_like(low)
        return np.maximum(low - self._shape.window + 1, 0)

    def build(self) -> WorkList:
        """Cut, number the parts, sort."""
        rows = np.concatenate(self._rows)
        items, by_head = self._cut(_Items.join(self._items))
        part_at, parts, merges = self._parts(rows, items)
        lengths = items.end - items.first
        query_rows = items.count * self._shape.group
        heads = np.where(by_head, self._shape.kv_heads, 1)
        cost = lengths * (query_rows + _KEY_COST) // heads
        of = np.repeat(np.arange(len(lengths)), heads)
        head = np.where(by_head[of], np.arange(len(of)) - (np.cumsum(heads) - heads)[of], -1)
        order = np.argsort(-cost[of], kind="stable")
        of, head = of[order], head[order]
        columns = (items.rows_at, items.count, items.page_at, items.base, items.first, items.end, part_at)
        table = np.empty((len(of), FIELDS), np.int32)
        for index, column in enumerate(columns):
            table[:, index] = column[of]
        table[:, -1] = head
        return WorkList(
            items=table,
            tokens=rows.astype(np.int32),
            positions=self._positions.astype(np.int32),
            pages=(np.concatenate(self._pages) if self._pages else np.empty(0, np.int64)).astype(np.int32),
            parts=parts.astype(np.int32),
            merges=merges.astype(np.int32),
            num_items=len(lengths),
            keys_read=int(lengths.sum()),
            padded_rows=int((-query_rows % TILE)[query_rows > FEW].sum()),
        )

    def _cut(self, items: _Items) -> tuple[_Items, Flags]:
        """Runs of keys too long for one item, as several of even length; which items are shared out by key head."""
        kv_heads, threads = self._shape.kv_heads, self._shape.threads
        lengths = items.end - items.first
        rows = items.count * self._shape.group + _KEY_COST
        most, by_head = np.full(len(lengths), _MOST_KEYS), np.zeros(len(lengths), np.bool_)
        if threads > 1:
            share = int((lengths * rows).sum()) // (_PER_THREAD * threads)
            by_head = (lengths * rows > share) & (kv_heads > 1)
            most = np.clip(share * np.where(by_head, kv_heads, 1) // rows, _LEAST_KEYS, _MOST_KEYS)
        counts = -(-lengths // most)
        if not (counts > 1).any():
            return items, by_head
        of = np.repeat(np.arange(len(counts)), counts)
        length = (-(-lengths // (counts * _STEP)) * _STEP)[of]
        begin = items.first[of] + (np.arange(len(of)) - (np.cumsum(counts) - counts)[of]) * length
        end = np.minimum(items.end[of], begin + length)
        some = end > begin
        cut = _Items(*(getattr(items, name)[of[some]] for name in _Items.__slots__))
        cut.first, cut.end = begin[some], end[some]
        return cut, by_head[of[some]]

    def _parts(self, rows: Ints, items: _Items) -> tuple[Ints, Ints, Ints]:
        """Per item where its tokens' parts begin, or -1; the parts by token; the merges."""
        none = np.full(len(items.count), -1, np.int64)
        of = np.repeat(np.arange(len(items.count)), items.count)
        tokens = rows[_spans(items.rows_at, items.count)]
        several = np.bincount(tokens, minlength=self._tokens) > 1
        if not several.any():
            return none, np.empty(0, np.int64), np.empty((0, 3), np.int64)
        partial = np.bincount(of[several[tokens]], minlength=len(none)) > 0
        kept = np.where(partial, items.count, 0)
        part_at = np.where(partial, np.cumsum(kept) - kept, -1)
        tokens = tokens[partial[of]]
        found, counts = np.unique(tokens, return_counts=True)
        merges = np.stack([found, np.cumsum(counts) - counts, counts], 1)
        return part_at, np.argsort(tokens, kind="stable"), merges


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
