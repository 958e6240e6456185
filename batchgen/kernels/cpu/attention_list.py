"""Flat list of attention work items for the compiled kernels: one step's attention, planned in numpy.

The items are those of `kernels.attention.work_items`. An item too large to be shared evenly by the threads is listed
once for each key head, and a long run of positions is cut into several items.

In a deterministic list, runs that tokens share begin and end at multiples of a block of positions (`aligned`). Items
that are not the first of all their tokens are cut there, because the kernels merge block after block: a token's sums
then do not depend on which other tokens are in its items.

A token that is in one item only is written directly to the output. The items of other tokens leave *parts*, which are
merged in this order: prefix groups as the step lists them (those that begin first come first), pages shared by chunks,
the token's own positions; within each of these by rising position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Final

import numpy as np
import numpy.typing as npt

from batchgen.kernels.attention.work_items import ItemPlanner, Items, ItemShape, Words, numbered, spans
from batchgen.kernels.types import AttentionBatch, GroupPages, Ints

FIELDS: Final = 8
"""Number of int32 fields of an item, in the order of `ItemField` of attention.h."""

FEW: Final = 6
"""Most query rows of one key head for which the kernel reads keys row by row; more rows are computed as tiles."""
TILE: Final = 8
"""Query rows of a tile of the kernel."""

_ROWS: Final = 192
"""Most query rows of an item for one key head, unless one token has more: their sums fit in the cache with a block of
keys."""
_SHARED_ROWS: Final = 64
"""Chunks with at most half this many query rows share a pass over common pages."""
_MOST_KEYS: Final = 8192
"""Most positions of an item."""
_LEAST_KEYS: Final = 512
"""Fewest positions of an item that is cut from a longer run to balance threads."""
_STEP: Final = 64
"""Runs are cut at multiples of this many positions from their beginning."""
_PER_THREAD: Final = 4
"""An item is at most this fraction (1 / n) of a thread's share of the work."""
_MOST_SHARES: Final = 8
"""Most shares of a list, one per thread: `WorkStealingQueue::MOST_SHARES` of work_stealing.h."""
_KEY_COST: Final = 8
"""Cost of reading a position, in units of computing it for one query row."""

Flags = npt.NDArray[np.bool_]

_NONE: Final[Words] = np.empty(0, np.int32)
_NONE_COMMON: Final[Ints] = np.empty(0, np.int64)
_NO_MERGES: Final[Words] = np.empty((0, 3), np.int32)


@dataclass(frozen=True, slots=True)
class ListShape:
    """Parameters of a work list."""

    page_size: int
    window: int | None
    kv_heads: int
    group: int
    """Number of query heads that share a key head."""
    threads: int
    block: int | None = None
    """Positions of a block in a deterministic list; None: the list is not deterministic."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """Work items of a step, and their counts."""

    items: Words
    """[n, FIELDS] ordered by share, within a share by falling cost. An item that is split by key head has one entry per
    key head."""
    shares: Words
    """[S + 1] first item of each share. A thread computes its own share first, then steals from the others."""
    tokens: Words
    """Tokens of the items, one item after the other."""
    positions: Words
    """[T] absolute position of each token."""
    pages: Words
    """Page tables of the items."""
    common_pages: Ints
    """Indexes of `pages` that items of prefix groups, or of chunks that share pages, read as a whole."""
    parts: Words
    """[E] part numbers; the parts of a merge are adjacent."""
    merges: Words
    """[M, 3]: token, index of its first part in `parts`, number of parts."""
    num_items: int
    """Number of items, each counted once even if it is split by key head."""
    keys_read: int
    """Number of positions read, summed over items. Times key heads, head sizes and bytes it is what a layer reads."""
    padded_rows: int
    """Number of empty query rows in the tiles of one key head, in items of more than `FEW` rows."""

    @property
    def num_parts(self) -> int:
        """Number of parts left by all items."""
        return len(self.parts)

    @property
    def num_merges(self) -> int:
        """Number of tokens whose results are merged."""
        return len(self.merges)


class ListPlanner:
    """Planner of the work lists of a step's layers with one `ListShape`; common work is done once."""

    def __init__(self, batch: AttentionBatch, shape: ListShape) -> None:
        """`batch`: its slot mapping is not used."""
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
        """Work list of all tokens, or of the tokens `wanted` [W] only."""
        planner, shape, whole = self._planner, self._shape, self._whole
        rows = planner.rows()
        if wanted is not None:
            whole, rows = _restrict(whole, rows, _flags(wanted, planner.tokens))
        if shape.block is not None and planner.shared:
            whole = _cut_at_blocks(whole, _leading(rows, whole, planner.tokens), shape.block)
        items, lengths, costs, by_head = _split_long(whole, shape)
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
    """[n] share of each item.

    The tokens of a share are adjacent, like a thread's part of other operations: data that a core has written is in its
    own cache. Items whose tokens belong to several shares are distributed round robin, costliest first.

    Args:
        first: [n] first token of each item.
        last: [n] last token of each item.
        costs: [n] cost of each item.
        num_tokens: T, number of tokens.
        shares: S, number of shares.
    """
    share = np.empty(len(costs), np.int64)
    spanning = first * shares // num_tokens != last * shares // num_tokens
    inside = np.flatnonzero(~spanning)
    inside = inside[np.argsort(first[inside], kind="stable")]
    ends = np.cumsum(costs[inside])
    share[inside] = (2 * ends - costs[inside]) * shares // (2 * ends[-1] + 1) if len(ends) else 0
    spread = np.flatnonzero(spanning)
    turn = np.arange(len(spread)) % (2 * shares)
    share[spread[np.argsort(-costs[spread], kind="stable")]] = np.minimum(turn, 2 * shares - 1 - turn)
    return share


def _flags(tokens: Ints, count: int) -> Flags:
    """[count] mask of `tokens`."""
    flags = np.zeros(count, np.bool_)
    flags[np.asarray(tokens, np.int64)] = True
    return flags


def _common_pages(planner: ItemPlanner, page_size: int) -> Ints:
    """`WorkList.common_pages`."""
    if not planner.shared:
        return _NONE_COMMON
    items = Items.join(planner.shared)
    first = -(-items.first // page_size)
    return spans(items.page_at + first, np.maximum(items.end // page_size - first, 0))


def _restrict(items: Items, rows: Words, wanted: Flags) -> tuple[Items, Words]:
    """Items restricted to the wanted tokens, and their tokens."""
    of = np.repeat(np.arange(len(items)), items.count)
    tokens = rows[spans(items.rows_at, items.count)]
    chosen = wanted[tokens]
    counts = np.bincount(of[chosen], minlength=len(items))
    left = items.take(counts > 0)
    left.count[:] = counts[counts > 0]
    left.rows_at[:] = np.cumsum(left.count) - left.count
    return left, tokens[chosen]


def _padded_rows(planner: ItemPlanner, items: Items, group: int) -> int:
    """`WorkList.padded_rows`."""
    if group <= FEW and not planner.shared and not planner.chunks:
        return 0  # single tokens
    query_rows = items.count * group
    return int((-query_rows % TILE)[query_rows > FEW].sum())


def _split_long(items: Items, shape: ListShape) -> tuple[Items, Ints, Ints, Flags | None]:
    """Split runs of keys that are too long for one item into several of even length.

    Returns:
        The items, the length of each one's run, its cost, and which items are split by key head (None: none).
    """
    lengths = items.end - items.first
    rows = items.count * shape.group + _KEY_COST
    costs = lengths * rows
    share = int(costs.sum()) // (_PER_THREAD * shape.threads)
    by_head: Flags | None = None
    if shape.threads > 1 and shape.kv_heads > 1:
        large: Flags = costs > share
        by_head = large if large.any() else None
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
    filled = end > begin
    of, begin, end = of[filled], begin[filled], end[filled]
    cut = items.take(of)
    cut.first[:], cut.end[:] = begin, end
    lengths = end - begin
    return cut, lengths, lengths * rows[of], None if by_head is None else by_head[of]


def _leading(rows: Words, items: Items, num_tokens: int) -> Flags:
    """Mask of the items that are the first item of each of their tokens."""
    of = np.repeat(np.arange(len(items)), items.count)
    tokens = rows[spans(items.rows_at, items.count)]
    first = np.empty(num_tokens, np.int64)
    first[tokens[::-1]] = of[::-1]
    leading: Flags = np.ones(len(items), np.bool_)
    leading[of[first[tokens] != of]] = False
    return leading


def _cut_at_blocks(items: Items, leading: Flags, block: int) -> Items:
    """Cut all but the leading items at block boundaries."""
    low = items.first // block
    of, number = numbered(np.where(leading, 1, -(-items.end // block) - low))
    cut = items.take(of)
    begin, follows = (low[of] + number) * block, ~leading[of]
    cut.first[follows] = np.maximum(cut.first, begin)[follows]
    cut.end[follows] = np.minimum(cut.end, begin + block)[follows]
    return cut


def _parts(rows: Words, items: Items, num_tokens: int) -> tuple[Ints, Words, Words]:
    """First part number of each item, or -1; the parts ordered by token; the merges."""
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
    merged = np.flatnonzero(counts)
    counts = counts[merged]
    merges = np.empty((len(merged), 3), np.int32)
    merges[:, 0], merges[:, 1], merges[:, 2] = merged, np.cumsum(counts) - counts, counts
    return part_at, np.argsort(tokens, kind="stable").astype(np.int32), merges


def aligned(batch: AttentionBatch, page_size: int, align: int) -> AttentionBatch:
    """An equivalent batch whose prefix groups and own pages begin at multiples of `align` positions.

    Where a group would end within a block of positions, the rest of the block goes to each of its rows, or to each
    group behind it. So which positions are attended to together does not depend on where prompts diverge.

    Args:
        batch: its groups cover every position before a row's own pages, except those outside every window.
        page_size: positions per page.
        align: positions of a block, a multiple of `page_size`.
    """
    if not batch.groups:
        return batch
    assert batch.decode_pages is not None
    assert batch.decode_lens is not None
    assert batch.decode_own_start is not None
    step, own = align // page_size, batch.decode_own_start // page_size  # pages
    before = np.zeros((len(own), int(own.max())), np.int64)  # [R, pages] pages of each row's groups
    groups = []
    for group in batch.groups:
        start = group.start // page_size
        before[group.rows, start : start + len(group.pages)] = group.pages
    for group in batch.groups:
        start, end = (x // page_size // step * step for x in (group.start, group.start + len(group.pages) * page_size))
        if end > start:
            groups.append(GroupPages(group.rows, before[group.rows[0], start:end], start * page_size))
    first = own // step * step
    lens = batch.decode_lens + (own - first) * page_size
    return replace(
        batch,
        groups=groups,
        decode_pages=_pages_from(
            first, np.concatenate((before, batch.decode_pages), 1), own, before.shape[1], lens, page_size
        ),
        decode_lens=lens,
        decode_own_start=first * page_size,
        max_decode_len=int(lens.max()),
    )


def _pages_from(first: Ints, tables: Ints, own: Ints, width: int, lens: Ints, page_size: int) -> Ints:
    """[R, W] page tables from page `first` on: columns of `tables` up to page `own`, then from column `width` on."""
    page = first[:, None] + np.arange(-(-int(lens.max()) // page_size))
    column = np.where(page < own[:, None], page, page - own[:, None] + width)
    return np.take_along_axis(tables, np.minimum(column, tables.shape[1] - 1), 1)
