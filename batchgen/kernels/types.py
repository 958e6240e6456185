"""What attention needs to know of one step, and the pool it reads and writes.

Page tables and lengths are arrays on the host: backends arrange the step there and upload only what their kernels read.

Shape letters: T tokens, R decode rows, N heads, K kv heads, D head size, P pages, S page size, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.kernels.device import Device, device_for

__all__ = [
    "Attention",
    "AttentionBatch",
    "BesidePool",
    "ChunkPages",
    "DecodePlanner",
    "DecodeWork",
    "GroupPages",
    "Ints",
    "KVPool",
    "LayerKV",
    "PagedAttention",
    "StaticAttention",
]

Ints = npt.NDArray[np.int64]

_LINE: Final = 64
"""Bytes of a line of a processor's cache."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Sizes of one layer's cache. `value_dim` differs from `key_dim` in some architectures (MLA)."""

    kv_heads: int
    key_dim: int
    value_dim: int


class BesidePool(Protocol):
    """What a backend keeps of a pool's pages beside it."""

    def write(self, pages: Ints) -> None:
        """Pages [n] are about to be written to."""
        ...


@dataclass(frozen=True, slots=True)
class KVPool:
    """Paged keys and values: per layer [P, S, K, D]. Page 0 is scratch."""

    keys: list[Tensor]
    values: list[Tensor]
    page_size: int
    beside: BesidePool | None = None
    """Told of every write by the backend that made it."""

    @staticmethod
    def allocate(
        layers: list[LayerKV], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVPool:
        """A zeroed pool of `num_pages` pages, the scratch page included."""

        def make(layer: LayerKV, dim: int) -> Tensor:
            shape = (num_pages, page_size, layer.kv_heads, dim)
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            # numpy takes zeroed memory from the system, so that only pages in use cost memory and time;
            # torch would write zeros to all of them. It begins anywhere, and a vector is to lie in one cache line.
            size = math.prod(shape) * dtype.itemsize
            memory = np.zeros(size + _LINE, np.uint8)
            begin = -memory.ctypes.data % _LINE
            return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(shape)

        return KVPool([make(x, x.key_dim) for x in layers], [make(x, x.value_dim) for x in layers], page_size)

    @property
    def num_pages(self) -> int:
        """Its pages, the scratch page included; 0 without layers."""
        return self.keys[0].shape[0] if self.keys else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its pages; those that nobody has written to may not be in memory."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def first(self, num_pages: int) -> KVPool:
        """Its first pages, in the same memory."""
        keys, values = ([x[:num_pages] for x in caches] for caches in (self.keys, self.values))
        return KVPool(keys, values, self.page_size, self.beside)

    @staticmethod
    def page_bytes(layers: list[LayerKV], page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers."""
        return sum(page_size * x.kv_heads * (x.key_dim + x.value_dim) for x in layers) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class ChunkPages:
    """A prefill chunk: queries `[q_start, q_start + q_len)` of the flat tokens.

    They stand at positions `[kv_len - q_len, kv_len)`.

    `pages` [ceil(kv_len / S)] int64 covers positions 0..kv_len-1. Causal.
    """

    q_start: int
    q_len: int
    kv_len: int
    pages: Ints


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Decode rows `rows` [g] int64 (0-based within the decode rows) share full pages `pages` [p] int64.

    The pages hold positions `[start, start + p * S)`; every row of the group attends to them, its window allowing.
    """

    rows: Ints
    pages: Ints
    start: int


@dataclass(slots=True)
class AttentionBatch:
    """One step's attention. Flat tokens: the chunks' in order, then R decode rows from `decode_start`."""

    slot_mapping: Tensor
    """[T] int64 on the device: page * S + offset where each token's key and value go (slots of the scratch page for
    those not stored)."""
    chunks: list[ChunkPages] = field(default_factory=list)
    decode_start: int = 0
    groups: list[GroupPages] = field(default_factory=list)
    decode_pages: Ints | None = None
    """[R, Pmax] int64: each row's own pages, those its groups do not cover; padded with page 0."""
    decode_lens: Ints | None = None
    """[R] int64: positions held in the row's own pages, the fed token included (at least 1)."""
    decode_own_start: Ints | None = None
    """[R] int64: position of the first of the row's own pages (a multiple of S)."""
    max_decode_len: int = 0
    """max(decode_lens)."""
    device: Device | None = None
    """What lists are uploaded through; None takes one for the slots' device."""

    @property
    def door(self) -> Device:
        """What lists are uploaded through."""
        return device_for(self.slot_mapping.device) if self.device is None else self.device


class Attention(Protocol):
    """A step's attention as the model sees it, made anew each step by a backend."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the step's keys and values of `layer`, then attend.

        Args:
            layer: which layer's pool.
            query: [T, N, D].
            key: [T, K, D].
            value: [T, K, Dv].
            scale: factor on query·key.
            window: a token sees itself and the `window - 1` before it; None sees all.
            softcap: scores become softcap * tanh(scores / softcap).
            sinks: [N] logits that join each softmax's denominator and carry no value.

        Returns:
            [T, N, Dv] in the query's dtype; softmax and merges in float32.
        """
        ...


@runtime_checkable
class PagedAttention(Attention, Protocol):
    """Attention over a `KVPool`, for callers whose own kernels write the step's keys and values."""

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the step's keys and values of `layer` go.

        Returns:
            keys [P, S, K, D], values [P, S, K, Dv], slot_mapping [T] int64: token t goes to slot `slot_mapping[t]` of
            the first two dimensions taken as one.
        """
        ...

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
        """As `attend`, with the step's keys and values in the pool already."""
        ...


class DecodeWork(Protocol):
    """A step of decode rows alone, planned on the host for attention that stays."""

    @property
    def launches(self) -> Hashable:
        """The shapes of all launches: a graph runs the steps whose shapes are those it was recorded with."""
        ...


class StaticAttention(PagedAttention, Protocol):
    """Attention inside a graph: made once, and refilled with the lists of one step after another."""

    @property
    def launches(self) -> Hashable:
        """As `DecodeWork.launches`, of all layers that have been computed."""
        ...

    def refill(self, work: DecodeWork) -> bool:
        """Take a step's lists, queued as an upload; False, and nothing is changed, where they do not fit."""
        ...


class DecodePlanner(Protocol):
    """Plans decode-only steps over one pool for attention that stays."""

    def plan(self, batch: AttentionBatch, tokens: int) -> DecodeWork:
        """Plan a step of R decode rows and no chunks; with padding it has `tokens` of them, R or more.

        The batch's slots are not looked at.
        """
        ...

    def attention(self, slots: Tensor, work: DecodeWork) -> StaticAttention:
        """Attention that stays, of tokens whose keys and values go to `slots` [tokens] int64, filled with `work`.

        Its results for tokens of padding are zeros.
        """
        ...
