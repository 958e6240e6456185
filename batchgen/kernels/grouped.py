"""The cache of a model's layers by cache groups, and a step's attention over them.

Each group has its pool and page tables, so that layers need not all keep the same positions. A step has one attention
of the backend for each group, over its pool and page tables; `GroupedAttention` calls the one that a layer belongs to.
Backends know nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.attention.spans import SpanAttention
from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.device import Device
from batchgen.kernels.mixers.states import StatePool
from batchgen.kernels.pooled import AttentionCounts, PooledAttention
from batchgen.kernels.types import (
    AttentionArgs,
    AttentionBatch,
    ChunkPages,
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
    """A model's cache: a pool for each cache group."""

    parts: list[KVPool]
    places: Mapping[int, tuple[int, int]]
    """Layer with attention -> its group, and its index in the group's pool."""
    states: StatePool | None = None
    """Recurrent states; None: the model has none."""

    @staticmethod
    def allocate(
        layers: Sequence[LayerKV],
        groups: Sequence[Sequence[int]],
        pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> GroupedPool:
        """Zeroed pools for a model's layers.

        Args:
            layers: [L] sizes.
            groups: layers of each group.
            pages: pages of each group, the scratch page included.
            page_size: positions per page.
            dtype: of keys and values.
            device: where they are stored.
        """
        parts = [
            KVPool.allocate([layers[i] for i in group], count, page_size, dtype, device)
            for group, count in zip(groups, pages, strict=True)
        ]
        return GroupedPool(parts, places_of(groups))

    @property
    def page_size(self) -> int:
        """Positions per page, S, of all pools."""
        return self.parts[0].page_size

    @property
    def num_pages(self) -> int:
        """Number of pages of the first group, the scratch page included."""
        return self.parts[0].num_pages

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(part.nbytes for part in self.parts) + (0 if self.states is None else self.states.nbytes)

    def first(self, groups: Sequence[Sequence[int]], pages: Sequence[int]) -> GroupedPool | None:
        """A pool of the first pages of each group, in the same memory; None if it has less, or other groups."""
        wanted = list(zip(self.parts, pages, strict=False))
        if self.places != places_of(groups) or any(part.num_pages < count for part, count in wanted):
            return None
        return replace(self, parts=[part.first(count) for part, count in wanted])


def places_of(groups: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Layer -> its group, and its index in the group; `groups`: layers of each group."""
    return {layer: (number, index) for number, group in enumerate(groups) for index, layer in enumerate(group)}


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
    factory: Callable[[KVPool, AttentionBatch], PagedAttention], pool: KVPool, batch: AttentionBatch
) -> PagedAttention:
    """A step's attention over one pool, made by a backend's factory."""
    made = factory(pool, batch)
    if not batch.spans:
        return made
    return SpanAttention(made, pool, batch, batch.spans, exceed=batch.spans_exceed_window)


def grouped_attention(
    factory: Callable[[KVPool, AttentionBatch], PagedAttention], pool: GroupedPool, batches: Sequence[AttentionBatch]
) -> PagedAttention:
    """A step's attention in all layers; `batches`: the step over the pages of each group."""
    if not pool.places:  # no layer attends
        return GroupedAttention((), {})
    parts = [attention_of(factory, part, batch) for part, batch in zip(pool.parts, batches, strict=True)]
    alone = len(parts) == 1 and all(layer == index for layer, (_, index) in pool.places.items())
    return parts[0] if alone else GroupedAttention(parts, pool.places)


class GroupedAttention(PooledAttention):
    """One step's attention (the `PagedAttention` protocol) in the layers of several groups."""

    def __init__(self, parts: Sequence[PagedAttention], places: Mapping[int, tuple[int, int]]) -> None:
        """`parts`: the attention of each group; `places`: as in `GroupedPool`."""
        self.parts = parts
        self.places = places

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """See `Attention.attend`."""
        group, index = self.places[layer]
        return self.parts[group].attend(index, query, key, value, args)

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `PagedAttention.cache`."""
        group, index = self.places[layer]
        return self.parts[group].cache(index)

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """See `PagedAttention.attend_stored`."""
        group, index = self.places[layer]
        return self.parts[group].attend_stored(index, query, args)

    def tile(self, start: int, end: int, height: int) -> GroupedAttention:
        """See `TorchAttention.tile`, which all parts must have."""
        tiles = []
        for part in self.parts:
            assert isinstance(part, TorchAttention | SpanAttention)
            tiles.append(part.tile(start, end, height))
        return GroupedAttention(tiles, self.places)

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """See `PooledAttention.spans`."""
        return self.parts[0].spans if self.parts and isinstance(self.parts[0], PooledAttention) else ()

    @property
    def counts(self) -> AttentionCounts:
        """Counters of the layers computed so far."""
        total = AttentionCounts()
        for part in self.parts:
            if isinstance(part, PooledAttention):
                total.add(part.counts)
        return total


@dataclass(frozen=True, slots=True)
class GroupedWork:
    """The host plan of a decode-only step for each group."""

    parts: list[DecodeWork]

    @property
    def launches(self) -> Hashable:
        """Shapes of all launches. See `DecodeWork.launches`."""
        return tuple(part.launches for part in self.parts)


class GroupedStaticAttention(GroupedAttention):
    """Attention of all layers inside a CUDA graph."""

    def __init__(self, parts: list[StaticAttention], places: Mapping[int, tuple[int, int]]) -> None:
        super().__init__(parts, places)
        self._static = parts

    @property
    def launches(self) -> Hashable:
        """See `StaticAttention.launches`."""
        return tuple(part.launches for part in self._static)

    def refill(self, work: GroupedWork) -> bool:
        """See `StaticAttention.refill`. If only some parts can be refilled, the whole is made again."""
        return all(part.refill(own) for part, own in zip(self._static, work.parts, strict=True))


class GroupedPlanner:
    """Planner of a job's decode-only steps."""

    def __init__(self, support: Graphs, pool: GroupedPool, device: Device) -> None:
        self._places = pool.places
        self._parts = [support.planner(part, device) for part in pool.parts]

    def plan(self, batches: Sequence[AttentionBatch], tokens: int) -> GroupedWork:
        """Plan a step, over the pages of each group. See `DecodePlanner.plan`."""
        return GroupedWork([part.plan(batch, tokens) for part, batch in zip(self._parts, batches, strict=True)])

    def attention(self, slots: Tensor, work: GroupedWork) -> GroupedStaticAttention:
        """See `DecodePlanner.attention`; `slots` [groups, tokens]."""
        made = [part.attention(*own) for part, *own in zip(self._parts, slots, work.parts, strict=True)]
        return GroupedStaticAttention(made, self._places)
