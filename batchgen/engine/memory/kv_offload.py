"""Whether the keys and values of a job are streamed, and how many pages it gets then (`--offload`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from batchgen.config.engine_config import EngineConfig
from batchgen.engine.memory.kv_budget import DeviceMemory, Needs, cache_groups, expected_pages, most_pages, rows_held
from batchgen.engine.workload import JobWorkload
from batchgen.errors import UsageError
from batchgen.kernels.stream import StreamPlan, plan_stream
from batchgen.kernels.types import KVPool
from batchgen.models.base import ModelSpec
from batchgen.request.printable import format_size


def plan_pages(
    page_bytes: Sequence[int], wanted: int, device: int, host: int, others: Callable[[int], int] = lambda pages: 0
) -> tuple[int, StreamPlan]:
    """How many pages layers get, at most `wanted`, and the plan that streams the fewest layers, which are its blocks.

    `page_bytes`: of each layer; `device`, `host`: bytes for pages; `others`: those of other caches next to so many.
    """

    def plan(pages: int) -> StreamPlan:
        return plan_stream([size * pages for size in page_bytes], others(pages), device)

    def exceeds(pages: int) -> bool:
        return (found := plan(pages)).device_bytes > device or found.pass_bytes > host

    pages = bisect_left(range(1, wanted + 1), True, key=exceeds)
    return pages, plan(pages)


def kv_refusal(config: EngineConfig, spec: ModelSpec) -> str | None:
    """Why the keys and values of a model are not streamed; None: they can be."""
    layers = cache_groups(spec, config.page_size)[0].layers if not spec.windows or None in spec.windows else ()
    if spec.bidirectional == "text":
        return f"a {spec.name} encoder keeps no keys and values"
    if len(layers) < 2 or len({spec.kv_layers[layer] for layer in layers}) > 1:
        return f"a {spec.name} model has no two layers of one size that see all positions"
    if spec.ranks.count > 1:
        return "with --tensor-parallel keys and values stay on the devices"
    if config.deterministic:
        return "--deterministic computes a step in several passes"
    return None


def streamed_cache(
    config: EngineConfig, spec: ModelSpec, workload: JobWorkload, device: int, host: int, limits: tuple[int, int]
) -> tuple[int, StreamPlan] | None:
    """Pages of a job whose keys and values are streamed, with the scratch page, and which layers; None: they are not.

    `kv` streams what does not fit. `auto` does if a pass then copies fewer bytes for each row that runs at once, or if
    the longest row does not fit otherwise.

    `spec`: with the windows that count in this job; `device`, `host`: bytes for keys and values; `limits`: most rows
    and most tokens of a step.

    Raises:
        UsageError: with `kv`, not even one row's layer fits the device, or the host.
    """
    groups, size, samples = cache_groups(spec, config.page_size), config.page_size, int(workload.samples.sum())
    if config.offload not in ("auto", "kv") or not samples or kv_refusal(config, spec) is not None:
        return None
    rows, needs = min(limits[0], samples), Needs(workload, spec, size, limits, device)
    shared, each = expected_pages(workload, config)
    longest = (np.diff(workload.table.offsets) + workload.max_tokens)[workload.samples > 0].max()
    least, wanted = int(longest) // size + 2, most_pages(workload, size)
    if samples > rows:
        wanted = min(wanted, max(least, int(shared + each * rows)) + rows + 2)
    sizes = [KVPool.page_bytes([spec.kv_layers[layer]], size, spec.kv_dtype) for layer in groups[0].layers]

    def others(pages: int) -> int:
        return sum(group.page_bytes * group.pool_pages(pages) for group in needs.sized(pages)[1:])

    pages, plan = plan_pages(sizes, wanted, device, host, others)
    if pages < 2 and config.offload == "kv":
        raise UsageError(
            f"`--offload kv`: {format_size(device)} of the device and {format_size(host)} of the host do not hold "
            "two pages of keys and values; raise --kv-memory or --device-memory"
        )
    if pages < 2 or not plan.streamed:
        return None
    if config.offload == "auto":
        whole = plan_pages([sum(sizes)], wanted, device, 0, others)[0]
        now, then = ((max(1.0, min(rows, (count - shared) / each))) for count in (whole, pages))
        weights = 0 if spec.stream is None else spec.stream.pass_bytes
        copied = plan.pass_bytes * min(1.0, (shared + each * then) / pages)
        if whole >= least and (weights + copied) / then >= weights / now:
            return None
    return pages, plan


def rows_at_once(
    workload: JobWorkload, spec: ModelSpec, config: EngineConfig, memory: DeviceMemory, limits: tuple[int, int]
) -> int:
    """Most rows of a step, at most those of `limits`: as many as the memory holds, on the host as well if it may."""
    streamed = streamed_cache(config, spec, workload, memory.budget(config.kv_budget), memory.host, limits)
    if streamed is None:
        return min(limits[0], rows_held(workload, spec, config, memory))
    shared, each = expected_pages(workload, config)
    return max(1, min(limits[0], int((streamed[0] - shared) / each)))
