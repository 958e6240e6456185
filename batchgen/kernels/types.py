"""The attention interface of a step: its pages and lengths, and the paged pool of keys and values.

Page tables and lengths are host arrays: backends plan the step on the host and upload only what their kernels read.

Shape letters: T tokens, R decode rows, N heads, K kv heads, D head size, P pages, S page size, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.kernels.device import Device, device_for

Ints = npt.NDArray[np.int64]

_LINE: Final = 64
"""Bytes of a CPU cache line."""


E4M3: Final = torch.uint8
"""Dtype of a pool of keys and values in E4M3, floats of eight bits: their codes, which every operation can copy."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Sizes of one layer's KV cache. `value_dim` differs from `key_dim` in some architectures."""

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    """Whether keys alone are stored: values are their first `value_dim` numbers (multi-head latent attention)."""

    @property
    def position_size(self) -> int:
        """Numbers stored for one position."""
        return self.kv_heads * (self.key_dim if self.latent else self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVPool:
    """The paged KV cache: keys and values, per layer [P, S, K, D], perhaps in `E4M3`. Page 0 is scratch."""

    keys: list[Tensor]
    values: list[Tensor]
    page_size: int
    latent: frozenset[int] = frozenset()
    """Layers whose values are views of the first numbers of their keys."""

    @staticmethod
    def allocate(
        layers: list[LayerKV], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVPool:
        """A zeroed pool of `num_pages` pages, the scratch page included."""

        def make(layer: LayerKV, dim: int) -> Tensor:
            shape = (num_pages, page_size, layer.kv_heads, dim)
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            # numpy takes zeroed memory from the system, so only pages in use cost memory and time; torch would write
            # zeros to all of them. The memory is aligned so that a vector lies in one cache line.
            size = math.prod(shape) * dtype.itemsize
            memory = np.zeros(size + _LINE, np.uint8)
            begin = -memory.ctypes.data % _LINE
            return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(shape)

        keys = [make(x, x.key_dim) for x in layers]
        values = [keys[i][..., : x.value_dim] if x.latent else make(x, x.value_dim) for i, x in enumerate(layers)]
        return KVPool(keys, values, page_size, frozenset(i for i, x in enumerate(layers) if x.latent))

    @property
    def caches(self) -> list[Tensor]:
        """The tensors that hold memory: all keys, and the values that are not views of them."""
        return [*self.keys, *(x for i, x in enumerate(self.values) if i not in self.latent)]

    @property
    def num_pages(self) -> int:
        """Number of pages, the scratch page included; 0 without layers."""
        return self.keys[0].shape[0] if self.keys else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pages; pages that were never written to may not be resident."""
        return sum(x.nbytes for x in self.caches)

    def first(self, num_pages: int) -> KVPool:
        """A pool of the first `num_pages` pages, in the same memory."""
        keys, values = ([x[:num_pages] for x in caches] for caches in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    @staticmethod
    def page_bytes(layers: list[LayerKV], page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers."""
        return sum(page_size * x.position_size for x in layers) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class ChunkPages:
    """A prefill chunk: queries `[q_start, q_start + q_len)` of the flat tokens. Causal.

    Its tokens have positions `[kv_len - q_len, kv_len)`. `pages` [ceil(kv_len / S)] int64 covers positions
    0..kv_len-1.
    """

    q_start: int
    q_len: int
    kv_len: int
    pages: Ints


@dataclass(frozen=True, slots=True)
class GroupPages:
    """A prefix group: decode rows `rows` [g] int64 (0-based among the decode rows) that share full pages.

    `pages` [p] int64 hold positions `[start, start + p * S)`; every row of the group attends to them, within its
    window.
    """

    rows: Ints
    pages: Ints
    start: int


@dataclass(slots=True)
class AttentionBatch:
    """Attention metadata of one step. Flat tokens: the chunks' in order, then R decode rows from `decode_start`."""

    slot_mapping: Tensor
    """[T] int64 on the device: page * S + offset of each token's key and value (slots of the scratch page for tokens
    that are not stored)."""
    chunks: list[ChunkPages] = field(default_factory=list)
    decode_start: int = 0
    groups: list[GroupPages] = field(default_factory=list)
    decode_pages: Ints | None = None
    """[R, Pmax] int64: each row's own pages, which its groups do not cover; padded with page 0."""
    decode_lens: Ints | None = None
    """[R] int64: positions held in the row's own pages, the input token included (at least 1)."""
    decode_own_start: Ints | None = None
    """[R] int64: position of the first of the row's own pages (a multiple of S)."""
    max_decode_len: int = 0
    """max(decode_lens)."""
    windowed: bool = False
    """Whether the layers over these pages all have a window and free what is behind it: pages that no token of the step
    sees may be any, and hold anything."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Flat tokens [start, end) that see one another; each lies in one chunk."""
    spans_exceed_window: bool = False
    """Whether, in a layer with a window, a token sees those of its span that are behind its window."""
    uploader: Device | None = None
    """The device that lists are uploaded through; None: one for the slots' device."""

    @property
    def device(self) -> Device:
        """The device that lists are uploaded through."""
        return device_for(self.slot_mapping.device) if self.uploader is None else self.uploader


@dataclass(frozen=True, slots=True, eq=False)
class AttentionArgs:
    """A layer's settings of attention."""

    scale: float
    """Factor on query·key."""
    window: int | None = None
    """A token sees itself and the `window - 1` before it; None: all."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap); None: they stay."""
    sinks: Tensor | None = None
    """[N] logits that join each softmax's denominator and carry no value."""
    latent: bool = False
    """Whether values are the first numbers of the keys, which alone are stored."""
    runs: bool = True
    """Whether the tokens of each of the step's `spans` see one another in this layer."""
    restarts: bool = False
    """Whether a token sees none before its last multiple of `window` either; steps over a pool are `restarted` so."""


class Attention(Protocol):
    """A step's attention as the model calls it; a backend makes one per step."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """Store the step's keys and values of `layer`, then attend.

        Args:
            layer: index of the layer.
            query: [T, N, D].
            key: [T, K, D].
            value: [T, K, Dv].
            args: settings of the layer.

        Returns:
            [T, N, Dv] in the query's dtype; softmax and merges in float32.
        """


@runtime_checkable
class PagedAttention(Attention, Protocol):
    """Attention over a `KVPool`, for callers whose own kernels write the step's keys and values."""

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Place of the step's keys and values of `layer`.

        Returns:
            keys [P, S, K, D], values [P, S, K, Dv], slot_mapping [T] int64: token t goes to slot `slot_mapping[t]` of
            the first two dimensions taken as one.
        """

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """`attend` for keys and values that are in the pool already."""


class DecodeWork(Protocol):
    """The host plan of a decode-only step for `StaticAttention`."""

    @property
    def launches(self) -> Hashable:
        """Shapes of all launches: a graph runs the steps whose shapes equal those it was captured with."""


class StaticAttention(PagedAttention, Protocol):
    """Attention inside a CUDA graph: made once, refilled with the lists of each step."""

    @property
    def launches(self) -> Hashable:
        """`DecodeWork.launches` of all layers computed so far."""

    def refill(self, work: DecodeWork) -> bool:
        """Queue the upload of a step's lists; False, with nothing changed, if they do not fit."""


class DecodePlanner(Protocol):
    """Planner of decode-only steps over one pool, for `StaticAttention`."""

    def plan(self, batch: AttentionBatch, tokens: int) -> DecodeWork:
        """Plan a step of R decode rows and no chunks, padded to `tokens` rows (R or more).

        The batch's slot mapping is not read.
        """

    def attention(self, slots: Tensor, work: DecodeWork) -> StaticAttention:
        """Attention of tokens whose keys and values go to `slots` [tokens] int64, filled with `work`.

        Results for padding tokens are zeros.
        """


@dataclass(frozen=True, slots=True)
class Graphs:
    """Support of a backend for decode-only steps in CUDA graphs."""

    planner: Callable[[KVPool, Device], DecodePlanner]
    """Makes the planner of a job"""
    max_graphs: int = 64
    """Graphs kept; the least recently used one is dropped"""
