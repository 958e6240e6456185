"""One step's attention as a flat list of work items for the compiled kernels, arranged in numpy.

The items are those of `kernels.work_items`. One that is more than threads could share evenly is listed once for each
key head, and a long run of positions is cut into several.

Of a batch-invariant list, runs that tokens share begin and end at multiples of a block of positions
(`kernels.cpu.aligned`), and those that are not the first of all their tokens are cut there, for the kernels join block
after block: which others stand in an item beside a token then makes no difference to its sums.

A token that is in one item alone is written straight to the output. The items of every other token leave *parts*, which
are merged in this order: groups as the step lists them (those that begin first come first), pages shared by chunks, the
token's own; within each from the lowest position on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Final

import numpy as np
import numpy.typing as npt

from batchgen.kernels.cpu.aligned import aligned
from batchgen.kernels.types import AttentionBatch, Ints
from batchgen.kernels.work_items import ItemPlanner, Items, ItemShape, Words, numbered, spans

__all__ = ["FIELDS", "ListPlanner", "ListShape", "WorkList"]

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
_MOST_SHARES: Final = 8
"""Shares that items come in: one for each thread, up to so many, `Claims::MOST_SHARES` of claims.h."""
_KEY_COST: Final = 8
"""What reading a position costs, in query rows that see it."""

Flags = npt.NDArray[np.bool_]

_NONE: Final[Words] = np.empty(0, np.int32)
_NONE_COMMON: Final[Ints] = np.empty(0, np.int64)
_NO_MERGES: Final[Words] = np.empty((0, 3), np.int32)


@dataclass(frozen=True, slots=True)
class ListShape:
    """What a list is made for."""

    page_size: int
    window: int | None
    kv_heads: int
    group: int
    """Query heads that share a key head."""
    threads: int
    block: int | None = None
    """Positions of a block of a batch-invariant list; None: of another."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """A step's items, and what is counted of them."""

    items: Words
    """[n, FIELDS] by shares, in each costliest first; an item whose key heads are shared out stands there once for each
    of them."""
    shares: Words
    """[S + 1] where each share of `items` begins. A thread does its own first, and then what is left of the others'."""
    tokens: Words
    positions: Words
    """[T] absolute position of each token."""
    pages: Words
    common_pages: Ints
    """Indexes of `pages` of which items of a prefix group, or of chunks that share pages, read all positions."""
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


class ListPlanner:
    """Makes the lists of a step's layers of one shape: what they have in common is arranged once."""

    def __init__(self, batch: AttentionBatch, shape: ListShape) -> None:
        """The batch's slots are not looked at."""
        rows = 0 if batch.decode_lens is None else len(batch.decode_lens)
        queries, shared = max(1, _ROWS // shape.group), max(1, _SHARED_ROWS // shape.group)
        align = shape.page_size
        if shape.block is not None:
            align = lcm(shape.block, shape.page_size)
            batch = aligned(batch, shape.page_size, align)
        items = ItemShape(shape.page_size, shape.window, queries, shared, align)
        self._shape = shape
        self._planner = planner = ItemPlanner(batch, items, batch.decode_start + rows)
        planner.add_groups()
        planner.add_chunks()
        planner.add_decodes()
        self._whole = Items.join([*planner.shared, *planner.chunks, *planner.decodes])
        self._positions = planner.positions.astype(np.int32)
        self._pages = planner.pages()
        self._common_pages = _common_pages(planner, shape.page_size)

    def work(self, wanted: Ints | None = None) -> WorkList:
        """The work of all tokens, or of those `wanted` [W] alone: cut, its parts numbered, sorted."""
        planner, shape, whole = self._planner, self._shape, self._whole
        rows = planner.rows()
        if wanted is not None:
            whole, rows = _only(whole, rows, _flags(wanted, planner.tokens))
        if shape.block is not None and planner.shared:
            whole = _cut_at_blocks(whole, _leading(rows, whole, planner.tokens), shape.block)
        items, lengths, costs, by_head = _cut(whole, shape)
        num_shares = min(shape.threads, _MOST_SHARES)
        several = planner.shared or items is not whole
        part_at, parts, merges = _parts(rows, items, planner.tokens) if several else (-1, _NONE, _NO_MERGES)
        table = np.empty((len(items), FIELDS), np.int32)
        table[:, :-2] = items.columns.T
        table[:, -2] = part_at
        table[:, -1] = -1
        if by_head is not None:
            heads = np.where(by_head, shape.kv_heads, 1)
            of, head = numbered(heads)
            costs, table = (costs // heads)[of], table[of]
            table[:, -1] = np.where(by_head[of], head, -1)
        share = _shares(rows[table[:, 0]], rows[table[:, 0] + table[:, 1] - 1], costs, planner.tokens, num_shares)
        return WorkList(
            items=table[np.lexsort((-costs, share))],
            shares=np.cumsum(np.bincount(share + 1, minlength=num_shares + 1), dtype=np.int32),
            tokens=rows,
            positions=self._positions,
            pages=self._pages,
            common_pages=self._common_pages,
            parts=parts,
            merges=merges,
            num_items=len(items),
            keys_read=int(lengths.sum()),
            padded_rows=_padded_rows(planner, items, shape.group),
        )


def _shares(first: Words, last: Words, costs: Ints, num_tokens: int, shares: int) -> Ints:
    """[n] the share of each item.

    A share has tokens that stand side by side, as its thread's part of other operations: what a core has written is
    near it, and may be far from another. Items whose tokens are in several parts are dealt like cards, costliest first.

    Args:
        first: [n] each item's first token.
        last: [n] and its last.
        costs: [n] of each item.
        num_tokens: T.
        shares: S.
    """
    share = np.empty(len(costs), np.int64)
    spanning = first * shares // num_tokens != last * shares // num_tokens
    inside = np.flatnonzero(~spanning)
    inside = inside[np.argsort(first[inside], kind="stable")]
    ends = np.cumsum(costs[inside])
    share[inside] = (2 * ends - costs[inside]) * shares // (2 * ends[-1] + 1) if len(ends) else 0
    dealt = np.flatnonzero(spanning)
    turn = np.arange(len(dealt)) % (2 * shares)
    share[dealt[np.argsort(-costs[dealt], kind="stable")]] = np.minimum(turn, 2 * shares - 1 - turn)
    return share


def _flags(tokens: Ints, count: int) -> Flags:
    """[count] which of so many tokens are among `tokens`."""
    flags = np.zeros(count, np.bool_)
    flags[np.asarray(tokens, np.int64)] = True
    return flags


def _common_pages(planner: ItemPlanner, page_size: int) -> Ints:
    """See `WorkList`."""
    if not planner.shared:
        return _NONE_COMMON
    items = Items.join(planner.shared)
    first = -(-items.first // page_size)
    return spans(items.page_at + first, np.maximum(items.end // page_size - first, 0))


def _only(items: Items, rows: Words, wanted: Flags) -> tuple[Items, Words]:
    """The items of wanted tokens, and their tokens."""
    of = np.repeat(np.arange(len(items)), items.count)
    tokens = rows[spans(items.rows_at, items.count)]
    chosen = wanted[tokens]
    counts = np.bincount(of[chosen], minlength=len(items))
    left = items.take(counts > 0)
    left.count[:] = counts[counts > 0]
    left.rows_at[:] = np.cumsum(left.count) - left.count
    return left, tokens[chosen]


def _padded_rows(planner: ItemPlanner, items: Items, group: int) -> int:
    """See `WorkList`."""
    if group <= FEW and not planner.shared and not planner.chunks:
        return 0  # single tokens
    query_rows = items.count * group
    return int((-query_rows % TILE)[query_rows > FEW].sum())


def _cut(items: Items, shape: ListShape) -> tuple[Items, Ints, Ints, Flags | None]:
    """Runs of keys too long for one item, as several of even length.

    Returns:
        The items, how long each one's run is and what it costs, and which are shared out by key head (None: no one).
    """
    lengths = items.end - items.first
    rows = items.count * shape.group + _KEY_COST
    costs = lengths * rows
    share = int(costs.sum()) // (_PER_THREAD * shape.threads)
    by_head: Flags | None = None
    if shape.threads > 1 and shape.kv_heads > 1:
        dear: Flags = costs > share
        by_head = dear if dear.any() else None
    if shape.block is not None or not (lengths > (_LEAST_KEYS if shape.threads > 1 else _MOST_KEYS)).any():
        return items, lengths, costs, by_head
    most: Ints | int = _MOST_KEYS
    if shape.threads > 1:
        heads = 1 if by_head is None else np.where(by_head, shape.kv_heads, 1)
        most = np.clip(share * heads // rows, _LEAST_KEYS, _MOST_KEYS)
    counts = -(-lengths // most)
    of, number = numbered(counts)
    length = (-(-lengths // (counts * _STEP)) * _STEP)[of]
    begin = items.first[of] + number * length
    end = np.minimum(items.end[of], begin + length)
    some = end > begin
    of, begin, end = of[some], begin[some], end[some]
    cut = items.take(of)
    cut.first[:], cut.end[:] = begin, end
    lengths = end - begin
    return cut, lengths, lengths * rows[of], None if by_head is None else by_head[of]


def _leading(rows: Words, items: Items, num_tokens: int) -> Flags:
    """Which items no other one stands before, whichever of their tokens is asked."""
    of = np.repeat(np.arange(len(items)), items.count)
    tokens = rows[spans(items.rows_at, items.count)]
    first = np.empty(num_tokens, np.int64)
    first[tokens[::-1]] = of[::-1]
    leading: Flags = np.ones(len(items), np.bool_)
    leading[of[first[tokens] != of]] = False
    return leading


def _cut_at_blocks(items: Items, leading: Flags, block: int) -> Items:
    """All but leading items as several, each within a block."""
    low = items.first // block
    of, number = numbered(np.where(leading, 1, -(-items.end // block) - low))
    cut = items.take(of)
    begin, follows = (low[of] + number) * block, ~leading[of]
    cut.first[follows] = np.maximum(cut.first, begin)[follows]
    cut.end[follows] = np.minimum(cut.end, begin + block)[follows]
    return cut


def _parts(rows: Words, items: Items, num_tokens: int) -> tuple[Ints, Words, Words]:
    """Per item where its tokens' parts begin, or -1; the parts by token; the merges."""
    none = np.full(len(items), -1)
    of = np.repeat(np.arange(len(items)), items.count)
    tokens = rows[spans(items.rows_at, items.count)]
    several = np.bincount(tokens, minlength=num_tokens) > 1
    if not several.any():
        return none, _NONE, _NO_MERGES
    partial = np.bincount(of[several[tokens]], minlength=len(none)) > 0
    kept = np.where(partial, items.count, 0)
    part_at = np.where(partial, np.cumsum(kept) - kept, -1)
    tokens = tokens[partial[of]]
    counts = np.bincount(tokens, minlength=num_tokens)
    found = np.flatnonzero(counts)
    counts = counts[found]
    merges = np.empty((len(found), 3), np.int32)
    merges[:, 0], merges[:, 1], merges[:, 2] = found, np.cumsum(counts) - counts, counts
    return part_at, np.argsort(tokens, kind="stable").astype(np.int32), merges
