"""Attention over the paged cache in plain PyTorch: the fallback backend.

For each part of a step (see `torch_plan`): `softmax(scale * Q K^T + bias) V` with its log-sum-exp, as batched matrix
products in the pool's dtype and a softmax in float32; parts that share queries are merged in float32:

    lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.attention.torch_plan import AttentionPlan, Block, HeadShape, Tile, plan_attention
from batchgen.kernels.pooled import PooledAttention
from batchgen.kernels.types import AttentionBatch, KVPool

__all__ = ["TorchAttention"]


class TorchAttention(PooledAttention):
    """One step's attention over `pool` (the `PagedAttention` protocol). Made for each step.

    The plan is made at the first layer and reused by the others.
    """

    def __init__(self, pool: KVPool, batch: AttentionBatch) -> None:
        self._pool = pool
        self._batch = batch
        self._plans: dict[tuple[HeadShape, int | None], AttentionPlan] = {}

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
        """Attend over the stored keys and values. See `PagedAttention.attend_stored`."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        shape = HeadShape(query.shape[1], keys.shape[2], keys.shape[3], values.shape[3])
        scores = _Scores(shape, scale, softcap)
        return _attend(self._plan(shape, window), scores, query, keys, values, sinks)

    def _plan(self, shape: HeadShape, window: int | None) -> AttentionPlan:
        plan = self._plans.get((shape, window))
        if plan is None:
            plan = plan_attention(self._batch, self._pool.page_size, shape, window)
            self._plans[shape, window] = plan
        return plan


class _Scores:
    """The products of one layer, with its sizes, scale and soft cap."""

    def __init__(self, shape: HeadShape, scale: float, softcap: float | None) -> None:
        self.shape = shape
        self._scale = scale
        self._softcap = softcap

    def part(self, block: Block, tile: Tile, query: Tensor, k: Tensor, v: Tensor, lse: bool) -> tuple[Tensor, Tensor]:
        """Attention of a tile's queries.

        Args:
            block: the tile's block, of B items.
            tile: M queries per item.
            query: [T, N, D] of the whole step, in the pool's dtype.
            k: [B * K, n, D] of the block.
            v: [B * K, n, Dv].
            lse: whether the log-sum-exp is needed.

        Returns:
            out [c, K, G, Dv] for the tile's targets, in the pool's dtype; lse [c, K, G, 1] float32, or empty.
        """
        q, count = self._queries(block, tile, query)
        scores = torch.baddbmm(
            q.new_empty(1, 1, 1),
            q,
            k[:, tile.first_key : tile.keys].transpose(1, 2),
            beta=0,
            alpha=self._scale,
        )  # [B * K, M * G, n]
        probabilities, sums = self._softmax(scores, block.items, count, tile, lse)
        out = torch.bmm(probabilities.to(v.dtype), v[:, tile.first_key : tile.keys])
        return self._by_token(out, block.items, count, tile), self._by_token(sums, block.items, count, tile)

    def _queries(self, block: Block, tile: Tile, query: Tensor) -> tuple[Tensor, int]:
        """Queries of a tile, [B * K, M * G, D], and M."""
        kv_heads, dim = self.shape.kv_heads, self.shape.key_dim
        chosen = query[tile.tokens] if isinstance(tile.tokens, slice) else query.index_select(0, tile.tokens)
        count = chosen.shape[0] // block.items
        chosen = chosen.reshape(block.items, count, kv_heads, -1, dim).transpose(1, 2)
        return chosen.reshape(block.items * kv_heads, -1, dim), count

    def _softmax(self, scores: Tensor, items: int, count: int, tile: Tile, lse: bool) -> tuple[Tensor, Tensor]:
        """Softmax over the last dimension and, if `lse`, its log-sum-exp [B * K, M * G, 1] float32."""
        if tile.bias is None and self._softcap is None and not lse:
            return torch.softmax(scores, -1), scores.new_empty(0)  # float32 inside, rounded once
        scores = scores.float()
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if tile.bias is not None:
            grouped = scores.view(items, self.shape.kv_heads, count, -1, scores.shape[-1])
            grouped[..., tile.bias_from - tile.first_key :].add_(tile.bias)
        result = torch.softmax(scores, -1)
        if not lse:
            return result, scores.new_empty(0)
        # The largest probability is exp(largest score - lse): two maxima are cheaper than a second pass of exp.
        return result, scores.amax(-1, keepdim=True) - result.amax(-1, keepdim=True).log()

    def _by_token(self, part: Tensor, items: int, count: int, tile: Tile) -> Tensor:
        """Reorder [B * K, M * G, x] to [c, K, G, x], without padding."""
        if not part.numel():
            return part
        kv_heads, width = self.shape.kv_heads, part.shape[-1]
        if tile.valid is not None:
            chosen = part.view(items * kv_heads * count, -1).index_select(0, tile.valid.view(-1))
            return chosen.view(-1, kv_heads, self.shape.heads // kv_heads, width)
        ordered = part.view(items, kv_heads, count, -1, width).transpose(1, 2)
        return ordered.reshape(items * count, kv_heads, -1, width)


def _attend(
    plan: AttentionPlan, scores: _Scores, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
) -> Tensor:
    """Run a plan: [T, N, Dv] in the query's dtype."""
    shape = scores.shape
    query_dtype = query.dtype
    size = (query.shape[0], shape.kv_heads, shape.heads // shape.kv_heads)
    merging = bool(plan.shared) or sinks is not None
    dtype = torch.float32 if merging else query.dtype
    out = torch.empty(*size, shape.value_dim, dtype=dtype, device=query.device)
    lse = torch.empty(*size, 1, dtype=torch.float32, device=query.device)
    query = query.to(keys.dtype)
    for first, blocks in ((True, plan.own), (False, plan.shared)):
        for block in blocks:
            k, v = _gather(keys, block), _gather(values, block)
            for tile in block.tiles:
                part, part_lse = scores.part(block, tile, query, k, v, lse=tile.merge or sinks is not None)
                if first:
                    out[tile.targets] = part.to(dtype)
                    if part_lse.numel():
                        lse[tile.targets] = part_lse
                else:
                    _merge(out, lse, tile.targets, part.float(), part_lse)
    if sinks is not None:
        out *= torch.sigmoid(lse - sinks.float().view(shape.kv_heads, -1, 1))
    return out.view(query.shape[0], shape.heads, shape.value_dim).to(query_dtype)


def _gather(cache: Tensor, block: Block) -> Tensor:
    """Gather keys or values [P, S, K, D] of a block: [B * K, n, D]."""
    dim = cache.shape[-1]
    return cache.view(-1, dim).index_select(0, block.head_rows).view(-1, block.keys, dim)


def _merge(out: Tensor, lse: Tensor, targets: slice | Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part [c, K, G, Dv] into `out` at `targets`, by log-sum-exp, in place."""
    before = lse[targets]
    total = torch.logaddexp(before, part_lse)
    merged = out[targets] * (before - total).exp_()
    out[targets] = merged.addcmul_(part, (part_lse - total).exp_())
    lse[targets] = total
