"""Steps of real size on a device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.types import Ints, KVPool, LayerKV
from tests.gpu.device import Gpu
from tests.kernels.steps import Step, StepBuilder

_FILL_CHUNK = 1 << 16
"""Positions filled at a time: the float32 random numbers for a whole 16-bit pool would not fit into memory."""


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
        layer = LayerKV(s.kv_heads, s.key_dim, s.value_dim, s.latent)
        pool = KVPool.allocate([layer], self.num_pages, s.page_size, s.dtype, self.gpu.device)
        filled = torch.from_numpy(np.unique(np.concatenate(self._positions)))
        for cache in pool.caches:
            cache.fill_(torch.nan)
            flat = cache.flatten(0, 1)
            for part in filled.to(self.gpu.device).split(_FILL_CHUNK):
                flat[part] = self._randn(len(part), *flat.shape[1:]).to(s.dtype)
        return pool

    def _randn(self, *size: int) -> Tensor:
        return self.gpu.randn(*size)
