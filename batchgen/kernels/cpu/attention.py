"""Compiled attention over the paged KV pool. The reference is `kernels.attention.torch_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, byref, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.cpu.attention_list import ListPlanner, ListShape, WorkList
from batchgen.kernels.cpu.command_buffer import CannotRecord, current_buffer
from batchgen.kernels.cpu.library import DTYPES, address, library
from batchgen.kernels.cpu.packed_pages import PackedPages, PackedPool
from batchgen.kernels.cpu.structs import fields
from batchgen.kernels.layouts import dots_are_faster
from batchgen.kernels.pooled import AttentionCounts, PooledAttention
from batchgen.kernels.types import AttentionArgs, AttentionBatch, Ints, KVPool


class _List(Structure):
    """`AttentionList` of attention.h."""

    _fields_ = (
        *fields(c_void_p, "items shares tokens positions pages versions parts merges part_out part_lse"),
        *fields(c_int64, "num_items num_shares num_merges heads kv_heads key_dim value_dim page_size value_stride"),
        *fields(c_int64, "window dtype block dots"),
    )


class _Step(Structure):
    """`Attention` of attention.h."""

    _fields_ = (
        *fields(c_void_p, "lists keys values sinks packed query out"),
        *fields(c_int64, "query_stride out_stride"),
        *fields(c_float, "scale softcap"),
    )


class _LayerList:
    """A work list with memory for its parts, as a C argument."""

    def __init__(
        self,
        shape: ListShape,
        work: WorkList,
        keys: Tensor,
        values: Tensor,
        latent: bool,
        dots: bool,
        packed: PackedPages | None,
    ) -> None:
        heads = shape.group * shape.kv_heads
        self.work = work
        read = keys.shape[2] * (keys.shape[3] if latent else keys.shape[3] + values.shape[3])  # numbers of a position
        kv_bytes = work.keys_read * read * keys.element_size()
        self.counts = AttentionCounts(work.num_items, work.num_merges, work.padded_rows, kv_bytes)
        self._part_out = torch.empty(work.num_parts * heads * values.shape[3], dtype=torch.float32)
        self._part_lse = torch.empty(work.num_parts * heads * (1 if shape.block is None else 2), dtype=torch.float32)
        self._versions = None if packed is None else packed.versions(work.pages, work.common_pages)
        arrays = (
            work.items, work.shares, work.tokens, work.positions, work.pages, self._versions, work.parts, work.merges
        )  # fmt: skip
        assert all(array is None or array.flags.c_contiguous for array in arrays)
        self.struct = _List(
            *(None if array is None else array.ctypes.data for array in arrays),
            address(self._part_out), address(self._part_lse), len(work.items), len(work.shares) - 1, work.num_merges,
            heads, keys.shape[2], keys.shape[3], values.shape[3], keys.shape[1], values.stride(1), shape.window or 0,
            DTYPES[keys.dtype], shape.block or 0, dots,
        )  # fmt: skip


class StackArguments:
    """Kernel arguments for one step's attention in one or many layers, which keep all of its memory alive.

    `struct` is an `Attention` of attention.h.
    """

    def __init__(
        self,
        lists: Sequence[_LayerList],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        query: Tensor,
        out: Tensor,
        args: AttentionArgs,
        packed: int | None,
    ) -> None:
        """`args` but for the window hold for all layers; `packed`: address of the layers' `Packed` structs, or None."""
        self._sinks = None if args.sinks is None else args.sinks.detach().float().contiguous()
        self._arrays = (
            _pointers([addressof(x.struct) for x in lists]),
            _pointers([x.data_ptr() for x in keys]),
            _pointers([x.data_ptr() for x in values]),
            _pointers([address(self._sinks)] * len(lists)),
        )
        self._kept = (list(lists), list(keys), list(values), query, out)
        self.struct = _Step(
            *(addressof(array) for array in self._arrays),
            packed,
            address(query),
            address(out),
            query.stride(0),
            out.stride(0),
            args.scale,
            args.softcap or 0.0,
        )


class CompiledAttention(PooledAttention):
    """One step's attention (the `PagedAttention` protocol) over a float32 or bfloat16 pool on the CPU.

    Create one per step. A work list is made for the first layer and reused for all layers with the same sizes and
    window.
    """

    def __init__(
        self,
        pool: KVPool,
        batch: AttentionBatch,
        threads: int | None = None,
        *,
        deterministic: bool = False,
        dots: bool | None = None,
    ) -> None:
        """Attend over `pool`.

        Args:
            pool: float32 or bfloat16, on the CPU.
            batch: the step's batch.
            threads: number of threads; None: torch's number.
            deterministic: whether a token's result depends on its own keys only, bit for bit. Decode rows that share no
                keys are slower then.
            dots: whether to multiply with the processor's bfloat16 dot instruction, where the processor has one and the
                pool is bfloat16, instead of block floating point (many rows) or float32 (few rows); None: whether that
                was measured to be faster for products.
        """
        self._pool = pool
        self._batch = batch
        self._deterministic = deterministic
        if dots is None:
            dots = not deterministic and pool.keys[0].dtype == torch.bfloat16 and dots_are_faster()
        self._dots = dots
        self._packed = pool.packed if dots and isinstance(pool, PackedPool) else None
        if isinstance(pool, PackedPool):
            pool.packed.write(batch.slot_mapping.numpy() // pool.page_size)
        self._threads = torch.get_num_threads() if threads is None else threads
        self._lists: dict[tuple[int, torch.Size, torch.Size, bool, int | None, bool], _LayerList] = {}
        self._planners: dict[ListShape, ListPlanner] = {}
        self._counts = AttentionCounts()

    @property
    def counts(self) -> AttentionCounts:
        """Work counted over the layers so far, those of `stack` included."""
        return self._counts

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """Attend over keys and values that are stored in the pool. See `PagedAttention.attend_stored`."""
        if current_buffer() is not None:
            raise CannotRecord("the attention of one layer")
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        dtype = query.dtype
        query = query.to(keys.dtype)
        if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
            query = query.contiguous()
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[3])
        work = self._list(query.shape[1], layer, args.window)
        self._counts.add(work.counts)
        packed = None if self._packed is None else addressof(self._packed.structs[layer])
        arguments = StackArguments([work], [keys], [values], query, out, args, packed)
        library().bg_attention(byref(arguments.struct), c_int64(0), c_int64(self._threads))
        return out.to(dtype)

    def stack(
        self, query: Tensor, out: Tensor, args: AttentionArgs, windows: Sequence[int | None], wanted: Ints | None = None
    ) -> StackArguments:
        """Arguments of `attention_items_part` and `attention_merge_part` for all layers of a step.

        Args:
            query: [T, N, D] in the pool's dtype, reused by the layers one after the other; any stride between tokens.
            out: [T, N, Dv] likewise.
            args: of all layers, but for the windows.
            windows: [L].
            wanted: [W] tokens whose result is computed in the last layer; None: all tokens.
        """
        layers = range(len(windows))
        keys, values = self._pool.keys, self._pool.values
        last = layers[-1] if wanted is not None else None
        lists = [self._list(query.shape[1], i, windows[i], wanted if i == last else None) for i in layers]
        for work in lists:
            self._counts.add(work.counts)
        packed = None if self._packed is None else addressof(self._packed.structs)
        return StackArguments(lists, keys, values, query, out, args, packed)

    def work(self, layer: int, heads: int, window: int | None = None) -> WorkList:
        """Work list of a layer, with its counts."""
        return self._list(heads, layer, window).work

    def _list(self, heads: int, layer: int, window: int | None, wanted: Ints | None = None) -> _LayerList:
        keys, values, latent = self._pool.keys[layer], self._pool.values[layer], layer in self._pool.latent
        key = (heads, keys.shape, values.shape, latent, window, wanted is None)
        work = self._lists.get(key)
        if work is None:
            block = _block(max(keys.shape[3], values.shape[3])) if self._deterministic else None
            group = heads // keys.shape[2]
            shape = ListShape(self._pool.page_size, window, keys.shape[2], group, self._threads, block)
            planner = self._planners.get(shape)
            if planner is None:
                planner = self._planners[shape] = ListPlanner(self._batch, shape)
            work = _LayerList(shape, planner.work(wanted), keys, values, latent, self._dots, self._packed)
            self._lists[key] = work
        return work


def _block(dim: int) -> int:
    """Positions of a block whose keys and values of size `dim` fit the L2 cache: a multiple of every panel size."""
    return next((block for most, block in ((128, 192), (256, 96)) if dim <= most), 48)


def _pointers(addresses: list[int | None]) -> Array[Any]:
    return (c_void_p * len(addresses))(*addresses)
