"""KV budget: how many KV pages a job gets from the device's memory, next to the job's largest step.

This module only counts bytes. The size of the largest step is measured on a GPU and estimated on a CPU, where other
programs share the memory (`dummy_run`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import psutil
import torch

from batchgen.config.engine_config import EngineConfig
from batchgen.config.units import TotalShare
from batchgen.engine.workload import JobWorkload
from batchgen.errors import UsageError
from batchgen.kernels.types import KVPool
from batchgen.models.base import ModelSpec, windows_within
from batchgen.plan.cache_groups import CacheGroup, held_groups
from batchgen.plan.length_predictor import LengthPredictor
from batchgen.plan.order import pages_held
from batchgen.plan.state_slots import StateGroup
from batchgen.plan.tree import user_counts
from batchgen.plan.window_pages import WindowGroup
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
    host: int = 0
    """Bytes of the host's memory for keys and values that are streamed"""

    @property
    def room(self) -> int:
        """Most bytes of the pool."""
        if not self.exclusive:
            return self.free
        return max(0, self.free - self.step - int(self.total * RESERVE))

    def budget(self, kv_memory: int | float | None) -> int:
        """Bytes allowed by `--kv-memory`: a number of bytes, a share of the device's memory, or None for the default.

        A `TotalShare` is what the weights, the largest step and other programs leave of it.
        The default is all room on a GPU; on a CPU it is `AUTO_SHARE` of the free memory, at most what the step leaves.
        """
        if kv_memory is None:
            return self.room if self.exclusive else max(0, min(int(self.free * AUTO_SHARE), self.free - self.step))
        if isinstance(kv_memory, TotalShare):
            return max(0, int(self.total * kv_memory) - (self.total - self.free) - self.step)
        return int(self.total * kv_memory) if isinstance(kv_memory, float) else kv_memory


def pool_pages(
    workload: JobWorkload,
    spec: ModelSpec,
    page_size: int,
    kv_memory: int | float | None,
    memory: DeviceMemory,
    limits: tuple[int, int],
) -> int:
    """Pages to allocate, including the scratch page: as many as the job can use within the memory budget.

    Layers with a window have others (`sized_groups`). If all have a window, pages cost nothing and are not limited.
    `kv_memory`: as for `allowed_pages`; `limits`: most sequences at once and most tokens in a step.

    Raises:
        UsageError: the budget holds less than two pages, or exceeds the free memory.
    """
    allowed, most = allowed_pages(spec, page_size, kv_memory, memory), most_pages(workload, page_size)
    budget = memory.budget(kv_memory)
    needs = Needs(workload, spec, page_size, limits, min(budget, memory.room))

    def bytes_of(pages: int) -> int:
        return sum(group.page_bytes * group.pool_pages(pages) for group in needs.sized(pages))

    if not any(spec.windows):
        pages = min(allowed, most)
    elif all(spec.windows):
        pages = most
    else:
        pages = max(2, bisect_right(range(most + 1), budget, key=bytes_of) - 1)
    pool_bytes = bytes_of(pages)
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

    `kv_memory`: bytes (int), a share of the device's memory (float), or None for the default; `memory`: the device's,
    queried if None.

    Raises:
        UsageError: the budget holds less than two pages, or exceeds the device's memory.
    """
    page = sum(group.page_bytes for group in cache_groups(spec, page_size))
    memory = device_memory(spec.device) if memory is None else memory
    budget = memory.budget(kv_memory)
    if budget > memory.total:
        raise UsageError(
            f"`--kv-memory`: {format_size(budget)} exceed the device's memory of {format_size(memory.total)}; "
            f"at most {_whole_mib(memory.room)} fit now"
        )
    allowed = budget // max(1, page)
    if allowed < 2:
        if kv_memory is None:
            raise UsageError(
                f"`--kv-memory`: the largest step takes {format_size(memory.step)} of {format_size(memory.free)} of "
                "free memory, which leaves no room for keys and values; lower --max-tokens-per-step or "
                "--max-num-seqs, or add `--offload auto`"
            )
        raise UsageError(f"`--kv-memory`: {budget} bytes hold {allowed} pages of {page} bytes, at least 2 are needed")
    return allowed


def _whole_mib(count: int) -> str:
    """A size in whole MiB, in the option's format."""
    return f"{count >> 20}MiB"


def cache_groups(spec: ModelSpec, page_size: int) -> tuple[CacheGroup, ...]:
    """The caches that a model's layers keep: a group of those without a window, and one of those with a window."""
    windows = spec.windows or (None,) * len(spec.kv_layers)
    attends = [bool(layer.position_size) for layer in spec.kv_layers]
    full = tuple(layer for layer, window in enumerate(windows) if window is None and attends[layer])
    held = tuple(layer for layer, window in enumerate(windows) if window is not None)

    def page_bytes(layers: Sequence[int]) -> int:
        return KVPool.page_bytes([spec.kv_layers[layer] for layer in layers], page_size, spec.kv_dtype)

    groups: list[CacheGroup] = []
    if full or not held:
        groups.append(CacheGroup(full, page_bytes(full)))
    if held:
        groups.append(WindowGroup(held, page_bytes(held), max(filter(None, windows))))
    return tuple(groups)


def state_group(spec: ModelSpec) -> StateGroup:
    """The group of a model's recurrent states, without a size."""
    return StateGroup(tuple(layer for layer, sizes in enumerate(spec.states) if sizes), spec.state_bytes)


def sized_states(spec: ModelSpec, workload: JobWorkload, rows: int, budget: int) -> StateGroup | None:
    """The group of recurrent states with its slots, in at most half of `budget` bytes; None: the model has none.

    With enough memory no row waits for a slot: the running ones have one each, as have the nodes that they begin at.

    Raises:
        UsageError: the budget does not hold the states of a row.
    """
    if not spec.states:
        return None
    group = state_group(spec)
    least = group.least_pages(1)
    allowed = budget // 2 // group.page_bytes
    if allowed < least:
        raise UsageError(
            f"`--kv-memory`: half of {format_size(budget)} holds {allowed} recurrent states of "
            f"{format_size(group.page_bytes)}, at least {least} are needed; raise it"
        )
    running = min(rows, int(workload.samples.sum(dtype=np.int64)))
    return replace(group, num_pages=min(allowed, running + min(running, len(workload.tree)) + least))


def with_job_windows(spec: ModelSpec, workload: JobWorkload, page_size: int) -> ModelSpec:
    """The model without windows that no row of the job is longer than.

    Raises:
        UsageError: a page would hold positions of two attention chunks.
    """
    if not spec.windows:
        return spec
    active = workload.samples > 0
    lengths = (np.diff(workload.table.offsets).astype(np.int64) + workload.max_tokens - 1)[active]
    windows, chunk = windows_within(spec.windows, int(lengths.max(initial=0))), spec.attention_chunk
    if chunk in windows and chunk is not None and chunk % page_size:
        raise UsageError(f"`--page-size` {page_size} does not divide the model's attention chunks of {chunk} tokens")
    return replace(spec, windows=windows)


def with_windows_in(spec: ModelSpec, workload: JobWorkload, page_size: int, budget: int) -> ModelSpec:
    """The model without its windows if `budget` bytes do not hold what `WindowGroup.least_pages` asks for."""
    groups, span, chunk = cache_groups(spec, page_size), workload.longest_span, spec.attention_chunk
    size = sum(group.page_bytes * group.least_pages(page_size, span) for group in groups)
    if not held_groups(groups) or size <= budget:
        return spec
    if chunk is not None:
        raise UsageError(
            f"`--kv-memory`: {format_size(budget)} do not hold the {format_size(size)} that layers which attend in "
            f"chunks of {chunk:,} tokens need; raise it, or lower --max-model-len to {chunk}"
        )
    return replace(spec, windows=())


def sized_groups(
    workload: JobWorkload, spec: ModelSpec, page_size: int, pages: int, limits: tuple[int, int], budget: int
) -> tuple[CacheGroup, ...]:
    """The cache groups, those with a window with their number of pages, including the scratch page.

    They get what the budget leaves. With enough memory no sequence ever waits for one of them. With less, they get a
    share: what the job's samples keep of a window, against the whole length of its nodes and outputs.

    `pages`: of the layers without a window, including the scratch page; `limits`: most sequences at once and most
    tokens in a step; `budget`: bytes of the pool.
    """
    return Needs(workload, spec, page_size, limits, budget).sized(pages)


def rows_held(workload: JobWorkload, spec: ModelSpec, config: EngineConfig, memory: DeviceMemory) -> int:
    """About how many samples of a job the memory holds at once, next to one shared prefix, at their expected lengths.

    Layers with a window hold at most the window of a sample.
    """
    (shared, each), page_size = expected_pages(workload, config), config.page_size
    used, row = 0.0, 0.0
    for group in cache_groups(spec, page_size):
        most = group.most_pages(page_size) if isinstance(group, WindowGroup) else math.inf
        used += group.page_bytes * min(shared, most)
        row += group.page_bytes * min(each if most == math.inf else shared + each, most)
    row += state_group(spec).page_bytes if spec.states else 0
    return max(1, int((memory.budget(config.kv_budget) - used) / row))


def expected_pages(workload: JobWorkload, config: EngineConfig) -> tuple[int, float]:
    """See `pages_held`, at the expected lengths."""
    kinds = workload.kinds(repeats_end=config.stop_on_repeat is not None)
    expected = LengthPredictor(workload.max_tokens, kinds).expected
    return pages_held(workload.tree, workload.samples, expected, config.page_size)


class Needs:
    """How many pages of the groups with a window a job uses, given those of page tables."""

    def __init__(
        self, workload: JobWorkload, spec: ModelSpec, page_size: int, limits: tuple[int, int], budget: int
    ) -> None:
        """As in `sized_groups`."""
        self._groups = groups = cache_groups(spec, page_size)
        rows, tokens = min(limits[0], int(workload.samples.sum(dtype=np.int64))), limits[1]
        self._chunks = -(-tokens // page_size) + rows
        self._budget = budget
        held = [group for group in groups if isinstance(group, WindowGroup)]
        self._held_bytes = sum(group.page_bytes for group in held)
        self._table_bytes = sum(group.page_bytes for group in groups) - self._held_bytes
        self._needs = {group: self._of(group, workload, page_size, rows) for group in held}

    def _of(self, group: WindowGroup, workload: JobWorkload, page_size: int, rows: int) -> tuple[int, int, float]:
        """Fewest and most pages of a group, and the share that it keeps of those of page tables."""
        each, least = group.most_pages(page_size) + 1, group.least_pages(page_size, workload.longest_span)
        share = _window_share(workload, page_size, each) if self._table_bytes else 0.0
        # The windows of the samples, and of the nodes that they begin at.
        return least, 2 * rows * each + self._chunks + least, share

    def sized(self, pages: int) -> tuple[CacheGroup, ...]:
        """The groups, where page tables have `pages`."""
        return tuple(self._sized(group, pages) if isinstance(group, WindowGroup) else group for group in self._groups)

    def _sized(self, group: WindowGroup, pages: int) -> WindowGroup:
        least, most, share = self._needs[group]
        kept = int(pages * share)
        left = (self._budget - pages * self._table_bytes) // self._held_bytes
        wanted = max(left, kept + min(self._chunks, kept // 4))
        return replace(group, num_pages=max(least, min(most, pages, wanted)))


def _window_share(workload: JobWorkload, page_size: int, each: int) -> float:
    """Pages of a window, of `each` at most, that samples and the nodes at which several begin keep, by `most_pages`."""
    tree, table = workload.tree, workload.table
    lengths = tree.end[tree.node_of_request].astype(np.int64) + table.max_new_tokens
    kept = np.dot(np.minimum(lengths // page_size + 1, each), workload.samples)
    users = np.frombuffer(user_counts(tree, workload.samples)[0], np.int32)
    branching = (tree.end - tree.start)[users > 1]
    kept += np.minimum(branching // page_size + 1, each).sum(dtype=np.int64)
    return float(kept) / most_pages(workload, page_size)


def most_pages(workload: JobWorkload, page_size: int) -> int:
    """Number of pages with which no sequence ever waits for one: separate pages for each tree node and each output.

    Includes the scratch page, partial pages that are copied where a node or output starts, and the page that admission
    keeps free for each running sequence.
    """
    tree = workload.tree
    nodes = -(-(tree.end - tree.start) // page_size) + 1
    outputs = -(-workload.table.max_new_tokens // page_size) + 2
    return int(nodes.sum(dtype=np.int64) + np.dot(outputs.astype(np.int64), workload.samples)) + 2


def job_memory(config: EngineConfig, spec: ModelSpec, step: int = 0) -> DeviceMemory:
    """The memory of the device that a job may use, with its weights loaded; `step`: as for `device_memory`.

    A CPU in the place of a device has the memory of `--device-memory` without the weights that are on the device.
    """
    host = int(psutil.virtual_memory().available * AUTO_SHARE)
    memory, total = replace(device_memory(spec.device, step), host=host), config.device_memory
    if total is None:
        return memory
    if spec.device.type == "cuda":
        total = min(total, memory.total)
        left = max(0, total - torch.cuda.memory_allocated(spec.device))
        return replace(memory, total=total, free=min(memory.free, left))
    weights = 0 if spec.stream is None else spec.stream.device_bytes
    return DeviceMemory(max(0, total - weights), total, step, exclusive=True, host=host)


def device_memory(device: torch.device, step: int = 0) -> DeviceMemory:
    """The device's current memory; `step`: bytes of the largest step."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that PyTorch caches after loading and measuring is free
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(free, total, step, exclusive=True)
    memory = psutil.virtual_memory()
    return DeviceMemory(memory.available, memory.total, step)
