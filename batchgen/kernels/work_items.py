"""One step's attention as work items, arranged on the host in numpy: what work lists of any device are made from.

An *item* is a run of tokens that attend to one run of consecutive stored positions: a piece of a prefill chunk with the
pages from its past to itself, a decode row with its own pages, rows of a prefix group with the group's pages, tokens of
many short chunks with the pages that those begin with.

Nothing here is done row by row in Python: a step of decode rows costs a fixed number of array operations. How long a
run an item may have, which launch or thread takes it and where its results go is the lists' own affair:
`cpu.attention_list` and `gpu.work_list`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.kernels.chunk_prefixes import SharedPages, shared_pages
from batchgen.kernels.types import AttentionBatch, ChunkPages, Ints

__all__ = ["Chosen", "ItemPlanner", "ItemShape", "Items", "Words", "numbered", "spans", "token_positions"]

Words = npt.NDArray[np.int32]
"""As kernels read them."""
Chosen = npt.NDArray[np.bool_] | Ints
"""Which of some items: flags, or indexes."""


@dataclass(frozen=True, slots=True)
class ItemShape:
    """What items are made for."""

    page_size: int
    window: int | None
    """A token sees itself and the `window - 1` positions before it; None sees all."""
    queries: int
    """Most tokens of an item."""
    shared_queries: int
    """Chunks of half as many tokens, or fewer, share items over pages that they have in common."""
    align: int
    """Those items begin and end at multiples of so many positions, which a page's is one of."""


@dataclass(slots=True)
class Items:
    """Some items, as columns [n]."""

    rows_at: Ints
    """The item's tokens are `rows[rows_at : rows_at + count]` of its planner's."""
    count: Ints
    """Tokens, at least one."""
    page_at: Ints
    """Where the item's page table begins in its planner's `pages`."""
    base: Ints
    """Position of the table's first slot, from which keys count."""
    first: Ints
    """Keys [first, end) are read: those that any of the tokens sees."""
    end: Ints
    columns: Ints
    """[6, n] int64: the array that the columns are the rows of, in this order."""

    @staticmethod
    def over(columns: Ints) -> Items:
        """The items whose columns are the rows of an array [6, n]."""
        rows_at, count, page_at, base, first, end = columns
        return Items(rows_at, count, page_at, base, first, end, columns)

    @staticmethod
    def of(count: int, *columns: Ints | int) -> Items:
        """So many items; a number in place of a column is the same for all."""
        table = np.empty((6, count), np.int64)
        for index, column in enumerate(columns):
            table[index] = column
        return Items.over(table)

    @staticmethod
    def join(items: list[Items]) -> Items:
        """All of them, in order."""
        if len(items) == 1:
            return items[0]
        return Items.over(np.concatenate([i.columns for i in items], 1) if items else np.empty((6, 0), np.int64))

    def __len__(self) -> int:
        """How many."""
        return len(self.count)

    def take(self, chosen: Chosen) -> Items:
        """Some of them."""
        return Items.over(self.columns[:, chosen])


class ItemPlanner:
    """Collects the items of a step, by what they are of."""

    def __init__(self, batch: AttentionBatch, shape: ItemShape, tokens: int) -> None:
        """`tokens`: T, of which those past the batch's own are in no item."""
        self._batch = batch
        self._shape = shape
        self._chunks = [chunk for chunk in batch.chunks if chunk.q_len > 0]
        self.tokens = tokens
        self.positions = token_positions(batch, tokens)
        """[T] absolute position of each token."""
        self.shared: list[Items] = []
        """Of tokens that all stand behind the item's keys: a group's, or those of chunks that share pages. With a
        window they are in order of position."""
        self.chunks: list[Items] = []
        """Of consecutive tokens of a chunk."""
        self.decodes: list[Items] = []
        """Of single tokens."""
        self._sets: list[Ints] = []
        self._rows_end = tokens
        self._pages: list[Ints] = []
        self._pages_end = 0

    def add_groups(self) -> None:
        """Items of the prefix groups' rows."""
        groups = self._batch.groups
        if not groups:
            return
        sizes = np.array([len(g.rows) for g in groups])
        tables = np.array([len(g.pages) for g in groups])
        page_at = self._add_pages([g.pages for g in groups], tables)
        tokens = np.concatenate([g.rows for g in groups]) + self._batch.decode_start
        base = np.array([g.start for g in groups])
        self._add_shared(tokens, sizes, page_at, base, np.zeros_like(base), tables * self._shape.page_size)

    def add_chunks(self) -> None:
        """Items of the prefill chunks, each over its pages from position 0 on."""
        if not self._chunks:
            return
        size = self._shape.page_size
        q_start, q_len, kv_len, tables = np.array(
            [(c.q_start, c.q_len, c.kv_len, len(c.pages)) for c in self._chunks]
        ).T
        page_at = self._add_pages([c.pages for c in self._chunks], tables)
        shared, covered = shared_pages(self._chunks, size, self._shape.shared_queries, self._shape.align // size)
        if shared:
            self._share(shared, q_start, q_len, page_at)
        of, begin, count = _pieces(q_len, self._shape.queries)
        low = (kv_len - q_len)[of] + begin
        first = covered[of] * size
        if self._shape.window is not None:
            first = np.maximum(first, low - self._shape.window + 1)
        self.chunks.append(Items.of(len(of), q_start[of] + begin, count, page_at[of], 0, first, low + count))

    def add_decodes(self) -> None:
        """An item per decode row, over its own pages."""
        batch = self._batch
        if batch.decode_pages is None or batch.decode_lens is None or batch.decode_own_start is None:
            return
        rows, width = batch.decode_pages.shape
        numbers = np.arange(rows)
        page_at = self._pages_end + numbers * width
        self._pages.append(batch.decode_pages.reshape(-1))
        self._pages_end += rows * width
        first: Ints | int = 0
        if self._shape.window is not None:
            first = np.maximum(batch.decode_lens - self._shape.window, 0)
        tokens = batch.decode_start + numbers
        self.decodes.append(Items.of(rows, tokens, 1, page_at, batch.decode_own_start, first, batch.decode_lens))

    def rows(self) -> Words:
        """Tokens that items name: the step's own in order, then those of items in `shared`."""
        own = np.arange(self.tokens, dtype=np.int32)
        return np.concatenate([own, *self._sets], dtype=np.int32, casting="unsafe") if self._sets else own

    def pages(self) -> Words:
        """All page tables, one after the other."""
        if not self._pages:
            return np.empty(0, np.int32)
        return np.concatenate(self._pages, dtype=np.int32, casting="unsafe")

    def _share(self, shared: list[SharedPages], q_start: Ints, q_len: Ints, page_at: Ints) -> None:
        """Items of the tokens of many chunks over pages that all of them begin with."""
        tokens = [spans(q_start[s.chunks], q_len[s.chunks]) for s in shared]
        leaders = page_at[[int(s.chunks[0]) for s in shared]]
        begin = np.array([s.begin for s in shared]) * self._shape.page_size
        end = np.array([s.end for s in shared]) * self._shape.page_size
        sizes = np.array([len(t) for t in tokens])
        self._add_shared(np.concatenate(tokens), sizes, leaders, np.zeros_like(begin), begin, end)

    def _add_shared(self, tokens: Ints, sizes: Ints, page_at: Ints, base: Ints, begin: Ints, end: Ints) -> None:
        """Items of sets of tokens over keys [begin, end) that all of a set stand behind."""
        window = self._shape.window
        if window is not None:
            tokens, sizes = self._seeing(tokens, sizes, base + end, window)
        of, start, count = _pieces(sizes, self._shape.queries)
        if len(of):
            edges = (np.cumsum(sizes) - sizes)[of] + start
            first = begin[of]
            if window is not None:
                low = self.positions[tokens[edges]] - base[of]
                first = np.maximum(first, low - window + 1)
            items = Items.of(len(of), self._rows_end + edges, count, page_at[of], base[of], first, end[of])
            self.shared.append(items)
        self._sets.append(tokens)
        self._rows_end += len(tokens)

    def _seeing(self, tokens: Ints, sizes: Ints, ends: Ints, window: int) -> tuple[Ints, Ints]:
        """Tokens whose window reaches their set's keys, by position, and how many each set keeps."""
        of = np.repeat(np.arange(len(sizes)), sizes)
        positions = self.positions[tokens]
        seen = positions - window + 1 < ends[of]
        order = np.lexsort((positions[seen], of[seen]))
        return tokens[seen][order], np.bincount(of[seen], minlength=len(sizes))

    def _add_pages(self, pages: list[Ints], lengths: Ints) -> Ints:
        """Where each of the tables begins."""
        ends: Ints = np.cumsum(lengths)
        at: Ints = ends - lengths + self._pages_end
        self._pages += pages
        self._pages_end += int(ends[-1])
        return at


def token_positions(batch: AttentionBatch, tokens: int) -> Ints:
    """Absolute position of each of T flat tokens [T] int64, the chunks' adjacent; 0 of those not in the batch."""
    positions = np.zeros(tokens, np.int64)
    if batch.chunks:
        _put_chunks(batch.chunks, positions)
    if batch.decode_lens is not None and batch.decode_own_start is not None:
        decoded = positions[batch.decode_start : batch.decode_start + len(batch.decode_lens)]
        np.add(batch.decode_own_start, batch.decode_lens, out=decoded)
        decoded -= 1
    return positions


def _put_chunks(chunks: list[ChunkPages], positions: Ints) -> None:
    begin = chunks[0].q_start
    lengths = np.array([chunk.q_len for chunk in chunks])
    ahead = np.array([chunk.kv_len - chunk.q_len - chunk.q_start for chunk in chunks])
    filled = np.repeat(ahead, lengths)
    filled += np.arange(begin, begin + len(filled))
    positions[begin : begin + len(filled)] = filled


def numbered(counts: Ints) -> tuple[Ints, Ints]:
    """Of sets of so many members, one after the other: each member's set, and its number in that."""
    of = np.repeat(np.arange(len(counts)), counts)
    number: Ints = np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
    return of, number


def spans(at: Ints, counts: Ints) -> Ints:
    """The ranges [at, at + count) one after the other."""
    ends = np.cumsum(counts)
    found: Ints = np.repeat(at - ends + counts, counts)
    found += np.arange(len(found))
    return found


def _pieces(sizes: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Cut sets of `sizes` into pieces of up to `most`: each piece's set, where in it the piece begins, and its size."""
    of, begin = numbered(-(-sizes // most))
    begin *= most
    return of, begin, np.minimum(sizes[of] - begin, most)
