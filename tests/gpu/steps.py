"""Steps of real size on a device, and the expected attention over them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.attention.reference import visible_slots
from batchgen.kernels.types import AttentionBatch, Ints, KVPool, LayerKV
from tests.gpu.device import Gpu
from tests.kernels.steps import Step, StepBuilder

__all__ = ["DeviceSteps", "Scoring", "attend_by_token"]

_FILL_CHUNK = 1 << 16
"""Positions filled at a time: the float32 random numbers for a whole 16-bit pool would not fit into memory."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """A layer's attention score options."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass
class DeviceSteps(StepBuilder):
    """A `StepBuilder` with tensors on a device. The page tables stay on the host, as in the engine."""

    gpu: Gpu = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positions: list[Ints] = []

    def _fill(self, pages: list[int], positions: int) -> None:
        size = self.shape.page_size
        slots = (np.array(pages, np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        self._positions.append(slots[:positions])

    def build(self) -> Step:
        step = super().build()
        step.batch.slot_mapping = step.batch.slot_mapping.to(self.gpu.device)
        return step

    def _pool(self) -> KVPool:
        s = self.shape
        layer = LayerKV(s.kv_heads, s.key_dim, s.value_dim)
        pool = KVPool.allocate([layer], self.num_pages, s.page_size, s.dtype, self.gpu.device)
        filled = torch.from_numpy(np.unique(np.concatenate(self._positions)))
        for cache in (pool.keys[0], pool.values[0]):
            cache.fill_(torch.nan)
            flat = cache.flatten(0, 1)
            for part in filled.to(self.gpu.device).split(_FILL_CHUNK):
                flat[part] = self._randn(len(part), *flat.shape[1:]).to(s.dtype)
        return pool

    def _randn(self, *size: int) -> Tensor:
        return self.gpu.randn(*size)


def attend_by_token(
    batch: AttentionBatch, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, compute: torch.dtype
) -> Tensor:
    """Attention of each flat token by separate plain operations in `compute`.

    In float64 it gives the true values. In a lower precision it is the plain operation of the 2 x rule: products and
    probabilities are rounded to `compute`, the softmax is in float32.

    Args:
        batch: the step.
        query: [T, N, D].
        keys: [P, S, K, D], with the step's keys stored.
        values: [P, S, K, Dv].
        scoring: the layer's score options.
        compute: float64, float32, float16 or bfloat16.

    Returns:
        [T, N, Dv] in `compute`.
    """
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
    wide = torch.float64 if compute == torch.float64 else torch.float32
    out = torch.empty(*query.shape[:2], values.shape[3], dtype=compute, device=query.device)
    for token, (position, slots) in enumerate(visible_slots(batch, page_size)):
        begin = 0 if scoring.window is None else max(0, position - scoring.window + 1)
        chosen = slots[begin:].to(query.device)
        k, v = flat_keys[chosen].to(compute), flat_values[chosen].to(compute)  # [n, K, D], [n, K, Dv]
        q = query[token].view(kv_heads, -1, query.shape[-1]).to(compute)  # [K, G, D]
        scores = torch.einsum("kgd,nkd->kgn", q, k).to(wide) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.sinks is not None:
            scores = torch.cat((scores, scoring.sinks.to(wide).view(kv_heads, -1, 1)), -1)
        weights = torch.softmax(scores, -1)[..., : len(chosen)].to(compute)
        out[token] = torch.einsum("kgn,nkd->kgd", weights, v).flatten(0, 1)
    return out
