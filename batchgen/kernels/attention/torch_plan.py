"""Plan of `torch_attention`: which queries meet which keys in a step, as padded matrix products of similar size.

An `Item` is a set of queries that attend to one run of consecutive positions: a prefill chunk to its own keys, a
decode row to its own pages, all rows of a prefix group (or all chunks that begin with the same pages) to the shared
pages. Every query is in exactly one own item and in any number of shared ones, whose results are merged by
log-sum-exp. Items of similar size are padded into one batched product; long ones are split into tiles of queries.

A padding key repeats the item's first key, masked, so that unused pool slots, which may hold not-a-numbers, are never
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchgen.kernels.types import AttentionBatch, ChunkPages, Ints

__all__ = ["MASKED", "AttentionPlan", "Block", "HeadShape", "Tile", "plan_attention"]

MASKED = -1e30
"""Bias of masked scores: exp of it is exactly 0 next to any real score, and a fully masked part stays finite."""

_SEGMENT = 8192
"""Most positions of a part that all its queries see; longer parts are split and merged."""
_TILE_SCORES = 1 << 19
"""Scores computed at once (2 MiB in float32), unless one query row alone has more."""
_TILE_QUERIES = 128
"""Queries of one chunk scored at once: fewer waste less above the diagonal, more make faster products."""
_GATHER_BYTES = 8 << 20
"""Bytes of keys (or values) gathered from the pool at once, unless one item needs more."""

# Cost model in nanoseconds on one core; only the ratios matter.
_NS_PER_SCORE = 1.3
_NS_PER_GATHERED = 0.07
_NS_PER_BLOCK = 60_000.0
_SIZE_CLASSES = 32


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads and head sizes of a plan's layers."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of a block that are scored together: M per item, against keys [first_key, keys) of the block."""

    tokens: slice | Tensor
    """Flat tokens [B * M]; a slice if they are consecutive."""
    first_key: int
    keys: int
    bias: Tensor | None
    """[B, 1, M, 1, keys - bias_from] float32: 0 where visible, else `MASKED`. None: all visible."""
    bias_from: int
    valid: Tensor | None
    """[c, K] int64, rows of the result [B * K * M] that belong to `targets`; None: no padding."""
    targets: slice | Tensor
    """Flat tokens [c] of the result."""
    merge: bool
    """Whether other parts of these tokens exist, so that the log-sum-exp is needed."""


@dataclass(frozen=True, slots=True)
class Block:
    """B items, padded to n keys each, gathered once for all tiles."""

    items: int
    keys: int
    head_rows: Tensor
    """[B * K * n] int32 (int64 if needed): rows of the pool viewed as [P * S * K, D], in the order item, head, key."""
    tiles: list[Tile]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All products of a step: `own` covers every token once, `shared` is merged into it, in order."""

    own: list[Block]
    shared: list[Block]


@dataclass(frozen=True, slots=True)
class _Item:
    """Queries at absolute `positions` that attend to `slots`, which hold positions from `start` on. Causal."""

    tokens: Ints
    positions: Ints
    slots: Ints
    start: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A prefill chunk with its pages as a list."""

    source: ChunkPages
    pages: list[int]

    @property
    def first(self) -> int:
        return self.source.kv_len - self.source.q_len

    def past_pages(self, page_size: int) -> int:
        return self.first // page_size


def plan_attention(batch: AttentionBatch, page_size: int, shape: HeadShape, window: int | None) -> AttentionPlan:
    """Plan one step's attention for layers of `shape` that see `window` positions (None: all).

    The plan's tensors are on the batch's device.
    """
    planner = _Planner(batch, page_size, shape, window)
    planner.add_chunks()
    planner.add_decodes()
    return planner.build()


class _Planner:
    def __init__(self, batch: AttentionBatch, page_size: int, shape: HeadShape, window: int | None) -> None:
        self._batch = batch
        self._size = page_size
        self._shape = shape
        self._window = window
        self._device = batch.device
        self._own: list[_Item] = []
        self._shared: list[_Item] = []

    def add_chunks(self) -> None:
        """Add one own item per chunk; pages that several chunks begin with become shared items."""
        chunks = [_Chunk(c, c.pages.tolist()) for c in self._batch.chunks if c.q_len > 0]
        chunks.sort(key=lambda c: c.pages)
        # (chunks, pages done, pages in common): depth first through the tree of the chunks' page tables.
        stack = [(chunks, 0, 0)] if chunks else []
        while stack:
            run, done, common = stack.pop()
            if len(run) == 1:
                self._add_own_chunk(run[0], done)
                continue
            past = min(c.past_pages(self._size) for c in run)
            common = max(common, min(past, _common_prefix(run[0].pages, run[-1].pages)))
            if self._worth_sharing(len(run), common - done):
                slots = self._slots(run[0].pages, done, common)
                self._add_shared(_tokens_of(run), _positions_of(run), slots, done)
                done = common
            stack.extend((part, done, common) for part in _split_runs(run, common, self._size))

    def _worth_sharing(self, users: int, pages: int) -> bool:
        """Whether gathering the pages once instead of per user saves more than two products and a merge cost."""
        saved = (users - 1) * pages * self._size * self._gather_ns()
        return saved > 2 * _NS_PER_BLOCK

    def _add_own_chunk(self, chunk: _Chunk, page: int) -> None:
        source = chunk.source
        tokens = np.arange(source.q_start, source.q_start + source.q_len)
        positions = np.arange(chunk.first, source.kv_len)
        slots = self._slots(chunk.pages, page, len(chunk.pages))[: source.kv_len - page * self._size]
        self._add_own(tokens, positions, slots, page * self._size)

    def add_decodes(self) -> None:
        """Add one own item per decode row and one shared item per group."""
        batch = self._batch
        if batch.decode_pages is None or batch.decode_lens is None or batch.decode_own_start is None:
            return
        pages, lens, starts = batch.decode_pages, batch.decode_lens, batch.decode_own_start
        positions = starts + lens - 1
        tokens = batch.decode_start + np.arange(len(lens))
        slots = (pages[:, :, None] * self._size + np.arange(self._size)).reshape(len(lens), -1)
        for row, (length, start) in enumerate(zip(lens.tolist(), starts.tolist(), strict=True)):
            one = slice(row, row + 1)
            self._add_own(tokens[one], positions[one], slots[row, :length], start)
        for group in batch.groups:
            slots = self._slots(group.pages, 0, len(group.pages))
            tokens = batch.decode_start + group.rows
            self._add_shared(tokens, positions[group.rows], slots, group.start // self._size)

    def _slots(self, pages: Sequence[int] | Ints, begin: int, end: int) -> Ints:
        table = np.asarray(pages[begin:end], dtype=np.int64)
        return (table[:, None] * self._size + np.arange(self._size)).reshape(-1)

    def _add_own(self, tokens: Ints, positions: Ints, slots: Ints, start: int) -> None:
        """Trim keys that no query sees; split long runs that every query sees off into shared items."""
        slots, start = self._trim(int(positions[0]), slots, start)
        while int(positions[0]) - start > _SEGMENT:
            self._shared.append(_Item(tokens, positions, slots[:_SEGMENT], start))
            slots, start = slots[_SEGMENT:], start + _SEGMENT
        self._own.append(_Item(tokens, positions, slots, start))

    def _add_shared(self, tokens: Ints, positions: Ints, slots: Ints, page: int) -> None:
        start = page * self._size
        if self._window is not None:
            seen = positions - self._window + 1 < start + len(slots)
            tokens, positions = tokens[seen], positions[seen]
        if not len(tokens) or not len(slots):
            return
        slots, start = self._trim(int(positions.min()), slots, start)
        for begin in range(0, len(slots), _SEGMENT):
            self._shared.append(_Item(tokens, positions, slots[begin : begin + _SEGMENT], start + begin))

    def _trim(self, first_position: int, slots: Ints, start: int) -> tuple[Ints, int]:
        if self._window is None:
            return slots, start
        skip = max(0, first_position - self._window + 1 - start)
        return slots[skip:], start + skip

    def build(self) -> AttentionPlan:
        """Batch the items. Shared items of one query get different levels, so that no product contains it twice."""
        parts = np.zeros(self._batch.slot_mapping.shape[0], dtype=np.int64)
        levels: list[list[_Item]] = []
        for item in self._shared:
            level = int(parts[item.tokens].max())
            parts[item.tokens] = level + 1
            if level == len(levels):
                levels.append([])
            levels[level].append(item)
        shared = [block for level in levels for block in self._blocks(level, parts)]
        return AttentionPlan(self._blocks(self._own, parts), shared)

    def _blocks(self, items: list[_Item], parts: Ints) -> list[Block]:
        blocks = []
        for bucket in self._buckets(items):
            keys = max(len(i.slots) for i in bucket)
            queries = max(len(i.tokens) for i in bucket)
            key_bytes = keys * self._shape.kv_heads * max(self._shape.key_dim, self._shape.value_dim) * 4
            scores = self._shape.heads * min(queries, _TILE_QUERIES) * keys
            step = max(1, min(_GATHER_BYTES // key_bytes, _TILE_SCORES // scores))
            # Even shares: splitting 65 items into 64 and 1 would leave a product of one.
            shares = -(-len(bucket) // step)
            for part in np.array_split(np.arange(len(bucket)), shares):
                blocks.append(self._block([bucket[i] for i in part], parts))
        return blocks

    def _buckets(self, items: list[_Item]) -> Iterable[list[_Item]]:
        """Partition items so that padding and the number of products cost least together."""
        if not items:
            return []
        order = sorted(range(len(items)), key=lambda i: (len(items[i].slots), len(items[i].tokens)))
        queries = np.array([len(items[i].tokens) for i in order])
        keys = np.array([len(items[i].slots) for i in order])
        cuts = _cheapest_cuts(queries, keys, self._shape.heads * _NS_PER_SCORE, self._gather_ns())
        return [[items[i] for i in sorted(order[a:b])] for a, b in pairwise(cuts)]

    def _gather_ns(self) -> float:
        return self._shape.kv_heads * (self._shape.key_dim + self._shape.value_dim) * _NS_PER_GATHERED

    def _block(self, items: list[_Item], parts: Ints) -> Block:
        keys = max(len(i.slots) for i in items)
        slots = np.empty((len(items), keys), np.int64)  # [B, n]
        for row, item in zip(slots, items, strict=True):
            row[: len(item.slots)] = item.slots
            row[len(item.slots) :] = item.slots[0]
        heads = np.arange(self._shape.kv_heads)
        rows = slots[:, None, :] * self._shape.kv_heads + heads[:, None]  # [B, K, n]
        if rows.max() < 1 << 31:
            rows = rows.astype(np.int32)
        tiles = [self._tile(items, a, b, parts) for a, b in self._query_ranges(items, keys)]
        return Block(len(items), keys, self._tensor(rows.reshape(-1)), tiles)

    def _query_ranges(self, items: list[_Item], keys: int) -> list[tuple[int, int]]:
        longest = max(len(i.tokens) for i in items)
        room = max(1, _TILE_SCORES // (self._shape.heads * keys * len(items)))
        causal = any(int(i.positions[-1]) < i.start + len(i.slots) for i in items)
        step = min(room, _TILE_QUERIES) if causal else room
        shares = -(-longest // step)
        edges = [longest * s // shares for s in range(shares + 1)]
        return list(pairwise(edges))

    def _tile(self, items: list[_Item], begin: int, end: int, parts: Ints) -> Tile:
        """Queries [begin, end) of every item; shorter items repeat their last query."""
        count = end - begin
        queries = np.array([len(i.tokens) for i in items])
        real = np.arange(begin, end) < queries[:, None]
        if real.all():
            tokens = np.concatenate([i.tokens[begin:end] for i in items]).reshape(-1, count)  # [B, M]
            positions = np.concatenate([i.positions[begin:end] for i in items]).reshape(-1, count)
        else:
            picks = np.minimum(np.arange(begin, end), queries[:, None] - 1)
            tokens = np.stack([i.tokens[p] for i, p in zip(items, picks, strict=True)])
            positions = np.stack([i.positions[p] for i, p in zip(items, picks, strict=True)])
        starts = np.array([i.start for i in items])
        lengths = np.array([len(i.slots) for i in items])
        keys = int(min(lengths.max(), (positions.max(axis=1) + 1 - starts).max()))
        positions = positions - starts[:, None]
        begin_key = 0 if self._window is None else max(0, int(positions.min()) - self._window + 1)
        bias, bias_from = self._bias(positions, lengths, begin_key, keys)
        targets = tokens[real]
        valid = None
        if not real.all():
            item, query = np.nonzero(real)
            kv_heads = self._shape.kv_heads
            valid = self._tensor((item[:, None] * kv_heads + np.arange(kv_heads)) * count + query[:, None])
        merge = bool(parts[targets].any())
        return Tile(self._flat(tokens.reshape(-1)), begin_key, keys, bias, bias_from, valid, self._flat(targets), merge)

    def _bias(self, positions: Ints, lengths: Ints, begin: int, keys: int) -> tuple[Tensor | None, int]:
        """Mask of keys past a query, past an item's end or before the window, from the first column that needs it.

        `positions` [B, M] are relative to each item's first key.
        """
        last = np.minimum(positions, lengths[:, None] - 1)  # last visible key, [B, M]
        first = int(last.min()) + 1
        windowed = self._window is not None and int(positions.max()) - self._window >= begin
        if windowed:
            first = begin
        if first >= keys:
            return None, keys
        columns = np.arange(first, keys)
        visible = columns <= last[:, :, None]  # [B, M, columns]
        if windowed:
            assert self._window is not None
            visible &= columns > (positions - self._window)[:, :, None]
        bias = np.where(visible, np.float32(0.0), np.float32(MASKED))
        return self._tensor(bias[:, None, :, None, :]), first

    def _flat(self, tokens: Ints) -> slice | Tensor:
        """A slice if the tokens are consecutive, as views cost nothing; else a tensor."""
        first = int(tokens[0])
        if np.array_equal(tokens, np.arange(first, first + len(tokens))):
            return slice(first, first + len(tokens))
        return self._tensor(tokens)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return self._device.upload(np.ascontiguousarray(array))[0]


def _tokens_of(chunks: list[_Chunk]) -> Ints:
    return np.concatenate([np.arange(c.source.q_start, c.source.q_start + c.source.q_len) for c in chunks])


def _positions_of(chunks: list[_Chunk]) -> Ints:
    return np.concatenate([np.arange(c.first, c.source.kv_len) for c in chunks])


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common prefix of two lists; the first and last of sorted lists give that of all."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _split_runs(chunks: list[_Chunk], page: int, page_size: int) -> list[list[_Chunk]]:
    """Sorted chunks grouped by their page at index `page`; chunks without a past page there are alone."""
    runs = [[c] for c in chunks if c.past_pages(page_size) <= page]
    longer = [c for c in chunks if c.past_pages(page_size) > page]
    runs += [list(run) for _, run in groupby(longer, key=lambda c: c.pages[page])]
    return runs


def _cheapest_cuts(queries: Ints, keys: Ints, score_ns: float, gather_ns: float) -> list[int]:
    """Cut points of the best partition of items, sorted by keys, into padded batches (dynamic programming).

    A batch of items a..b-1 costs (b - a) * max(keys) * (max(queries) * score_ns + gather_ns) plus a constant.
    """
    count = len(keys)
    edges = sorted({count * c // _SIZE_CLASSES for c in range(_SIZE_CLASSES + 1)})
    class_queries = [int(queries[a:b].max()) for a, b in pairwise(edges)]
    best = [0.0] + [np.inf] * (len(edges) - 1)
    back = [0] * len(edges)
    for j in range(1, len(edges)):
        most_keys = int(keys[edges[j] - 1])
        most_queries = 0
        for i in range(j - 1, -1, -1):
            most_queries = max(most_queries, class_queries[i])
            padded = (edges[j] - edges[i]) * most_keys
            cost = best[i] + padded * (most_queries * score_ns + gather_ns) + _NS_PER_BLOCK
            if cost < best[j]:
                best[j], back[j] = cost, i
    cuts = [len(edges) - 1]
    while cuts[-1] > 0:
        cuts.append(back[cuts[-1]])
    return [edges[c] for c in reversed(cuts)]
