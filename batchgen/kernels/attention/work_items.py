"""Work items of a step's attention, planned on the host in numpy; the work lists of every device are built from them.

An *item* is a run of tokens that attend to one run of consecutive stored positions: a piece of a prefill chunk over the
pages from its past to itself, a decode row over its own pages, rows of a prefix group over the group's pages, or tokens
of many short chunks over pages that those begin with.

Short chunks fill a tile badly: with 16 tokens of two heads each, three quarters of a tile of 128 rows are padding, over
the whole of a long prefix. If many such chunks share a prefix, their tokens fill tiles over its pages together, and
each chunk continues alone from there (`shared_pages`).

No loop here runs per row in Python: a step of decode rows costs a fixed number of array operations. The lists
(`cpu.attention_list`, `gpu.work_list`) decide how items are split, which launch or thread computes them and where
results are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.kernels.types import AttentionBatch, ChunkPages, Ints

LEAST_KEYS = 256
"""Least positions of a separate pass: shorter ones save less than merging their parts costs."""


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Chunks, by index, that share pages [begin, end) of their tables, all of them before their queries."""

    chunks: Ints
    begin: int
    end: int


def shared_pages(
    chunks: Sequence[ChunkPages], page_size: int, tile_tokens: int, align: int = 1
) -> tuple[list[SharedPages], Ints]:
    """Shared prefixes that are worth a separate pass, and the number of each chunk's pages that they cover.

    Args:
        chunks: of a step.
        page_size: S.
        tile_tokens: most tokens of a tile; chunks of more than half as many fill tiles well enough alone.
        align: multiple of the number of pages of a prefix.

    Returns:
        shared: prefixes of at least two chunks; those of one chunk are adjacent, from page 0 on.
        covered: [C] int64 pages.
    """
    covered = np.zeros(len(chunks), np.int64)
    pasts = [(chunk.kv_len - chunk.q_len) // page_size for chunk in chunks]
    may = [2 * c.q_len <= tile_tokens and p * page_size >= LEAST_KEYS for c, p in zip(chunks, pasts, strict=True)]
    if sum(may) < 2:
        return [], covered
    tokens = np.array([chunk.q_len for chunk in chunks], np.int64)
    past = np.array(pasts, np.int64)
    chosen = np.flatnonzero(may)
    tables = np.full((len(chunks), int(past[chosen].max())), -1, np.int64)
    for index in chosen.tolist():
        tables[index, : past[index]] = chunks[index].pages[: past[index]]
    shared: list[SharedPages] = []
    # (chunks, pages in common, pages done), depth first through the tree of the tables.
    stack = [(chosen, 0, 0)]
    while stack:
        members, page, done = stack.pop()
        for run in _by_page(members, tables[members, page]):
            least = int(past[run].min())
            differing = np.flatnonzero((tables[run, page:least] != tables[run[0], page:least]).any(0))
            common = page + int(differing[0]) if len(differing) else least
            reached, end = done, common // align * align
            if _worth(tokens[run], (end - done) * page_size, tile_tokens):
                shared.append(SharedPages(run, done, end))
                covered[run] = reached = end
            longer = run[past[run] > common]
            if len(longer) > 1:
                stack.append((longer, common, reached))
    return shared, covered


def _by_page(members: Ints, pages: Ints) -> list[Ints]:
    """Runs of at least two members with the same page."""
    order = np.argsort(pages, kind="stable")
    edges = np.flatnonzero(np.diff(pages[order])) + 1
    return [run for run in np.split(members[order], edges) if len(run) > 1]


def _worth(tokens: Ints, keys: int, tile_tokens: int) -> bool:
    """Whether tiles of all tokens together are at most half as many as tiles of each chunk."""
    return keys >= LEAST_KEYS and 2 * -(-int(tokens.sum()) // tile_tokens) <= len(tokens)


Words = npt.NDArray[np.int32]
"""int32 array in the form that kernels read."""
Chosen = npt.NDArray[np.bool_] | Ints
"""Selection of items: flags, or indexes."""


@dataclass(frozen=True, slots=True)
class ItemShape:
    """Sizes that items are planned for."""

    page_size: int
    window: int | None
    """A token sees itself and the `window - 1` positions before it; None: all."""
    queries: int
    """Most tokens of an item."""
    shared_queries: int
    """Chunks of at most half as many tokens share items over pages that they have in common."""
    align: int
    """Shared items begin and end at multiples of this many positions, a multiple of the page size."""


@dataclass(slots=True)
class Items:
    """Work items, as columns [n]."""

    rows_at: Ints
    """The item's tokens are `rows[rows_at : rows_at + count]` of its planner."""
    count: Ints
    """Number of tokens, at least one."""
    page_at: Ints
    """Index of the item's page table in its planner's `pages`."""
    base: Ints
    """Position of the table's first slot; keys are relative to it."""
    first: Ints
    """Keys [first, end) are read: those that any of the tokens sees."""
    end: Ints
    columns: Ints
    """[6, n] int64: the array whose rows are the columns, in this order."""

    @staticmethod
    def over(columns: Ints) -> Items:
        """Items whose columns are the rows of an array [6, n]."""
        rows_at, count, page_at, base, first, end = columns
        return Items(rows_at, count, page_at, base, first, end, columns)

    @staticmethod
    def of(count: int, *columns: Ints | int) -> Items:
        """`count` items; an integer in place of a column applies to all."""
        table = np.empty((6, count), np.int64)
        for index, column in enumerate(columns):
            table[index] = column
        return Items.over(table)

    @staticmethod
    def join(items: list[Items]) -> Items:
        """Concatenate items, in order."""
        if len(items) == 1:
            return items[0]
        return Items.over(np.concatenate([i.columns for i in items], 1) if items else np.empty((6, 0), np.int64))

    def __len__(self) -> int:
        """Number of items."""
        return len(self.count)

    def take(self, chosen: Chosen) -> Items:
        """The selected items."""
        return Items.over(self.columns[:, chosen])


class ItemPlanner:
    """Collects the items of a step, by kind."""

    def __init__(self, batch: AttentionBatch, shape: ItemShape, tokens: int) -> None:
        """`tokens`: T; tokens past the batch's own are in no item."""
        self._batch = batch
        self._shape = shape
        self._chunks = [chunk for chunk in batch.chunks if chunk.q_len > 0]
        self.tokens = tokens
        self.positions = token_positions(batch, tokens)
        """[T] absolute position of each token"""
        self.shared: list[Items] = []
        """Items whose tokens all come after their keys: of a group, or of chunks that share pages. With a window, the
        tokens are ordered by position."""
        self.chunks: list[Items] = []
        """Items of consecutive tokens of a chunk"""
        self.decodes: list[Items] = []
        """Items of single tokens"""
        self._sets: list[Ints] = []
        self._rows_end = tokens
        self._pages: list[Ints] = []
        self._pages_end = 0

    def add_groups(self) -> None:
        """Add items of the prefix groups' rows."""
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
        """Add items of the prefill chunks, each over its pages from position 0 on."""
        if not self._chunks:
            return
        size = self._shape.page_size
        sizes = [(c.q_start, c.q_len, c.kv_len, len(c.pages)) for c in self._chunks]
        q_start, q_len, kv_len, tables = np.array(sizes).T
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
        """Add an item per decode row, over its own pages."""
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
        """Tokens that items refer to: the step's in order, then those of items in `shared`."""
        own = np.arange(self.tokens, dtype=np.int32)
        return np.concatenate([own, *self._sets], dtype=np.int32, casting="unsafe") if self._sets else own

    def pages(self) -> Words:
        """All page tables, concatenated."""
        if not self._pages:
            return np.empty(0, np.int32)
        return np.concatenate(self._pages, dtype=np.int32, casting="unsafe")

    def _share(self, shared: list[SharedPages], q_start: Ints, q_len: Ints, page_at: Ints) -> None:
        """Add items of the tokens of many chunks over pages that all of them begin with."""
        tokens = [spans(q_start[s.chunks], q_len[s.chunks]) for s in shared]
        leaders = page_at[[int(s.chunks[0]) for s in shared]]
        begin = np.array([s.begin for s in shared]) * self._shape.page_size
        end = np.array([s.end for s in shared]) * self._shape.page_size
        sizes = np.array([len(t) for t in tokens])
        self._add_shared(np.concatenate(tokens), sizes, leaders, np.zeros_like(begin), begin, end)

    def _add_shared(self, tokens: Ints, sizes: Ints, page_at: Ints, base: Ints, begin: Ints, end: Ints) -> None:
        """Add items of sets of tokens over keys [begin, end) that precede all tokens of a set."""
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
        """Tokens whose window reaches their set's keys, by position, and the number of them in each set."""
        of = np.repeat(np.arange(len(sizes)), sizes)
        positions = self.positions[tokens]
        seen = positions - window + 1 < ends[of]
        order = np.lexsort((positions[seen], of[seen]))
        return tokens[seen][order], np.bincount(of[seen], minlength=len(sizes))

    def _add_pages(self, pages: list[Ints], lengths: Ints) -> Ints:
        """Append page tables; returns the index of each."""
        ends: Ints = np.cumsum(lengths)
        at: Ints = ends - lengths + self._pages_end
        self._pages += pages
        self._pages_end += int(ends[-1])
        return at


def token_positions(batch: AttentionBatch, tokens: int) -> Ints:
    """[T] int64: absolute position of each flat token, the chunks' adjacent; 0 for tokens not in the batch."""
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
    """Of concatenated sets of `counts` members: each member's set, and its index within it."""
    of = np.repeat(np.arange(len(counts)), counts)
    number: Ints = np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
    return of, number


def spans(at: Ints, counts: Ints) -> Ints:
    """The ranges [at, at + count), concatenated."""
    ends = np.cumsum(counts)
    numbers: Ints = np.repeat(at - ends + counts, counts)
    numbers += np.arange(len(numbers))
    return numbers


def _pieces(sizes: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Split sets of `sizes` into pieces of up to `most`: each piece's set, offset in the set, and size."""
    of, begin = numbered(-(-sizes // most))
    begin *= most
    return of, begin, np.minimum(sizes[of] - begin, most)
