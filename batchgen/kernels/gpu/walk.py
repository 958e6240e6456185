"""Attention on a GPU whose result for a token depends on that token's own keys alone, bit for bit. See `walk_list`."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from batchgen.kernels.chips import AttentionTile, ChipTuning, fixed_tuning
from batchgen.kernels.gpu.common import power_of_2
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.walk_kernel import walk_kernel
from batchgen.kernels.gpu.walk_list import WALK_FIELDS, WalkList, WalkShape, plan_walks
from batchgen.kernels.pooled import PooledAttention
from batchgen.kernels.types import AttentionBatch, KVPool

__all__ = ["WalkAttention"]

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a layer and its query."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Heads that share a key head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class _Uploaded:
    """A list and its one copy on the device."""

    walks: WalkList
    launches: tuple[Tensor, ...]
    lists: tuple[Tensor, Tensor, Tensor]
    """rows, positions, pages"""


class WalkAttention(PooledAttention):
    """One step's attention (the `PagedAttention` protocol) in a launch per layer, and one per level of prefix groups.

    Made anew each step. All launches of layers with the same sizes and options run the same machine code.
    """

    def __init__(self, pool: KVPool, batch: AttentionBatch, tuning: ChipTuning | None = None) -> None:
        """Attend over `pool`.

        Args:
            pool: keys and values on the device that runs the kernels.
            batch: the step; its groups must be a tree (`plan_walks`).
            tuning: tile shapes; None takes those of the pool's chip, never what a run measured.
        """
        self._pool = pool
        self._batch = batch
        self._tuning = fixed_tuning(batch.slot_mapping.device) if tuning is None else tuning
        self._lists: dict[tuple[_Sizes, int | None], _Uploaded] = {}

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
        """Attend over what stands in the pool. See `PagedAttention.attend_stored`.

        Raises:
            ValueError: no tile takes heads of that size.
        """
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        assert query.stride(2) == 1, "a query's numbers must be adjacent"
        assert keys.is_contiguous()
        assert values.is_contiguous()
        sizes = _Sizes(query.shape[1], keys.shape[2], keys.shape[3], values.shape[3])
        tile = self._tile(sizes, keys.dtype)
        uploaded = self._list(sizes, tile, window)
        out = query.new_empty(query.shape[0], sizes.heads, sizes.value_dim)
        rows = query.shape[0] - self._batch.decode_start if uploaded.walks.resumable else 0
        state = query.new_empty(rows, sizes.heads, sizes.value_dim, dtype=torch.float32)
        largest, total = (query.new_empty(rows, sizes.heads, dtype=torch.float32) for _ in range(2))
        block_m = _rows(tile, sizes)
        packed = min(sizes.group, block_m)
        cap = softcap or 1.0
        for number, items in enumerate(uploaded.launches):
            launch(
                walk_kernel,
                (uploaded.walks.count(number) * sizes.kv_heads * -(-sizes.group // packed),),
                query,
                keys,
                values,
                out,
                state,
                largest,
                total,
                items,
                *uploaded.lists,
                sinks,
                *query.stride()[:2],
                self._batch.decode_start,
                window or 0,
                scale * LOG2_E,
                scale / cap,
                cap * LOG2_E,
                HEADS=sizes.heads,
                KV_HEADS=sizes.kv_heads,
                KEY_DIM=sizes.key_dim,
                VALUE_DIM=sizes.value_dim,
                PAGE_SIZE=keys.shape[1],
                ITEM_FIELDS=WALK_FIELDS,
                BLOCK_M=block_m,
                BLOCK_N=tile.keys,
                BLOCK_D=power_of_2(sizes.key_dim, 16),
                BLOCK_V=power_of_2(sizes.value_dim, 16),
                PACKED=packed,
                ALIGNED=gcd(keys.shape[1], tile.keys),  # tables begin with a page, steps with a step
                WINDOWED=window is not None,
                SOFTCAPPED=softcap is not None,
                SINKS=sinks is not None,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        return out

    def walks(self, layer: int, num_heads: int, window: int | None = None) -> WalkList:
        """The list of a layer's step: what is counted."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        sizes = _Sizes(num_heads, keys.shape[2], keys.shape[3], values.shape[3])
        return self._list(sizes, self._tile(sizes, keys.dtype), window).walks

    def _tile(self, sizes: _Sizes, dtype: torch.dtype) -> AttentionTile:
        return self._tuning.attention_tile("fixed", max(sizes.key_dim, sizes.value_dim), dtype)

    def _list(self, sizes: _Sizes, tile: AttentionTile, window: int | None) -> _Uploaded:
        found = self._lists.get((sizes, window))
        if found is None:
            rows = _rows(tile, sizes)
            queries = rows // min(sizes.group, rows)
            walks = plan_walks(self._batch, WalkShape(self._pool.page_size, window, queries, tile.keys))
            [packed] = self._batch.door.upload(walks.packed)
            launches = tuple(packed[x] for x in walks.launches)
            lists = packed[walks.rows], packed[walks.positions], packed[walks.pages]
            found = self._lists[sizes, window] = _Uploaded(walks, launches, lists)
        return found


def _rows(tile: AttentionTile, sizes: _Sizes) -> int:
    """Rows of a tile: its own number, or more where one token's heads need them."""
    return max(tile.queries, power_of_2(min(sizes.group, 64)))
