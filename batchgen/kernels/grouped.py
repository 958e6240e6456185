"""Keys and values of models in which some layers have a sliding window and others have none.

Each kind of layers has its pool and page tables, so that layers with a window need not keep all positions. A
step has one attention of the backend for each kind, over its pool and page tables; `GroupedAttention` calls the one
that a layer belongs to. Backends know nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.attention.spans import SpanAttention
from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.device import Device
from batchgen.kernels.pooled import AttentionCounts, PooledAttention
from batchgen.kernels.types import (
    AttentionArgs,
    AttentionBatch,
    ChunkPages,
    DecodePlanner,
    DecodeWork,
    Graphs,
    GroupPages,
    Ints,
    KVPool,
    LayerKV,
    PagedAttention,
    StaticAttention,
)


@dataclass(frozen=True, slots=True)
class GroupedPool:
    """Pools of the layers without and with a window."""

    full: KVPool
    window: KVPool
    places: tuple[tuple[bool, int], ...]
    """By layer: whether it has a window, and its index in its pool."""

    @property
    def page_size(self) -> int:
        """Positions per page, S, of both pools."""
        return self.full.page_size

    @property
    def num_pages(self) -> int:
        """Number of pages of the layers without a window, the scratch page included."""
        return self.full.num_pages

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.full.nbytes + self.window.nbytes


Pool = KVPool | GroupedPool


def allocate_pool(
    layers: Sequence[LayerKV],
    windows: Sequence[int | None],
    pages: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Pool:
    """Zeroed pools for a model's layers: one pool if all or none of them have a window.

    Args:
        layers: [L] sizes.
        windows: [L] window of each layer, None for none; empty if no layer has one.
        pages: pages of the layers without and with a window, the scratch pages included.
        page_size: positions per page.
        dtype: of keys and values.
        device: where they are stored.
    """
    places = _places(windows, len(layers))
    kinds = {windowed for windowed, _ in places}
    made = [
        KVPool.allocate(
            [layer for layer, (windowed, _) in zip(layers, places, strict=True) if windowed == kind],
            pages[kind],
            page_size,
            dtype,
            device,
        )
        for kind in sorted(kinds)
    ]
    return made[0] if len(made) == 1 else GroupedPool(made[0], made[1], places)


def _places(windows: Sequence[int | None], layers: int) -> tuple[tuple[bool, int], ...]:
    flags = [window is not None for window in windows] or [False] * layers
    return tuple((flag, flags[:layer].count(flag)) for layer, flag in enumerate(flags))


def first_pages(pool: Pool, windows: Sequence[int | None], pages: tuple[int, int]) -> Pool | None:
    """A pool of the first pages, in the same memory; None if it has less, or other layers with a window."""
    if isinstance(pool, GroupedPool):
        if pool.places != _places(windows, len(pool.places)):
            return None
        wanted = list(pages)
    elif any(windows) and not all(windows):
        return None
    else:
        wanted = [pages[any(windows)]]
    parts = pools_of(pool)
    if any(part.num_pages < count for part, count in zip(parts, wanted, strict=True)):
        return None
    return with_pools(pool, [part.first(count) for part, count in zip(parts, wanted, strict=True)])


def pools_of(pool: Pool) -> list[KVPool]:
    """The pools of each kind of layers, those without a window first."""
    return [pool.full, pool.window] if isinstance(pool, GroupedPool) else [pool]


def with_pools(pool: Pool, pools: Sequence[KVPool]) -> Pool:
    """The same layers with other pools, as in `pools_of`."""
    if isinstance(pool, GroupedPool):
        full, window = pools
        return replace(pool, full=full, window=window)
    (found,) = pools
    return found


def restarted(batch: AttentionBatch, size: int, page_size: int) -> AttentionBatch:
    """A step in which each sequence begins at the last multiple of `size`, for layers that attend in chunks (Llama 4).

    Prefill chunks are cut at the multiples. Positions count from where a token's sequence begins, and page tables begin
    there, so `size` must be a multiple of `page_size`.
    """
    chunks = [piece for chunk in batch.chunks for piece in _pieces(chunk, size, page_size)]
    if batch.decode_pages is None:
        return replace(batch, chunks=chunks)
    assert batch.decode_lens is not None
    assert batch.decode_own_start is not None
    begin = (batch.decode_own_start + batch.decode_lens - 1) // size * size  # [R]
    if not begin.any():
        return replace(batch, chunks=chunks)
    before = np.maximum(begin - batch.decode_own_start, 0) // page_size  # [R] own pages that are not seen
    lens = batch.decode_lens - before * page_size
    places = before[:, None] + np.arange(-(-int(lens.max()) // page_size))
    most = batch.decode_pages.shape[1]
    pages = np.take_along_axis(batch.decode_pages, np.minimum(places, most - 1), 1)
    return replace(
        batch,
        chunks=chunks,
        groups=[part for group in batch.groups for part in _parts(group, begin[group.rows], page_size)],
        decode_pages=np.where(places < most, pages, 0),
        decode_lens=lens,
        decode_own_start=np.maximum(batch.decode_own_start - begin, 0),
        max_decode_len=int(lens.max()),
    )


def _pieces(chunk: ChunkPages, size: int, page_size: int) -> Iterator[ChunkPages]:
    """A prefill chunk, cut at the multiples of `size`."""
    first = chunk.kv_len - chunk.q_len
    for begin in range(first // size * size, chunk.kv_len, size):
        low, high = max(first, begin), min(begin + size, chunk.kv_len)
        pages = chunk.pages[begin // page_size : -(-high // page_size)]
        yield ChunkPages(chunk.q_start + low - first, high - low, high - begin, pages)


def _parts(group: GroupPages, begin: Ints, page_size: int) -> Iterator[GroupPages]:
    """A prefix group without what its rows do not see, for the rows of each `begin` [g]."""
    end = group.start + len(group.pages) * page_size
    for at in np.unique(begin[begin < end]).tolist():
        low = max(group.start, at)
        yield GroupPages(group.rows[begin == at], group.pages[(low - group.start) // page_size :], low - at)


def attention_of(
    factory: Callable[[KVPool, AttentionBatch], PagedAttention], pool: Pool, batch: AttentionBatch
) -> PagedAttention:
    """A step's attention, made by a backend's factory for each kind of layers."""

    def make(part: KVPool, own: AttentionBatch) -> PagedAttention:
        made = factory(part, own)
        if not batch.spans:
            return made
        return SpanAttention(made, part, own, batch.spans, exceed=batch.spans_exceed_window)

    if not isinstance(pool, GroupedPool):
        return make(pool, batch)
    assert batch.window is not None
    return GroupedAttention(make(pool.full, batch), make(pool.window, batch.window), pool)


class GroupedAttention(PooledAttention):
    """One step's attention (the `PagedAttention` protocol) in layers without and with a window."""

    def __init__(self, full: PagedAttention, window: PagedAttention, pool: GroupedPool) -> None:
        self.full = full
        self.window = window
        self.pool = pool

    def _of(self, layer: int) -> tuple[PagedAttention, int]:
        """The attention of a layer's kind, and the layer's index in it."""
        windowed, index = self.pool.places[layer]
        return self.window if windowed else self.full, index

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """See `Attention.attend`."""
        attention, index = self._of(layer)
        return attention.attend(index, query, key, value, args)

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `PagedAttention.cache`."""
        attention, index = self._of(layer)
        return attention.cache(index)

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """See `PagedAttention.attend_stored`."""
        attention, index = self._of(layer)
        return attention.attend_stored(index, query, args)

    def tile(self, start: int, end: int, height: int) -> GroupedAttention:
        """See `TorchAttention.tile`, which both parts must be."""
        assert isinstance(self.full, TorchAttention | SpanAttention)
        assert isinstance(self.window, TorchAttention | SpanAttention)
        return GroupedAttention(self.full.tile(start, end, height), self.window.tile(start, end, height), self.pool)

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """See `PooledAttention.spans`."""
        return self.full.spans if isinstance(self.full, PooledAttention) else ()

    @property
    def counts(self) -> AttentionCounts:
        """Counters of the layers computed so far."""
        total = AttentionCounts()
        for part in (self.full, self.window):
            if isinstance(part, PooledAttention):
                total.add(part.counts)
        return total


@dataclass(frozen=True, slots=True)
class _GroupedWork:
    """The host plan of a decode-only step for both kinds of layers."""

    full: DecodeWork
    window: DecodeWork

    @property
    def launches(self) -> Hashable:
        """Shapes of all launches. See `DecodeWork.launches`."""
        return self.full.launches, self.window.launches


class _GroupedStaticAttention(GroupedAttention):
    """Attention inside a CUDA graph (the `StaticAttention` protocol)."""

    def __init__(self, full: StaticAttention, window: StaticAttention, pool: GroupedPool) -> None:
        super().__init__(full, window, pool)
        self._parts = full, window

    @property
    def launches(self) -> Hashable:
        """See `StaticAttention.launches`."""
        return tuple(part.launches for part in self._parts)

    def refill(self, work: DecodeWork) -> bool:
        """See `StaticAttention.refill`. If only one part can be refilled, the whole is made again."""
        assert isinstance(work, _GroupedWork)
        full, window = self._parts
        return full.refill(work.full) and window.refill(work.window)


class _GroupedPlanner:
    """Planner of decode-only steps over both pools (the `DecodePlanner` protocol)."""

    def __init__(self, support: Graphs, pool: GroupedPool, device: Device) -> None:
        self._pool = pool
        self._full, self._window = (support.planner(part, device) for part in pools_of(pool))

    def plan(self, batch: AttentionBatch, tokens: int) -> DecodeWork:
        """See `DecodePlanner.plan`."""
        assert batch.window is not None
        return _GroupedWork(self._full.plan(batch, tokens), self._window.plan(batch.window, tokens))

    def attention(self, slots: Tensor, work: DecodeWork) -> StaticAttention:
        """See `DecodePlanner.attention`; `slots` [2, tokens]: without and with a window."""
        assert isinstance(work, _GroupedWork)
        full, window = self._full.attention(slots[0], work.full), self._window.attention(slots[1], work.window)
        return _GroupedStaticAttention(full, window, self._pool)


def planner_of(support: Graphs, pool: Pool, device: Device) -> DecodePlanner:
    """The planner of a job's decode-only steps."""
    return _GroupedPlanner(support, pool, device) if isinstance(pool, GroupedPool) else support.planner(pool, device)
