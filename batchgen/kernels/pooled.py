"""Base of the backends' attention over the paged pool: stores of keys and values, page copies, and counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from batchgen.kernels.types import E4M3, AttentionArgs, AttentionBatch, Ints, KVPool


@dataclass(slots=True)
class AttentionCounts:
    """Work counters of attention, summed over layers; zeros for backends that do not count."""

    items: int = 0
    """Work items: runs of tokens that attended to one run of positions together."""
    merges: int = 0
    """Tokens whose result was merged from several items."""
    padded_rows: int = 0
    """Unused query rows of the processor's tiles."""
    kv_bytes: int = 0
    """Bytes of keys and values read, as planned."""

    def add(self, other: AttentionCounts) -> None:
        """Add the counters of another step or layer."""
        self.items += other.items
        self.merges += other.merges
        self.padded_rows += other.padded_rows
        self.kv_bytes += other.kv_bytes


class PooledAttention(ABC):
    """The `PagedAttention` protocol except `attend_stored`; a subclass sets the pool and the step's batch."""

    _pool: KVPool
    _batch: AttentionBatch

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """Store the step's keys and values of `layer`, then attend. See `Attention.attend`."""
        keys, values, slots = self.cache(layer)
        store(keys, key, slots)
        if layer not in self._pool.latent:
            store(values, value, slots)
        return self.attend_stored(layer, query, args)

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The pool and slots of the step's keys and values. See `PagedAttention.cache`."""
        return self._pool.keys[layer], self._pool.values[layer], self._batch.slot_mapping

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Flat tokens [start, end) of runs that see one another."""
        return ()

    @property
    def counts(self) -> AttentionCounts:
        """Counters of the layers computed so far."""
        return AttentionCounts()

    @abstractmethod
    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """See `PagedAttention.attend_stored`."""


def store(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write keys or values `new` [T, K, x] to slots [T] int64 of `cache` [P, S, K, x], in its dtype."""
    pages, size, heads, dim = cache.shape
    made = in_e4m3(new) if cache.dtype == E4M3 else new.to(cache.dtype)
    cache.view(pages * size, heads, dim).index_copy_(0, slots, made)


_MOST_E4M3: Final = 448.0


def in_e4m3(x: Tensor) -> Tensor:
    """Codes of `x` in `E4M3`: to nearest, ties to even; past 448 the largest number."""
    return x.float().clamp(-_MOST_E4M3, _MOST_E4M3).to(torch.float8_e4m3fn).view(E4M3)


def of_cache(x: Tensor) -> Tensor:
    """Numbers of keys or values of a pool, float32."""
    return (x.view(torch.float8_e4m3fn) if x.dtype == E4M3 else x).float()


_TOGETHER: Final = 64
"""Pages copied at once, through temporary memory."""


def in_turn(copies: Ints) -> Iterator[Ints]:
    """Copies [n, 3] in parts [m, 3] for `copy_pages`, one after the other, as if each copy were made alone."""
    start, written = 0, set[int]()
    for at, (source, target, _) in enumerate(copies.tolist()):
        if source in written or target in written:
            yield copies[start:at]
            start, written = at, set()
        written.add(target)
    yield copies[start:]


def copy_pages(pool: KVPool, copies: Tensor) -> None:
    """Copy the first positions of pages to other pages, in every layer, for rows that continue from within a page.

    Other positions of a target stay as they are: rows may attend to them, where a prefix is computed once more.

    Args:
        pool: on any device.
        copies: [n, 3] int64 on the pool's device: source page, target page, number of positions from the page's start.
            A page may be a target after it was a source, but not before, and once; see `in_turn`.
    """
    places = torch.arange(pool.page_size, device=copies.device)
    for at in range(0, len(copies), _TOGETHER):
        sources, targets, counts = copies[at : at + _TOGETHER].T[..., None]  # [n, 1] each
        sources = torch.where(places < counts, sources, targets)  # [n, S]: the others are copied to themselves
        for cache in pool.caches:
            cache[targets, places] = cache[sources, places]
