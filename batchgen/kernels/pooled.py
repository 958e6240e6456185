"""What the backends' attention over the paged pool has in common: where a step's keys and values go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from batchgen.kernels.types import AttentionBatch, KVPool

__all__ = ["AttentionCounts", "PooledAttention", "store"]


@dataclass(slots=True)
class AttentionCounts:
    """What attention did, summed over layers; zeros of backends that do not count."""

    items: int = 0
    """Work items: runs of tokens that attended to one run of positions together."""
    merges: int = 0
    """Tokens whose result was merged from several items."""
    padded_rows: int = 0
    """Query rows by which the processor's tiles were not full."""
    kv_bytes: int = 0
    """Bytes of keys and values read, by plan."""

    def add(self, other: AttentionCounts) -> None:
        """Add what another step or layer did."""
        self.items += other.items
        self.merges += other.merges
        self.padded_rows += other.padded_rows
        self.kv_bytes += other.kv_bytes


class PooledAttention(ABC):
    """The `PagedAttention` protocol but for `attend_stored`; a subclass sets the pool and the step's batch."""

    _pool: KVPool
    _batch: AttentionBatch

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
        """Store the step's keys and values of `layer`, then attend. See `Attention.attend`."""
        keys, values, slots = self.cache(layer)
        store(keys, key, slots)
        store(values, value, slots)
        return self.attend_stored(layer, query, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the step's keys and values go. See `PagedAttention.cache`."""
        return self._pool.keys[layer], self._pool.values[layer], self._batch.slot_mapping

    @property
    def counts(self) -> AttentionCounts:
        """What the layers computed so far took."""
        return AttentionCounts()

    @abstractmethod
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
        """See `PagedAttention.attend_stored`."""


def store(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write keys or values `new` [T, K, x] to slots [T] int64 of `cache` [P, S, K, x], in its dtype."""
    pages, size, heads, dim = cache.shape
    cache.view(pages * size, heads, dim).index_copy_(0, slots, new.to(cache.dtype))
