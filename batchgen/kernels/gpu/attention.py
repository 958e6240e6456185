"""Attention over the paged cache in Triton: one kernel for prefill, decode and shared prefixes, over work lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchgen.kernels.chips import AttentionTile, ChipTuning, chip_tuning, converts_fp8
from batchgen.kernels.device import Device
from batchgen.kernels.gpu.attention_kernel import attention_kernel
from batchgen.kernels.gpu.common import power_of_2
from batchgen.kernels.gpu.deterministic_list import DeterministicListShape
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.merge import merge_lists
from batchgen.kernels.gpu.work_list import FIELDS, GROUPS, LARGE, SMALL, ListShape, TileSize, WorkList
from batchgen.kernels.merge import PartLists
from batchgen.kernels.pooled import PooledAttention
from batchgen.kernels.types import E4M3, AttentionArgs, AttentionBatch, KVPool

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class UploadedList:
    """A work list and its int32 copy on the device, divided into sections once for all layers."""

    work: WorkList
    items: tuple[Tensor, ...]
    """By launch, `FIELDS` numbers per item."""
    lists: tuple[Tensor, Tensor, Tensor, Tensor]
    """rows, positions, pages, parts"""
    merges: tuple[Tensor, Tensor, Tensor]
    num_parts: int
    """Number of parts that there is room for."""

    @staticmethod
    def of(work: WorkList, device: Device) -> UploadedList:
        """Upload a work list in one transfer, without waiting for the device."""
        [packed] = device.upload(work.packed)
        rows, positions, pages, parts = (packed[x] for x in (work.rows, work.positions, work.pages, work.parts))
        tokens, starts, counts = (packed[x] for x in work.merges)
        items = tuple(packed[x] for x in work.items)
        return UploadedList(work, items, (rows, positions, pages, parts), (tokens, starts, counts), work.num_parts)

    def count(self, launch: int) -> int:
        """Number of items of a launch."""
        return self.items[launch].shape[0] // FIELDS

    @property
    def num_merges(self) -> int:
        """Number of tokens of the merge launch."""
        return self.merges[0].shape[0]


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of a layer and of its query."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    """Whether values are the first `value_dim` numbers of the keys."""

    @staticmethod
    def of(num_heads: int, pool: KVPool, layer: int) -> Heads:
        """Sizes of a layer's pool, with N query heads."""
        keys, values = pool.keys[layer], pool.values[layer]
        return Heads(num_heads, keys.shape[2], keys.shape[3], values.shape[3], layer in pool.latent)

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads

    def tile(self, tuning: ChipTuning, kind: str, dtype: torch.dtype) -> AttentionTile:
        """The tile of a kind ("decode", "prefill" or "fixed") for such heads.

        Raises:
            ValueError: no tile supports them.
        """
        if self.latent:
            return tuning.attention_tile(f"latent_{kind}", self.value_dim, dtype)
        return tuning.attention_tile(kind, max(self.key_dim, self.value_dim), dtype)


ListKind = tuple[Heads, int | None, bool]
"""Kind of layers that share a list: sizes, window, and whether the list has the prefix groups only."""
Shape = ListShape | DeterministicListShape
"""Sizes that the lists of a kind of layers are made for."""


class StepLists:
    """The work lists of a step, each made for the first layer that needs it and shared by all of its kind."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._lists: dict[ListKind, UploadedList] = {}

    def get(self, kind: ListKind, shape: Callable[[], Shape]) -> UploadedList:
        """The list of layers of a kind; `shape` gives the sizes that it is made for."""
        if kind not in self._lists:
            self._lists[kind] = self._make(kind, shape())
        return self._lists[kind]

    def _make(self, kind: ListKind, shape: Shape) -> UploadedList:
        return UploadedList.of(shape.plan(self._batch), self._batch.device)


class TritonAttention(PooledAttention):
    """One step's attention (the `PagedAttention` protocol), a few launches per layer."""

    def __init__(
        self,
        pool: KVPool,
        batch: AttentionBatch,
        tuning: ChipTuning | None = None,
        multiprocessors: int | None = None,
        lists: StepLists | None = None,
    ) -> None:
        """Attend over `pool`.

        Args:
            pool: keys and values, on the device of the kernels.
            batch: the step.
            tuning: tile shapes and splits; None: those of the pool's device.
            multiprocessors: their number on the device; None: ask the device.
            lists: the step's work lists; None: new ones.
        """
        self._pool = pool
        self._batch = batch
        device = batch.slot_mapping.device
        self._tuning = chip_tuning(device) if tuning is None else tuning
        self._multiprocessors = multiprocessors_of(device) if multiprocessors is None else multiprocessors
        self._lists = StepLists(batch) if lists is None else lists

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """Attend over the stored keys and values. See `PagedAttention.attend_stored`.

        Raises:
            ValueError: no tile supports heads of that size.
        """
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        heads = Heads.of(query.shape[1], self._pool, layer)
        uploaded = self._list(heads, product_dtype(query, keys), args.window)
        out = torch.empty(query.shape[0], heads.heads, heads.value_dim, dtype=query.dtype, device=query.device)
        run = _Run(self._tuning, uploaded, heads, (query, keys, values), out, args)
        run.launch_all()
        if uploaded.num_merges:
            run.merge(out, None)
        return out

    def prefix_parts(self, layer: int, query: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Attention of the R decode rows to the pages of their prefix groups only, all levels merged.

        Args:
            layer: index of the layer.
            query: [T, N, D] of the whole step.
            args: as in `attend`; sinks are left out.

        Returns:
            out [R, N, Dv] float32 and its log-sum-exp [R, N] float32: 0 and -inf for rows that see no group.
        """
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        heads = Heads.of(query.shape[1], self._pool, layer)
        uploaded = self._list(heads, product_dtype(query, keys), args.window, groups_only=True)
        out = torch.empty(query.shape[0], heads.heads, heads.value_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=query.device)
        args = args if args.sinks is None else replace(args, sinks=None)
        run = _Run(self._tuning, uploaded, heads, (query, keys, values), out, args)
        run.launch_all()
        run.merge(out, lse)
        return out[self._batch.decode_start :], lse[self._batch.decode_start :]

    def work(self, layer: int, num_heads: int, window: int | None = None) -> WorkList:
        """The work list of a layer's step, for counters."""
        heads = Heads.of(num_heads, self._pool, layer)
        return self._list(heads, self._pool.keys[layer].dtype, window).work

    def _list(self, heads: Heads, dtype: torch.dtype, window: int | None, groups_only: bool = False) -> UploadedList:
        def shape() -> ListShape:
            made = list_shape(self._tuning, self._multiprocessors, heads, dtype, self._pool.page_size, window)
            return replace(made, groups_only=groups_only)

        return self._lists.get((heads, window, groups_only), shape)


def product_dtype(query: Tensor, keys: Tensor) -> torch.dtype:
    """Dtype of the operands of products with keys: theirs, or the query's where they are in E4M3."""
    return query.dtype if keys.dtype == E4M3 else keys.dtype


def multiprocessors_of(device: torch.device) -> int:
    """Number of multiprocessors of a device; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def block_m(tile: AttentionTile, heads: Heads) -> int:
    """Rows of a tile: at least the heads of one token that share a kv head, unless their sums of latents are wide."""
    return tile.queries if heads.latent else max(tile.queries, power_of_2(min(heads.group, 64)))


def _tiles(tuning: ChipTuning, heads: Heads, dtype: torch.dtype) -> tuple[AttentionTile, AttentionTile]:
    """The tile of many rows and the tile of few."""
    return heads.tile(tuning, "prefill", dtype), heads.tile(tuning, "decode", dtype)


def list_shape(
    tuning: ChipTuning, multiprocessors: int, heads: Heads, dtype: torch.dtype, page_size: int, window: int | None
) -> ListShape:
    """Sizes that the lists of layers with such heads are made for."""
    large, small = _tiles(tuning, heads, dtype)

    def size(tile: AttentionTile, split: int, per_multiprocessor: int) -> TileSize:
        rows = block_m(tile, heads)
        packed = min(heads.group, rows)
        programs = heads.kv_heads * -(-heads.group // packed)
        return TileSize(
            queries=rows // packed,
            keys=tile.keys,
            split=-(-split // tile.keys) * tile.keys,
            wanted=max(1, multiprocessors * per_multiprocessor // programs),
        )

    return ListShape(
        page_size=page_size,
        window=window,
        large=size(large, tuning.split_keys_large, tuning.items_per_sm_large),
        small=size(small, tuning.split_keys, tuning.items_per_sm),
    )


class _Run:
    """The launches of one layer over one work list."""

    def __init__(
        self,
        tuning: ChipTuning,
        uploaded: UploadedList,
        heads: Heads,
        tensors: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        args: AttentionArgs,
    ) -> None:
        """`tensors`: the query, keys and values."""
        query, keys, values = tensors
        assert query.stride(2) == 1, "the last dimension of a query must be contiguous"
        assert keys.is_contiguous()
        assert heads.latent or values.is_contiguous()
        self._uploaded = uploaded
        self._query, self._keys, self._values, self._out = query, keys, values, out
        self._args = args
        self._heads = heads
        self._large, self._small = _tiles(tuning, self._heads, product_dtype(query, keys))
        parts, value_dim = uploaded.num_parts, values.shape[3]
        self._part_out = query.new_empty(parts, query.shape[1], value_dim, dtype=torch.float32)
        self._part_lse = query.new_empty(parts, query.shape[1], dtype=torch.float32)

    def launch_all(self) -> None:
        """Launch all items: results of tokens that are in one item only, parts of the others."""
        for number, tile in ((LARGE, self._large), (GROUPS, self._small), (SMALL, self._small)):
            if self._uploaded.count(number):
                self._launch(number, tile)

    def merge(self, out: Tensor, lse: Tensor | None) -> None:
        """Merge the parts of the tokens that are listed for it."""
        lists = PartLists(self._uploaded.lists[3], *self._uploaded.merges)
        merge_lists(self._part_out, self._part_lse, lists, out, lse, self._args.sinks)

    def _launch(self, number: int, tile: AttentionTile) -> None:
        heads, args = self._heads, self._args
        rows = block_m(tile, heads)
        packed = min(heads.group, rows)
        softcap = args.softcap or 1.0
        launch(
            attention_kernel, (self._uploaded.count(number) * heads.kv_heads * -(-heads.group // packed),), self._query,
            self._keys, self._values, self._out, self._part_out, self._part_lse, self._uploaded.items[number],
            *self._uploaded.lists, args.sinks, *self._query.stride()[:2], args.window or 0, args.scale * LOG2_E,
            args.scale / softcap, softcap * LOG2_E,
            HEADS=heads.heads, KV_HEADS=heads.kv_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
            PAGE_SIZE=self._keys.shape[1], ITEM_FIELDS=FIELDS, BLOCK_M=rows, BLOCK_N=tile.keys,
            BLOCK_D=power_of_2(heads.value_dim if heads.latent else heads.key_dim, 16),
            BLOCK_V=power_of_2(heads.value_dim, 16),
            BLOCK_R=power_of_2(heads.key_dim - heads.value_dim, 16) if heads.latent else 0, PACKED=packed,
            PEELED=tile.queries >= 64, FOLDED=number == SMALL, WINDOWED=args.window is not None,
            SOFTCAPPED=args.softcap is not None, SINKS=args.sinks is not None, NATIVE=converts_fp8(self._keys.device),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
