"""Attention over the paged cache in PyTorch: the reference of the other backends, the fallback, and batch-invariant.

Every query meets its keys in blocks of 64 positions that begin at multiples of 64, in order, in float32:

    m' = max(m, max_j s_j)
    l' = exp(m - m') l + sum_j exp(s_j - m')
    o' = exp(m - m') o + sum_j exp(s_j - m') v_j

and out = o / l at the end. Queries that read the same pages form an item, with a row per query and head of a key head.
Products have one of two heights, few rows for decode rows and more for chunks, whatever the step. A key that a query
does not see has weight 0, and a block of such keys changes nothing. So a query's result depends on its own keys only,
bit for bit, if the bits of a product's row depend neither on the number of products in a call nor on their height;
`product_heights` checks both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.pooled import PooledAttention, of_cache
from batchgen.kernels.types import AttentionArgs, AttentionBatch, Ints, KVPool

_BLOCK: Final = 64
"""Positions per block of keys."""
_LOW: Final = 16
"""The height of a product is a multiple of it: the heads of a query that share a key head, of as many as fit."""
_HIGH: Final = 64
"""Height of the products of chunks, unless the heads of one query need more."""
_MASKED: Final = -1e30
"""Score of hidden keys: finite, so that differences of two are not NaN."""
_GATHERED_BYTES: Final = 32 << 20
"""Bytes of float32 keys and values gathered at once, unless one item needs more."""


class ProductHeights(NamedTuple):
    """Rows of a product."""

    low: int
    """For decode rows"""
    high: int
    """For chunks; `low` if the bits of a row differ between the two heights here"""
    invariant: bool
    """Whether the bits of a row do not depend on the number of products in a call"""


@lru_cache(maxsize=256)
def product_heights(group: int, key_dim: int, value_dim: int, threads: int) -> ProductHeights:
    """The heights of products, as checked on this machine's CPU.

    Args:
        group: query heads per key head, all in one product.
        key_dim: D.
        value_dim: Dv.
        threads: number of threads of the products; part of the cache key.
    """
    low = -(-group // _LOW) * _LOW
    high = max(_HIGH, low)
    generator = torch.Generator().manual_seed(group + key_dim)
    keys, values = (torch.randn(1, _BLOCK, size, generator=generator) for size in (key_dim, value_dim))
    queries = torch.randn(low * high, key_dim, generator=generator)
    results = {}
    for height in (low, high):
        for count in (1, 3, 40):
            made = []
            for part in torch.split(queries.view(-1, height, key_dim), count):
                scores = torch.bmm(part, keys.repeat(len(part), 1, 1).transpose(1, 2))
                made.append(torch.bmm(torch.sigmoid(scores.double()).float(), values.repeat(len(part), 1, 1)))
            results[height, count] = torch.cat(made).view(-1, value_dim)
    invariant = all(torch.equal(result, results[height, 1]) for (height, _), result in results.items())
    return ProductHeights(low, high if torch.equal(results[low, 1], results[high, 1]) else low, invariant)


@dataclass(frozen=True, slots=True)
class _Items:
    """I items of at most t queries, those with the most blocks first. Shorter ones repeat their first query."""

    tokens: Tensor
    """[I, t] int64 flat tokens"""
    real: Tensor
    """[I, t] bool: False for repetitions"""
    positions: Tensor
    """[I, t] int64"""
    pages: Tensor
    """[I, p] int64 pages from position 0 on, padded with page 0"""
    blocks: Tensor
    """[I] int64: first block that any of the queries sees"""
    seen: Tensor
    """[I, 2] int64: first and last position that any of the queries sees"""
    counts: Ints
    """Number of blocks of each item"""

    def parts(self, most: int) -> Iterator[_Items]:
        """The items, at most `most` at a time."""
        for at in range(0, len(self.counts), most):
            some = slice(at, at + most)
            tokens, real, positions = self.tokens[some], self.real[some], self.positions[some]
            pages, blocks, seen = self.pages[some], self.blocks[some], self.seen[some]
            yield _Items(tokens, real, positions, pages, blocks, seen, self.counts[some])


class TorchAttention(PooledAttention):
    """Attention of a step, or of consecutive tokens of it, over `pool` (the `PagedAttention` protocol)."""

    def __init__(
        self, pool: KVPool, batch: AttentionBatch, start: int = 0, end: int | None = None, height: int | None = None
    ) -> None:
        """Attend for flat tokens [start, end), by default all, padded to `height` tokens, whose results are zeros."""
        self._pool = pool
        self._batch = batch
        self._start = start
        self._end = len(batch.slot_mapping) if end is None else end
        slots = batch.slot_mapping[self._start : self._end]
        self._slots = slots if height is None else F.pad(slots, (0, height - len(slots)))  # padding: the scratch page
        self._plans: dict[tuple[int, int, int | None], list[tuple[int, _Items]]] = {}

    def tile(self, start: int, end: int, height: int) -> TorchAttention:
        """Attention of a tile of tokens; keys and values of all earlier tokens must be stored in every layer."""
        return TorchAttention(self._pool, self._batch, start, end, height)

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The pool and slots of the tokens' keys and values. See `PagedAttention.cache`."""
        return self._pool.keys[layer], self._pool.values[layer], self._slots

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """Attend over the stored keys and values. See `PagedAttention.attend_stored`."""
        cache = self._pool.keys[layer], self._pool.values[layer]
        tokens, heads, kv_heads = *query.shape[:2], cache[0].shape[2]
        group = heads // kv_heads
        heights = product_heights(group, query.shape[2], cache[1].shape[3], torch.get_num_threads())
        out = query.new_zeros(tokens, heads, cache[1].shape[3], dtype=torch.float32)
        by_head = query.float().view(tokens, kv_heads, group, query.shape[2])  # [T, K, G, D]
        at_once = max(1, _GATHERED_BYTES // sum(4 * _BLOCK * kv_heads * x.shape[3] for x in cache))
        for rows, items in self._items(heights, group, args.window, at_once):
            queries = _rows_of(by_head[items.tokens], rows)  # [I, K, M, D]
            positions = _rows_of(items.positions[..., None, None, None].expand(-1, -1, -1, group, -1), rows)
            attended = self._attend(items, queries, positions[:, 0], layer, args)  # [I, K, M, Dv]
            count = items.tokens.shape[1]
            by_token = attended[:, :, : count * group].reshape(-1, kv_heads, count, group, out.shape[2]).transpose(1, 2)
            out[items.tokens[items.real]] = by_token.flatten(2, 3)[items.real]
        return out.to(query.dtype)

    def _attend(self, items: _Items, queries: Tensor, positions: Tensor, layer: int, args: AttentionArgs) -> Tensor:
        """Attention of the items' queries [I, K, M, D] at positions [I, M, 1]: [I, K, M, Dv] float32."""
        kv_heads, rows, size = *queries.shape[1:3], self._pool.page_size
        keys, values = (x[layer].flatten(0, 2) for x in (self._pool.keys, self._pool.values))  # [P * S * K, D or Dv]
        heads, offsets = (torch.arange(count, device=queries.device) for count in (kv_heads, _BLOCK))
        largest = queries.new_full(queries.shape[:3], _MASKED)  # m
        sums = torch.zeros_like(largest)  # l
        out = queries.new_zeros(*queries.shape[:3], values.shape[1])  # o
        for number in range(int(items.counts[0])):
            n = int(np.count_nonzero(items.counts > number))
            places = (items.blocks[:n, None] + number) * _BLOCK + offsets  # [n, 64]
            hidden = places[:, None] > positions[:n]  # [n, M, 64]
            if args.window is not None:
                hidden |= places[:, None] <= positions[:n] - args.window
            hidden = hidden[:, None]
            read = places.clamp(items.seen[:n, :1], items.seen[:n, 1:])  # unused slots may hold anything
            slots = items.pages[:n].gather(1, read // size) * size + read % size
            head_rows = (slots[:, None] * kv_heads + heads[:, None]).flatten()  # [n * K * 64]
            k = of_cache(keys.index_select(0, head_rows)).view(n * kv_heads, _BLOCK, -1)
            if layer in self._pool.latent:
                v = k[..., : values.shape[1]]
            else:
                v = of_cache(values.index_select(0, head_rows)).view(n * kv_heads, _BLOCK, -1)
            scores = torch.bmm(queries[:n].flatten(0, 1), k.transpose(1, 2)).view(n, kv_heads, rows, _BLOCK)
            scores *= args.scale
            if args.softcap is not None:
                scores.div_(args.softcap).tanh_().mul_(args.softcap)
            scores.masked_fill_(hidden, _MASKED)
            top = torch.maximum(largest[:n], scores.amax(-1))
            decay = (largest[:n] - top).exp_()
            weights = scores.sub_(top[..., None]).exp_().masked_fill_(hidden, 0.0)
            largest[:n] = top
            sums[:n] = sums[:n] * decay + weights.sum(-1)
            out[:n] = out[:n] * decay[..., None] + torch.bmm(weights.flatten(0, 1), v).view(n, kv_heads, rows, -1)
        if args.sinks is not None:
            group = args.sinks.numel() // kv_heads
            tokens = items.tokens.shape[1]
            sinks = args.sinks.float().view(1, 1, kv_heads, group, 1).expand(1, tokens, -1, -1, -1)
            sums += (_rows_of(sinks, rows)[..., 0] - largest).exp_()
        return out / sums[..., None]

    def _items(
        self, heights: ProductHeights, group: int, window: int | None, at_once: int
    ) -> Iterator[tuple[int, _Items]]:
        """(height of the products, at most `at_once` items), planned at the first layer that needs them."""
        key = heights.high // group, heights.low // group, window
        if key not in self._plans:
            chunks, decodes = self._plan([*self._chunks(key[0])], key[0], window), self._decodes()
            self._plans[key] = [(heights.high, chunks), (heights.low, self._plan([*decodes], key[1], window))]
        for height, items in self._plans[key]:
            yield from ((height, part) for part in items.parts(at_once))

    def _chunks(self, most: int) -> Iterator[tuple[Ints, int, Ints]]:
        """The items of prefill chunks: flat tokens, position of the first, and pages."""
        for chunk in self._batch.chunks:
            low, high = max(chunk.q_start, self._start), min(chunk.q_start + chunk.q_len, self._end)
            ahead = chunk.kv_len - chunk.q_len - chunk.q_start
            for at in range(low, high, most):
                yield np.arange(at, min(at + most, high)), at + ahead, chunk.pages

    def _decodes(self) -> Iterator[tuple[Ints, int, Ints]]:
        """The items of decode rows, one each, over the pages of their groups and their own."""
        batch = self._batch
        if batch.decode_lens is None or batch.decode_pages is None or batch.decode_own_start is None:
            return
        shared: list[list[Ints]] = [[] for _ in batch.decode_lens]
        for group in sorted(batch.groups, key=lambda group: group.start):
            for row in group.rows.tolist():
                shared[row].append(group.pages)
        positions = (batch.decode_own_start + batch.decode_lens - 1).tolist()
        for row, position in enumerate(positions):
            token = batch.decode_start + row
            if self._start <= token < self._end:
                pages = np.concatenate([*shared[row], batch.decode_pages[row]])
                own = (sum(map(len, shared[row]))) * self._pool.page_size
                assert own == batch.decode_own_start[row], "groups and own pages leave no gap"
                yield np.array([token]), position, pages

    def _plan(self, listed: list[tuple[Ints, int, Ints]], most: int, window: int | None) -> _Items:
        size, inside = self._pool.page_size, np.arange(most)
        start = np.array([tokens[0] - self._start for tokens, _, _ in listed], np.int64)
        count = np.array([len(tokens) for tokens, _, _ in listed], np.int64)
        begin = np.array([position for _, position, _ in listed], np.int64)
        low = np.zeros_like(begin) if window is None else np.maximum(begin - window + 1, 0)
        last = begin + count - 1
        tables = np.zeros((len(listed), int(last.max(initial=0)) // size + 1), np.int64)
        for row, end, (_, _, table) in zip(tables, last.tolist(), listed, strict=True):
            row[: end // size + 1] = table[: end // size + 1]
        real = inside < count[:, None]  # [I, t]
        index = np.where(real, inside, 0)
        blocks = last // _BLOCK + 1 - low // _BLOCK
        order = np.argsort(-blocks, kind="stable")
        seen = np.stack((low, last), 1)
        columns = (start[:, None] + index, real, begin[:, None] + index, tables, low // _BLOCK, seen)
        made = self._batch.device.upload(*(column[order] for column in columns))
        return _Items(made[0], made[1], made[2], made[3], made[4], made[5], blocks[order])


def _rows_of(values: Tensor, rows: int) -> Tensor:
    """Values [I, t, K, G, x] of items' queries as rows of their products [I, K, M, x], padded with zeros."""
    by_head = values.transpose(1, 2).flatten(2, 3)
    return F.pad(by_head, (0, 0, 0, rows - by_head.shape[2]))
