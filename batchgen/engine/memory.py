"""How many pages of keys and values a job gets: what its device has left beside the largest step it will make.

Bytes are counted, none is allocated here. What the largest step takes is measured on a GPU (`profile`) and estimated on
a CPU, whose memory nobody has alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import psutil
import torch

from batchgen.engine.planning import Workload
from batchgen.errors import UsageError
from batchgen.kernels.types import KVPool
from batchgen.models.base import ModelSpec
from batchgen.units import format_size

__all__ = ["AUTO_SHARE", "DeviceMemory", "allowed_pages", "device_memory", "most_pages", "pool_pages"]

AUTO_SHARE: Final = 0.4
"""Share of a CPU's free memory that keys and values may take when `--kv-memory` is not given."""
RESERVE: Final = 0.02
"""Share of a GPU's memory that is left alone: what its allocator loses between blocks, and libraries' own."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device, with the weights in place and no pool yet."""

    free: int
    total: int
    step: int = 0
    """What the largest step, its outputs on their way and CUDA graphs take beside weights and pool."""
    exclusive: bool = False
    """Whether the run may have all that is free (a GPU) or is one program among others (a CPU)."""

    @property
    def room(self) -> int:
        """Most bytes that the pool may have."""
        if not self.exclusive:
            return self.free
        return max(0, self.free - self.step - int(self.total * RESERVE))

    def budget(self, kv_memory: int | float | None) -> int:
        """Bytes that `--kv-memory` allows: a number of bytes, a share of the device's memory, or all there is room for.

        On a CPU that is `AUTO_SHARE` of what is free, and what the step leaves if that is less.
        """
        if kv_memory is None:
            return self.room if self.exclusive else max(0, min(int(self.free * AUTO_SHARE), self.free - self.step))
        return int(self.total * kv_memory) if isinstance(kv_memory, float) else kv_memory


def pool_pages(
    workload: Workload, spec: ModelSpec, page_size: int, kv_memory: int | float | None, memory: DeviceMemory
) -> int:
    """Pages to allocate, the scratch page included: what the job can use at most, within the memory allowed.

    Args:
        workload: the job; a small one gets a small pool.
        spec: the model's cache layout.
        page_size: positions per page.
        kv_memory: as for `allowed_pages`.
        memory: the device's.

    Raises:
        UsageError: the memory allowed does not hold two pages, or is not there.
    """
    pages = min(allowed_pages(spec, page_size, kv_memory, memory), most_pages(workload, page_size))
    page = _page_bytes(spec, page_size)
    if pages * page > memory.room:
        held = f", of which the largest step takes {format_size(memory.step)}" if memory.exclusive else ""
        raise UsageError(
            f"`--kv-memory`: {format_size(pages * page)} of keys and values do not fit into the "
            f"{format_size(memory.free)} that are free{held}; at most {_whole_mib(memory.room)} fit"
        )
    return pages


def allowed_pages(
    spec: ModelSpec, page_size: int, kv_memory: int | float | None, memory: DeviceMemory | None = None
) -> int:
    """Pages that the memory allowed holds.

    Args:
        spec: the model's cache layout.
        page_size: positions per page.
        kv_memory: bytes (int), a share of the device's memory (float), or None for what there is room for.
        memory: the device's; looked up if None.

    Raises:
        UsageError: it does not hold two pages, or is more than the device has.
    """
    page = _page_bytes(spec, page_size)
    memory = device_memory(spec.device) if memory is None else memory
    budget = memory.budget(kv_memory)
    if budget > memory.total:
        raise UsageError(
            f"`--kv-memory`: {format_size(budget)} are more than the {format_size(memory.total)} that the device has; "
            f"at most {_whole_mib(memory.room)} fit now"
        )
    allowed = budget // page
    if allowed < 2:
        if kv_memory is None:
            raise UsageError(
                f"`--kv-memory`: of the {format_size(memory.free)} that are free the largest step takes "
                f"{format_size(memory.step)}, which leaves no room for keys and values; lower --max-tokens-per-step "
                "or --max-num-seqs"
            )
        raise UsageError(f"`--kv-memory`: {budget} bytes hold {allowed} pages of {page} bytes, at least 2 are needed")
    return allowed


def _whole_mib(count: int) -> str:
    """A size that fits, written as the option takes it."""
    return f"{count >> 20}MiB"


def _page_bytes(spec: ModelSpec, page_size: int) -> int:
    return max(1, KVPool.page_bytes(list(spec.kv_layers), page_size, spec.dtype))


def most_pages(workload: Workload, page_size: int) -> int:
    """Pages with which nothing ever waits: every tree node and every sample's output in pages of their own, and the
    scratch page.

    Two partial pages may each be copied at either's beginning, and admission keeps a page free for each sample begun.
    """
    tree = workload.tree
    nodes = -(-(tree.end - tree.start).astype(np.int64) // page_size) + 1
    outputs = -(-workload.table.max_new_tokens.astype(np.int64) // page_size) + 2
    return int(nodes.sum() + (outputs * workload.samples).sum()) + 2


def device_memory(device: torch.device, step: int = 0) -> DeviceMemory:
    """What a device has now; `step`: bytes of the largest step."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch holds back, of loading and of measuring, is free
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(free, total, step, exclusive=True)
    memory = psutil.virtual_memory()
    return DeviceMemory(memory.available, memory.total, step)
