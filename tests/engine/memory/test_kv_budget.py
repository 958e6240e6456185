"""KV budget: a job's pool is as small as possible without sequences that wait for pages."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import batchgen
from batchgen.config.engine_config import EngineConfig
from batchgen.config.units import TotalShare
from batchgen.engine.engine import Engine
from batchgen.engine.machine import step_limits
from batchgen.engine.memory.kv_budget import (
    DeviceMemory,
    allowed_pages,
    cache_groups,
    pool_pages,
    sized_groups,
    with_job_windows,
    with_windows_in,
)
from batchgen.engine.workload import JobWorkload, plan_workload
from batchgen.errors import UsageError
from batchgen.kernels.types import KVPool, LayerKV
from batchgen.models.base import ModelSpec
from batchgen.plan.cache_groups import CacheGroup
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.plan.window_pages import WindowGroup
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable
from tests.cases import each
from tests.engine.reference import shared_prefix_prompts

_DEMO = str(Path(batchgen.__file__).parent / "demo" / "model")
_ROWS = [f"Sort: {i} 3 {7 * i % 11} 1" for i in range(9)] + ["Reverse: a b c d e f g h i j k l m n o p", "Sort: 9"]

LAYER = LayerKV(2, 8, 8)
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_layers": 1, "context_length": 512, "parameters": 1}
KINDS: dict[str, Any] = {"kv_layers": (LAYER,), "dtype": torch.float32, "device": torch.device("cpu")}
SPEC = ModelSpec(name="tiny", implementation="native", **SIZES, **KINDS)


STEP_LIMITS = [({}, (256, 1024)), ({"max_num_seqs": 2000}, (2000, 2000)), ({"max_tokens_per_step": 100}, (100, 100))]


@each("given, limits", STEP_LIMITS)
def test_limits_of_a_step_on_a_cpu(given: dict[str, int], limits: tuple[int, int]) -> None:
    assert step_limits(EngineConfig(model="m", **given), SPEC) == limits


GPU = torch.device("cuda")
GPU_KV: dict[str, Any] = {"dtype": torch.bfloat16, "device": GPU}
SMALL = replace(SPEC, parameters=600_000_000, kv_layers=(LayerKV(8, 128, 128),) * 28, **GPU_KV)
LARGE = replace(SPEC, parameters=8_000_000_000, kv_layers=(LayerKV(8, 128, 128),) * 36, **GPU_KV)


def test_a_gpu_runs_as_many_rows_as_its_memory_holds() -> None:
    """Rows of 200 shared and 16 own tokens, which generate 64: each holds 48 on average, and half a page."""
    table = RequestTable()
    params = SamplingParams(ignore_eos=True)
    for i in range(2100):
        table.append(i, 0, [5] * 200 + [i + 6] * 16, params, i, 64)
    job, config = plan_workload(table), EngineConfig(model="m", page_size=16)
    for gib, (spec, most) in itertools.product(
        [1, 2, 3, 8, 20, 70, 130], [(SMALL, (2048, 16384)), (LARGE, (1024, 8192))]
    ):
        memory = DeviceMemory(gib << 30, 141 << 30, exclusive=True)
        page = 16 * 2 * len(spec.kv_layers) * 8 * (128 + 128)
        held = max(1, int(((gib << 30) - int(0.02 * (141 << 30)) - 12 * page) / (3.5 * page)))
        assert step_limits(config, spec, job, memory) == (min(most[0], held), most[1])
        assert step_limits(replace(config, max_tokens_per_step=100), spec, job, memory) == (min(100, held), 100)
        assert step_limits(replace(config, max_num_seqs=3000), spec, job, memory) == (3000, max(3000, most[1]))
        assert step_limits(config, spec) == most

    memory = DeviceMemory(4 << 30, 141 << 30, exclusive=True)
    held, streams = step_limits(config, LARGE, job, memory)[0], EngineConfig(model="m", page_size=16, offload="kv")
    rows = [step_limits(streams, LARGE, job, replace(memory, host=gib << 30))[0] for gib in (0, 1, 2, 4, 8, 40)]
    assert rows == sorted(rows), "keys and values on the host make room for more"
    assert 0.9 * held < rows[0] < rows[2] < rows[-1] == 1024


PLENTY = DeviceMemory(1 << 42, 1 << 42)
LIMITS = (256, 1024)


def workload(seed: int, count: int = 60) -> JobWorkload:
    rng = np.random.default_rng(seed)
    table = RequestTable()
    for i, prompt in enumerate(shared_prefix_prompts(count, 64, seed)):
        params = SamplingParams(temperature=1.0, n=int(rng.integers(1, 4)))
        table.append(i, 0, prompt, params, i, int(rng.integers(1, 40)))
    return plan_workload(table)


def run(job: JobWorkload, pages: int, page_size: int, rows: int, **cache: Any) -> dict[str, int]:
    """Scheduler counters of the job if all samples reach their limit."""
    limits = {"max_num_seqs": rows, "max_tokens_per_step": rows + 64}
    config = SchedulerConfig(num_pages=pages, page_size=page_size, **limits, **cache)
    scheduler = Scheduler(job.tree, job.samples, job.table.max_new_tokens, config)
    left: dict[int, int] = {}
    while (plan := scheduler.step()) is not None:
        left |= {s.sequence: int(job.table.max_new_tokens[s.request]) for s in plan.starts}
        for sample in plan.samples:
            left[sample.sequence] -= 1
        ended = [s for s, count in left.items() if not count]
        scheduler.commit(ended)
        for sequence in ended:
            del left[sequence]
    return asdict(scheduler.stats)


@pytest.mark.parametrize(("seed", "page_size"), [(0, 1), (1, 4), (2, 16), (3, 16)])
def test_no_sequence_waits_for_pages(seed: int, page_size: int) -> None:
    job = workload(seed)
    pages = pool_pages(job, SPEC, page_size, 1 << 40, PLENTY, LIMITS)
    for rows in (8, 200):
        stats = run(job, pages, page_size, rows)
        assert stats == run(job, 50 * pages, page_size, rows)
        assert stats["preemptions"] == 0
        assert stats["peak_pages"] < pages


def test_a_shared_prefix_is_counted_once() -> None:
    table = RequestTable()
    for i in range(64):
        table.append(i, 0, [*range(1, 41), i], SamplingParams(temperature=0.0), i, 4)
    # 3 + 1 pages for the prefix, 1 + 1 for each prompt's last token, 1 + 2 for each output, and the scratch page.
    assert pool_pages(plan_workload(table), SPEC, 16, 1 << 40, PLENTY, LIMITS) <= 4 + 64 * 5 + 2


def test_kv_memory_bounds_the_pool() -> None:
    page = KVPool.page_bytes([LAYER], 16, torch.float32)
    assert pool_pages(workload(0), SPEC, 16, 7 * page, PLENTY, LIMITS) == 7
    with pytest.raises(UsageError, match="at least 2 are needed"):
        pool_pages(workload(0), SPEC, 16, page, PLENTY, LIMITS)


GIB = 1 << 30


def test_a_gpu_pool_uses_what_the_largest_step_leaves() -> None:
    memory = DeviceMemory(free=60 * GIB, total=80 * GIB, step=5 * GIB, exclusive=True)
    room = 60 * GIB - 5 * GIB - int(1.6 * GIB)
    assert memory.room == memory.budget(None) == pytest.approx(room, abs=2)
    assert memory.budget(0.5) == 40 * GIB
    assert memory.budget(7 * GIB) == 7 * GIB
    assert memory.budget(TotalShare(0.5)) == 40 * GIB - 20 * GIB - 5 * GIB, "20 GiB are in use"
    assert memory.budget(TotalShare(0.25)) == 0
    assert DeviceMemory(free=4 * GIB, total=80 * GIB, step=5 * GIB, exclusive=True).room == 0


def test_a_cpu_pool_uses_a_share_of_the_free_memory() -> None:
    assert DeviceMemory(10 * GIB, 16 * GIB, step=GIB).budget(None) == 4 * GIB
    assert DeviceMemory(10 * GIB, 16 * GIB, step=7 * GIB).budget(None) == 3 * GIB
    assert DeviceMemory(10 * GIB, 16 * GIB, step=7 * GIB).budget(8 * GIB) == 8 * GIB, "the step is an estimate"


def test_the_error_of_a_pool_that_does_not_fit_names_the_largest_size() -> None:
    page = KVPool.page_bytes([LAYER], 16, torch.float32)
    job = workload(0)
    needed = pool_pages(job, SPEC, 16, GIB, PLENTY, LIMITS) * page
    memory = DeviceMemory(free=5 << 20, total=80 * GIB, step=4 << 20, exclusive=True)
    memory = replace(memory, free=memory.step + int(memory.total * 0.02) + needed - 1)
    with pytest.raises(UsageError, match=r"do not fit .* largest step takes 4\.0 MiB; at most \d+MiB fit"):
        pool_pages(job, SPEC, 16, GIB, memory, LIMITS)
    assert pool_pages(job, SPEC, 16, GIB, replace(memory, free=memory.free + 1), LIMITS) * page == needed
    assert pool_pages(job, SPEC, 16, None, memory, LIMITS) * page <= memory.room
    with pytest.raises(UsageError, match=r"7\.0 GiB exceed the device's memory of 6\.0 GiB; at most 1024MiB fit"):
        pool_pages(job, SPEC, 16, 7 * GIB, DeviceMemory(GIB, 6 * GIB), LIMITS)
    with pytest.raises(UsageError, match=r"which leaves no room .* lower --max-tokens-per-step"):
        pool_pages(job, SPEC, 16, None, DeviceMemory(GIB, 2 * GIB, step=GIB, exclusive=True), LIMITS)


MIXED = replace(SPEC, kv_layers=(LAYER,) * 6, windows=(8, 8, 8, 8, 8, None))


@pytest.mark.parametrize("spec", [MIXED, replace(MIXED, windows=(8,) * 6)])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.15])
def test_both_kinds_of_layers_share_the_budget(spec: ModelSpec, share: float) -> None:
    """With enough memory no sequence waits for a page of either kind; with less, the job still ends."""
    job, limits = workload(1), (8, 72)

    def sized(budget: int) -> tuple[int, tuple[CacheGroup, ...], int]:
        """Pages of page tables, the groups, and their bytes."""
        pages = pool_pages(job, spec, 4, budget, PLENTY, limits)
        groups = sized_groups(job, spec, 4, pages, limits, budget)
        return pages, groups, sum(group.page_bytes * group.pool_pages(pages) for group in groups)

    budget = int(sized(1 << 40)[2] * share)
    pages, groups, size = sized(budget)
    assert size <= budget
    stats = run(job, pages, 4, 8, cache_groups=groups)
    held = groups[-1]
    assert isinstance(held, WindowGroup)
    assert stats["peak_window_pages"] < held.num_pages
    if share == 1.0:
        wide = (*groups[:-1], replace(held, num_pages=50 * held.num_pages))
        assert stats == run(job, 50 * pages, 4, 8, cache_groups=wide)


def test_windows_count_only_where_they_save_memory() -> None:
    job = workload(1)
    longest = int(max(np.diff(job.table.offsets) + job.max_tokens)) - 1
    assert with_job_windows(replace(MIXED, windows=(longest,) * 6), job, 4).windows == ()
    assert with_job_windows(replace(MIXED, windows=(longest - 1,) * 6), job, 4).windows == (longest - 1,) * 6
    full, held = cache_groups(MIXED, 4)
    assert isinstance(held, WindowGroup)
    least = 2 * full.page_bytes + held.page_bytes * held.least_pages(4)
    assert with_windows_in(MIXED, job, 4, least) is MIXED
    assert with_windows_in(MIXED, job, 4, least - 1).windows == ()


def test_the_pool_is_zero_and_writable() -> None:
    pool = KVPool.allocate([LayerKV(2, 8, 4)], 3, 16, torch.bfloat16, torch.device("cpu"))
    assert pool.keys[0].shape == (3, 16, 2, 8)
    assert pool.values[0].shape == (3, 16, 2, 4)
    assert pool.keys[0].dtype == torch.bfloat16
    assert not pool.keys[0].any()
    assert [tensor.data_ptr() % 64 for tensor in (*pool.keys, *pool.values)] == [0, 0]  # aligned to cache lines
    pool.keys[0][2] = 1
    assert pool.keys[0].sum() == 16 * 2 * 8


def test_memory_cached_by_torch_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1000]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(10_000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 20_000))
    spec = replace(SPEC, device=torch.device("cuda"))
    assert allowed_pages(spec, 1, None) == (10_000 - 400) // KVPool.page_bytes([LAYER], 1, torch.float32)


def test_the_last_pool_is_freed_before_the_next_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(_DEMO)
    pools: list[weakref.ref[torch.Tensor]] = []
    calls = []

    def measured(*given: Any) -> int:
        assert [pool() for pool in pools] == [None] * len(pools)
        calls.append(given)
        return 8 * len(calls)

    monkeypatch.setattr("batchgen.engine.engine.pool_pages", measured)
    for rows in (1, 2, 4):  # no job fits into the last one's pool
        list(engine.generate(["Sort: 3 1"] * rows, SamplingParams(max_new_tokens=2, n=rows)))
        pools.append(weakref.ref(engine.last_run.pool.parts[0].keys[0]))
    assert len(calls) == 3
    assert pools[-1]() is not None


def test_a_job_that_fits_reuses_the_last_pool() -> None:
    engine = Engine(_DEMO)
    first = _generated(engine, _ROWS)
    memory, pages = engine.last_run.pool.parts[0].keys[0].data_ptr(), engine.last_run.pool.num_pages
    one = _generated(engine, _ROWS[:1])
    assert engine.last_run.pool.parts[0].keys[0].data_ptr() == memory
    assert engine.last_run.pool.num_pages == engine.last_run.loop.state.kv_pages + 1 < pages
    assert one == first[:1]
    assert _generated(engine, _ROWS) == first, "the pool did not shrink with the small job"
    assert engine.last_run.pool.parts[0].keys[0].data_ptr() == memory
    assert engine.last_run.pool.num_pages == pages


@pytest.mark.parametrize("closed", [False, True])
def test_the_pool_of_a_running_job_is_not_reused(closed: bool) -> None:
    engine = Engine(_DEMO)
    whole = _generated(engine, _ROWS)
    running = engine.generate(_ROWS, SamplingParams(max_new_tokens=12), ordered=True)
    started = [next(running).text]
    memory = engine.last_run.pool.parts[0].keys[0].data_ptr()
    if closed:
        running.close()
    assert _generated(engine, _ROWS) == whole
    assert (engine.last_run.pool.parts[0].keys[0].data_ptr() == memory) is closed
    if not closed:
        assert started + [completion.text for completion in running] == whole


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"attention": "torch"}, {"deterministic": True}])
def test_the_last_job_s_values_in_a_reused_pool_are_not_read(options: dict[str, Any]) -> None:
    engine = Engine(_DEMO, **options)
    first = _generated(engine, _ROWS)
    for tensor in (*engine.last_run.pool.parts[0].keys, *engine.last_run.pool.parts[0].values):
        tensor.fill_(math.nan)
    assert _generated(engine, _ROWS) == first


def _generated(engine: Engine, rows: Sequence[str]) -> list[str | None]:
    return [done.text for done in engine.generate(rows, SamplingParams(max_new_tokens=12), ordered=True)]
