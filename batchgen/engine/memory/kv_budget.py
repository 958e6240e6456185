"""KV budget: how many KV pages a job gets from the device's memory, next to the job's largest step.

This module only counts bytes. The size of the largest step is measured on a GPU and estimated on a CPU, where other
programs share the memory (`dummy_run`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import psutil
import torch

from batchgen.engine.workload import JobWorkload
from batchgen.errors import UsageError
from batchgen.kernels.types import KVPool
from batchgen.models.base import ModelSpec
from batchgen.plan.cache_groups import CacheGroup, cache_bytes, pages_within
from batchgen.request.printable import format_size

AUTO_SHARE: Final = 0.4
"""Share of a CPU's free memory for keys and values without `--kv-memory`."""
RESERVE: Final = 0.02
"""Share of a GPU's memory that is kept free for allocator fragmentation and libraries."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device in bytes, with the weights loaded and no KV pool yet."""

    free: int
    total: int
    step: int = 0
    """Bytes of the largest step, with its outputs in flight and CUDA graphs"""
    exclusive: bool = False
    """Whether the job may use all free memory (a GPU), or shares it with other programs (a CPU)"""

    @property
    def room(self) -> int:
        """Most bytes of the pool."""
        if not self.exclusive:
            return self.free
        return max(0, self.free - self.step - int(self.total * RESERVE))

    def budget(self, kv_memory: int | float | None) -> int:
        """Bytes allowed by `--kv-memory`: a number of bytes, a share of the device's memory, or None for the default.

        The default is all room on a GPU; on a CPU it is `AUTO_SHARE` of the free memory, at most what the step leaves.
        """
        if kv_memory is None:
            return self.room if self.exclusive else max(0, min(int(self.free * AUTO_SHARE), self.free - self.step))
        return int(self.total * kv_memory) if isinstance(kv_memory, float) else kv_memory


def pool_pages(
    workload: JobWorkload, spec: ModelSpec, page_size: int, kv_memory: int | float | None, memory: DeviceMemory
) -> int:
    """Pages to allocate, including the scratch page: as many as the job can use within the memory budget.

    Args:
        workload: the job; a small one gets a small pool.
        spec: the model's cache layout.
        page_size: positions per page.
        kv_memory: as for `allowed_pages`.
        memory: the device's memory.

    Raises:
        UsageError: the budget holds less than two pages, or exceeds the free memory.
    """
    pages = min(allowed_pages(spec, page_size, kv_memory, memory), most_pages(workload, page_size))
    pool_bytes = cache_bytes(cache_groups(spec, page_size), pages)
    if pool_bytes > memory.room:
        used = f", of which the largest step takes {format_size(memory.step)}" if memory.exclusive else ""
        raise UsageError(
            f"`--kv-memory`: {format_size(pool_bytes)} of keys and values do not fit into "
            f"{format_size(memory.free)} of free memory{used}; at most {_whole_mib(memory.room)} fit"
        )
    return pages


def allowed_pages(
    spec: ModelSpec, page_size: int, kv_memory: int | float | None, memory: DeviceMemory | None = None
) -> int:
    """Number of pages in the memory budget.

    Args:
        spec: the model's cache layout.
        page_size: positions per page.
        kv_memory: bytes (int), a share of the device's memory (float), or None for the default.
        memory: the device's memory; queried if None.

    Raises:
        UsageError: the budget holds less than two pages, or exceeds the device's memory.
    """
    groups = cache_groups(spec, page_size)
    memory = device_memory(spec.device) if memory is None else memory
    budget = memory.budget(kv_memory)
    if budget > memory.total:
        raise UsageError(
            f"`--kv-memory`: {format_size(budget)} exceed the device's memory of {format_size(memory.total)}; "
            f"at most {_whole_mib(memory.room)} fit now"
        )
    allowed = pages_within(groups, budget)
    if allowed < 2:
        if kv_memory is None:
            raise UsageError(
                f"`--kv-memory`: the largest step takes {format_size(memory.step)} of {format_size(memory.free)} of "
                "free memory, which leaves no room for keys and values; lower --max-tokens-per-step or --max-num-seqs"
            )
        page = cache_bytes(groups, 1)
        raise UsageError(f"`--kv-memory`: {budget} bytes hold {allowed} pages of {page} bytes, at least 2 are needed")
    return allowed


def _whole_mib(count: int) -> str:
    """A size in whole MiB, in the option's format."""
    return f"{count >> 20}MiB"


def cache_groups(spec: ModelSpec, page_size: int) -> tuple[CacheGroup, ...]:
    """The caches that a model's layers keep: one group for each size of keys and values."""
    sizes = dict.fromkeys(spec.kv_layers)
    return tuple(
        CacheGroup(
            "full",
            layers=tuple(i for i, layer in enumerate(spec.kv_layers) if layer == size),
            page_bytes=spec.kv_layers.count(size) * KVPool.page_bytes([size], page_size, spec.dtype),
        )
        for size in sizes
    )


def most_pages(workload: JobWorkload, page_size: int) -> int:
    """Number of pages with which no sequence ever waits for one: separate pages for each tree node and each output.

    Includes the scratch page, partial pages that are copied where a node or output starts, and the page that admission
    keeps free for each running sequence.
    """
    tree = workload.tree
    nodes = -(-(tree.end - tree.start) // page_size) + 1
    outputs = -(-workload.table.max_new_tokens // page_size) + 2
    return int(nodes.sum(dtype=np.int64) + np.dot(outputs.astype(np.int64), workload.samples)) + 2


def device_memory(device: torch.device, step: int = 0) -> DeviceMemory:
    """The device's current memory; `step`: bytes of the largest step."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that PyTorch caches after loading and measuring is free
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(free, total, step, exclusive=True)
    memory = psutil.virtual_memory()
    return DeviceMemory(memory.available, memory.total, step)
