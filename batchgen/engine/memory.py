"""How many pages of keys and values a job gets."""

from __future__ import annotations

import numpy as np
import psutil
import torch

from batchgen.engine.planning import Workload
from batchgen.errors import UsageError
from batchgen.kernels.types import KVPool
from batchgen.models.base import ModelSpec

__all__ = ["AUTO_SHARE", "allowed_pages", "pool_pages"]

AUTO_SHARE = 0.4
"""Share of the device's free memory that keys and values may take when `--kv-memory` is not given."""


def pool_pages(workload: Workload, spec: ModelSpec, page_size: int, kv_memory: int | float | None) -> int:
    """Pages to allocate, the scratch page included: what the job can use at most, within the memory allowed.

    Args:
        workload: the job; a small one gets a small pool.
        spec: the model's cache layout.
        page_size: positions per page.
        kv_memory: as for `allowed_pages`.

    Raises:
        UsageError: the memory allowed does not hold two pages.
    """
    return min(allowed_pages(spec, page_size, kv_memory), _most_pages(workload, page_size) + 1)


def allowed_pages(spec: ModelSpec, page_size: int, kv_memory: int | float | None) -> int:
    """Pages that the memory allowed holds.

    Args:
        spec: the model's cache layout.
        page_size: positions per page.
        kv_memory: bytes (int), a share of the device's memory (float), or None for `AUTO_SHARE` of what is free.

    Raises:
        UsageError: it does not hold two pages.
    """
    page = max(1, KVPool.page_bytes(list(spec.kv_layers), page_size, spec.dtype))
    free, total = _device_memory(spec.device)
    if kv_memory is None:
        budget = int(free * AUTO_SHARE)
    elif isinstance(kv_memory, float):
        budget = int(total * kv_memory)
    else:
        budget = kv_memory
    allowed = budget // page
    if allowed < 2:
        raise UsageError(f"`--kv-memory`: {budget} bytes hold {allowed} pages of {page} bytes, at least 2 are needed")
    return allowed


def _most_pages(workload: Workload, page_size: int) -> int:
    """Pages with which nothing ever waits: every tree node and every sample's output in pages of their own.

    Two partial pages may each be copied at either's beginning, and admission keeps a page free for each sample begun.
    """
    tree = workload.tree
    nodes = -(-(tree.end - tree.start).astype(np.int64) // page_size) + 1
    outputs = -(-workload.table.max_new_tokens.astype(np.int64) // page_size) + 2
    return int(nodes.sum() + (outputs * workload.samples).sum()) + 1


def _device_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch holds back, of loading and of measuring, is free
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return memory.available, memory.total
