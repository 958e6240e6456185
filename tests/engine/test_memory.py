"""The pool of a small job: as small as it can be without anything ever waiting for a page."""

from __future__ import annotations

import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import batchgen
from batchgen.engine.engine import Engine
from batchgen.engine.memory import allowed_pages, pool_pages
from batchgen.engine.planning import Workload, plan_workload
from batchgen.errors import UsageError
from batchgen.kernels.types import KVPool, LayerKV
from batchgen.models.base import ModelSpec
from batchgen.params import SamplingParams
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.request import RequestTable
from tests.engine.reference import shared_prefix_prompts

LAYER = LayerKV(2, 8, 8)
SPEC = ModelSpec(
    name="tiny",
    implementation="native",
    vocab_size=64,
    hidden_size=16,
    num_layers=1,
    context_length=512,
    kv_layers=(LAYER,),
    dtype=torch.float32,
    device=torch.device("cpu"),
    parameters=1,
    digest="",
)


def workload(seed: int, count: int = 60) -> Workload:
    rng = np.random.default_rng(seed)
    table = RequestTable()
    for i, prompt in enumerate(shared_prefix_prompts(count, 64, seed)):
        params = SamplingParams(temperature=1.0, n=int(rng.integers(1, 4)))
        table.append(i, 0, prompt, params, i, int(rng.integers(1, 40)))
    return plan_workload(table)


def run(job: Workload, pages: int, page_size: int, rows: int) -> dict[str, int]:
    """Counted work of the job with samples that all reach their limit."""
    config = SchedulerConfig(num_pages=pages, page_size=page_size, max_num_seqs=rows, max_tokens_per_step=rows + 64)
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


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_waits_for_pages(seed: int, page_size: int) -> None:
    job = workload(seed)
    pages = pool_pages(job, SPEC, page_size, 1 << 40)
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
    assert pool_pages(plan_workload(table), SPEC, 16, 1 << 40) <= 4 + 64 * 5 + 2


def test_memory_allowed_bounds_the_pool() -> None:
    page = KVPool.page_bytes([LAYER], 16, torch.float32)
    assert pool_pages(workload(0), SPEC, 16, 7 * page) == 7
    with pytest.raises(UsageError, match="at least 2 are needed"):
        pool_pages(workload(0), SPEC, 16, page)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_is_zero_and_writable(dtype: torch.dtype) -> None:
    pool = KVPool.allocate([LayerKV(2, 8, 4)], 3, 16, dtype, torch.device("cpu"))
    assert pool.keys[0].shape == (3, 16, 2, 8)
    assert pool.values[0].shape == (3, 16, 2, 4)
    assert pool.keys[0].dtype == dtype
    assert not pool.keys[0].any()
    pool.keys[0][2] = 1
    assert pool.keys[0].sum() == 16 * 2 * 8


def test_memory_that_torch_holds_back_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1000]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(10_000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 20_000))
    spec = replace(SPEC, device=torch.device("cuda"))
    assert allowed_pages(spec, 1, None) == 4000 // KVPool.page_bytes([LAYER], 1, torch.float32)


def test_a_job_begins_when_the_last_ones_pool_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(str(Path(batchgen.__file__).parent / "demo" / "model"))
    pools: list[weakref.ref[torch.Tensor]] = []

    def measured(*given: Any) -> int:
        assert [pool() for pool in pools] == [None] * len(pools)
        return 8

    monkeypatch.setattr("batchgen.engine.engine.pool_pages", measured)
    for _ in range(3):
        list(engine.generate(["Sort: 3 1"], SamplingParams(max_new_tokens=2)))
        assert engine.last_run is not None
        pools.append(weakref.ref(engine.last_run.pool.keys[0]))
    assert pools[-1]() is not None
