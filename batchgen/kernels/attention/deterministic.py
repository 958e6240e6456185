"""Batch-invariant attention in PyTorch on a CPU: a token's result depends only on its own keys, bit for bit.

Keys are processed in blocks of 64 positions that begin at multiples of 64, whatever the pages and chunks. With m the
largest score of a query (exact, in any order), each block gives

    l_b = sum over its keys of exp(score - m),  o_b = sum over its keys of exp(score - m) v

by products of one shape, in float32. Both are added in the order of positions, and out = o / l. A key that a query does
not see has weight 0, and a block of such keys adds zeros, so a product may contain queries that see other keys or other
rows of a shared prefix without a difference. Products have one of two heights, whose results are checked for bitwise
equality at run time (`heights`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from batchgen.kernels.attention.deterministic_plan import BLOCK, Portion, TilePlan, plan_tile
from batchgen.kernels.attention.torch_plan import MASKED, HeadShape
from batchgen.kernels.pooled import PooledAttention
from batchgen.kernels.types import AttentionBatch, KVPool

__all__ = ["DeterministicAttention", "heights"]

_KEPT_SCORES = 1 << 24
"""Scores kept between the two passes (64 MiB); longer contexts compute theirs twice, to the same bits."""
_LOW, _HIGH = 16, 64


@lru_cache(maxsize=256)
def heights(group: int, key_dim: int, value_dim: int, threads: int) -> tuple[int, int]:
    """Query rows of a small and of a large product; the same number twice if the two heights differ in any bit here.

    Args:
        group: query heads per kv head, all in one product.
        key_dim: D.
        value_dim: Dv.
        threads: number of threads of the products; part of the cache key.

    Raises:
        ArithmeticError: the bits of a product depend on the number of products in a call.
    """
    low = -(-group // _LOW) * _LOW
    high = max(_HIGH, low)
    generator = torch.Generator().manual_seed(group + key_dim)
    results: dict[int, Tensor] = {}
    for height in (low, high):
        for count in (1, 3, 40):
            generator.manual_seed(group + key_dim)
            keys = torch.randn(1, BLOCK, key_dim, generator=generator)
            values = torch.randn(1, BLOCK, value_dim, generator=generator)
            queries = torch.randn(low * high, key_dim, generator=generator).view(-1, height, key_dim)
            made = []
            for begin in range(0, len(queries), count):
                part = queries[begin : begin + count]
                scores = torch.bmm(part, keys.repeat(len(part), 1, 1).transpose(1, 2))
                made.append(torch.bmm(torch.sigmoid(scores.double()).float(), values.repeat(len(part), 1, 1)))
            result = torch.cat(made).view(-1, value_dim)
            if not torch.equal(results.setdefault(height, result), result):
                raise ArithmeticError(f"products of {height} rows depend on the number of products in a call")
    return low, high if torch.equal(results[low], results[high]) else low


class DeterministicAttention(PooledAttention):
    """Attention of a step, or of consecutive tokens of it, over `pool` (the `PagedAttention` protocol)."""

    def __init__(
        self, pool: KVPool, batch: AttentionBatch, start: int = 0, end: int | None = None, height: int | None = None
    ) -> None:
        """Attend for flat tokens [start, end), by default all, padded to `height` tokens."""
        self._pool = pool
        self._batch = batch
        self._start = start
        self._end = len(batch.slot_mapping) if end is None else end
        slots = batch.slot_mapping[self._start : self._end]
        filling = 0 if height is None else height - len(slots)
        self._slots = torch.cat((slots, slots.new_zeros(filling))) if filling else slots  # padding: the scratch page
        self._plans: dict[tuple[HeadShape, int | None], TilePlan] = {}

    def tile(self, start: int, end: int, height: int) -> DeterministicAttention:
        """Attention of a tile of tokens; keys and values of all earlier tokens must be stored in every layer."""
        return DeterministicAttention(self._pool, self._batch, start, end, height)

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The pool and slots of the tokens' keys and values. See `PagedAttention.cache`."""
        return self._pool.keys[layer], self._pool.values[layer], self._slots

    def attend_stored(
        self,
        layer: int,
        query: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend over the stored keys and values; padding tokens get zeros. See `PagedAttention.attend_stored`."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        shape = HeadShape(query.shape[1], keys.shape[2], keys.shape[3], values.shape[3])
        passes = _Passes(self._plan(shape, window), query, keys, values, scale, softcap)
        return passes.run(sinks).to(query.dtype)

    def _plan(self, shape: HeadShape, window: int | None) -> TilePlan:
        plan = self._plans.get((shape, window))
        if plan is None:
            group = shape.heads // shape.kv_heads
            low, high = heights(group, shape.key_dim, shape.value_dim, torch.get_num_threads())
            plan = plan_tile(self._batch, self._pool.page_size, self._start, self._end, shape, (low, high), window)
            self._plans[shape, window] = plan
        return plan


@dataclass(slots=True)
class _State:
    """Running softmax state of a tile's tokens."""

    largest: Tensor
    """[T, K, G] float32: m"""
    sums: Tensor
    """[T, K, G] float32: l"""
    out: Tensor
    """[T, K, G, Dv] float32: o"""


class _Passes:
    """The two passes of one layer over a tile: find the maxima, then add up weights and values."""

    def __init__(
        self, plan: TilePlan, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> None:
        self._plan = plan
        self._shape = shape = plan.shape
        self._query = query.float().reshape(len(query), shape.kv_heads, -1, shape.key_dim)  # [T, K, G, D]
        self._keys, self._values = keys.view(-1, shape.key_dim), values.view(-1, shape.value_dim)
        self._scale, self._softcap = scale, softcap

    def run(self, sinks: Tensor | None) -> Tensor:
        """Run both passes: [T, N, Dv] float32."""
        tokens, kv_heads, group, _ = self._query.shape
        largest = self._query.new_full((tokens, kv_heads, group), MASKED)
        out = self._query.new_zeros(tokens, kv_heads, group, self._shape.value_dim)
        state = _State(largest, torch.zeros_like(largest), out)
        kept: list[Tensor | None] = []
        free = _KEPT_SCORES
        for portion in self._plan.portions:
            scores = self._scores(portion)
            self._find_largest(portion, scores, state)
            free -= scores.numel()
            kept.append(scores if free >= 0 else None)
        if sinks is not None:
            sunk = sinks.float().view(kv_heads, group)
            torch.maximum(largest, sunk, out=largest)
        for portion, scores_or_none in zip(self._plan.portions, kept, strict=True):
            self._add(portion, self._scores(portion) if scores_or_none is None else scores_or_none, state)
        if sinks is not None:
            state.sums += (sunk - largest).exp_()
        state.sums.masked_fill_(state.sums == 0, 1.0)  # padding tokens
        return (state.out / state.sums[..., None]).view(tokens, kv_heads * group, -1)

    def _scores(self, portion: Portion) -> Tensor:
        """Masked scores of a portion, [I, K, M, BLOCK]."""
        kv_heads, dim = self._shape.kv_heads, self._shape.key_dim
        queries = _by_unit(self._query, portion).index_select(0, portion.unit)  # [I, K, M, D]
        keys = self._keys.index_select(0, portion.head_rows).float().view(-1, BLOCK, dim)  # [I * K, BLOCK, D]
        scores = torch.bmm(queries.view(-1, portion.height, dim), keys.transpose(1, 2)).mul_(self._scale)
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        return scores.view(-1, kv_heads, portion.height, BLOCK).masked_fill_(portion.hidden, MASKED)

    def _find_largest(self, portion: Portion, scores: Tensor, state: _State) -> None:
        by_block = scores.amax(-1)  # [I, K, M]
        found = _by_unit(state.largest[..., None], portion)[..., 0]  # [U, K, M]
        for first, count in portion.blocks:
            torch.maximum(found[:count], by_block[first : first + count], out=found[:count])
        _to_tokens(found[..., None], portion, state.largest[..., None])

    def _add(self, portion: Portion, scores: Tensor, state: _State) -> None:
        largest = _by_unit(state.largest[..., None], portion)  # [U, K, M, 1]
        weights = scores.sub_(largest.index_select(0, portion.unit)).exp_()  # [I, K, M, BLOCK]
        sums_by_block = weights.sum(-1)  # [I, K, M]
        values = self._values.index_select(0, portion.head_rows).float().view(-1, BLOCK, self._shape.value_dim)
        made = torch.bmm(weights.view(-1, portion.height, BLOCK), values)
        made = made.view(*weights.shape[:3], -1)  # [I, K, M, Dv]
        sums = _by_unit(state.sums[..., None], portion)[..., 0]  # [U, K, M]
        out = _by_unit(state.out, portion)  # [U, K, M, Dv]
        for first, count in portion.blocks:
            sums[:count] += sums_by_block[first : first + count]
            out[:count] += made[first : first + count]
        _to_tokens(sums[..., None], portion, state.sums[..., None])
        _to_tokens(out, portion, state.out)


def _by_unit(values: Tensor, portion: Portion) -> Tensor:
    """Values [T, K, G, x] of a portion's units, as rows of their products: a new tensor [U, K, M, x]."""
    _, kv_heads, group, width = values.shape
    units, count = portion.tokens.shape
    rows = values.new_zeros(units, kv_heads, portion.height, width)
    chosen = values.index_select(0, portion.tokens.view(-1)).view(units, count, kv_heads, group, width)
    rows[:, :, : count * group].view(units, kv_heads, count, group, width).copy_(chosen.transpose(1, 2))
    return rows


def _to_tokens(rows: Tensor, portion: Portion, target: Tensor) -> None:
    """The inverse of `_by_unit`: write rows [U, K, M, x] to `target` [T, K, G, x], padding excluded."""
    _, kv_heads, group, width = target.shape
    units, count = portion.tokens.shape
    by_token = rows[:, :, : count * group].view(units, kv_heads, count, group, width).transpose(1, 2)
    target[portion.tokens.view(-1)[portion.real]] = by_token.reshape(units * count, kv_heads, group, width)[
        portion.real
    ]
