"""What the backends' attention over the paged pool has in common: where a step's keys and values go."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from batchgen.kernels.types import AttentionBatch, KVPool

__all__ = ["PooledAttention", "store"]


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
