"""`OOMSplitter`: steps that do not fit into memory, run in parts, with a simulated pool and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.memory.oom import OOMSplitter, Part, is_out_of_memory
from batchgen.errors import DeviceError
from batchgen.plan.scheduler import SchedulerConfig
from batchgen.plan.step_plan import DecodeRow, DecodeRows, PrefillChunk, SampleRow, SampleRows, StepPlan
from tests.cases import each
from tests.plan.simulator import Simulator
from tests.plan.test_scheduler import tight_jobs

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"


class Short(Simulator):
    """Runs each step with an `OOMSplitter`, on a device that sometimes fails before, during or after the work."""

    def arm(self, random: Random, tokens: int, samples: int) -> None:
        self.random, self.most, self.lag = random, (tokens, samples), 1
        self.oom_splitter = OOMSplitter(self.size, self.config.max_tokens_per_step, lambda: None)
        self.checked = True

    def execute(self, plan: StepPlan) -> None:
        begin = replace(plan, prefills=[], decodes=DecodeRows.of([]), groups=[], samples=SampleRows.of([]))
        super().execute(begin)
        parts = self.oom_splitter.run(replace(plan, starts=[], copies=[]), self.part)
        assert [(s.sequence) for part in parts for s in part.plan.samples] == [s.sequence for s in plan.samples]
        assert all(part.result for part in parts)

    def part(self, plan: StepPlan) -> list[int]:
        assert plan.tokens <= self.oom_splitter.limit
        if plan.tokens > self.most[0] or len(plan.samples) > self.most[1]:
            raise torch.OutOfMemoryError(FULL)
        super().execute(plan)
        if plan.tokens + len(plan.samples) > 2 and self.random.random() < 0.1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return [len(plan.samples)]

    def check_groups(self, plan: StepPlan) -> None:
        """Tested with the split."""


@settings(max_examples=80, deadline=None)
@given(tight_jobs(), st.sampled_from([1, 2, 5, 99]), st.sampled_from([1, 3, 99]), st.randoms(use_true_random=False))
def test_jobs_end_for_any_memory_limit(
    job: tuple[list[tuple], SchedulerConfig], tokens: int, samples: int, random: Random
) -> None:
    rows, config = job
    sim = Short([r[0] for r in rows], [r[1] for r in rows], [max(r[1], default=1) for r in rows], config)
    sim.arm(random, tokens, samples)
    sim.run()


def decodes(count: int) -> StepPlan:
    return StepPlan(
        decodes=DecodeRows.of(DecodeRow(i, 3, [i + 1]) for i in range(count)),
        samples=SampleRows.of(SampleRow(i, i) for i in range(count)),
    )


class Device:
    """Runs plans of at most `tokens`, and none with a poisoned sequence or prompt position."""

    def __init__(self, tokens: int = 1 << 30, poison: Callable[[StepPlan], bool] = lambda plan: False) -> None:
        self.tokens, self.poison = tokens, poison
        self.tried: list[int] = []
        self.released = 0

    def release(self) -> None:
        self.released += 1

    def __call__(self, plan: StepPlan) -> list[int]:
        self.tried.append(plan.tokens)
        if plan.tokens > self.tokens or self.poison(plan):
            raise torch.OutOfMemoryError(FULL)
        return [s.sequence for s in plan.samples]


def sequences(parts: list[Part[list[int]]]) -> tuple[list[int], list[int]]:
    """(drawn, failed)"""
    drawn = [s for part in parts if part.result is not None for s in part.result]
    return drawn, [s.sequence for part in parts if part.result is None for s in part.plan.samples]


def test_a_step_that_fits_is_run_once() -> None:
    device = Device()
    oom_splitter = OOMSplitter(4, 64, device.release)
    assert sequences(oom_splitter.run(decodes(64), device)) == (list(range(64)), [])
    assert (device.tried, device.released, oom_splitter.retries, oom_splitter.limit) == ([64], 0, 0, 64)


def test_steps_start_smaller_after_one_did_not_fit() -> None:
    device = Device(20)
    oom_splitter = OOMSplitter(4, 64, device.release)
    assert sequences(oom_splitter.run(decodes(64), device)) == (list(range(64)), [])
    assert device.tried == [64, 32, 16, 16, 32, 16, 16]
    assert (oom_splitter.limit, oom_splitter.retries, device.released) == (32, 3, 3)
    device.tried.clear()
    oom_splitter.run(decodes(60), device)
    assert device.tried == [32, 16, 16, 28, 14, 14]
    assert oom_splitter.limit == 16
    device.tried.clear()
    oom_splitter.run(decodes(60), device)
    assert device.tried == [16, 16, 16, 12]
    assert oom_splitter.limit == 16


def test_only_a_row_that_never_fits_fails() -> None:
    device = Device(poison=lambda plan: any(row.sequence == 11 for row in plan.decodes))
    oom_splitter = OOMSplitter(4, 64, device.release)
    parts = oom_splitter.run(decodes(64), device)
    assert sequences(parts) == ([*range(11), *range(12, 64)], [11])
    assert [part.problem for part in parts if part.result is None] == [FULL.split("\n")[0]]
    assert oom_splitter.limit == 64, "a row that fails alone does not lower the limit"


def covers(request: int, position: int) -> Callable[[StepPlan], bool]:
    return lambda plan: any(c.request == request and c.start <= position < c.end for c in plan.prefills)


def test_positions_after_one_that_does_not_fit_are_not_tried() -> None:
    chunks = [PrefillChunk(0, None, 0, 8, [1, 2]), PrefillChunk(1, None, 0, 1000, list(range(9, 259)))]
    plan = StepPlan(
        prefills=[*chunks, PrefillChunk(2, None, 0, 8, [3, 4])],
        decodes=decodes(9).decodes,
        samples=SampleRows.of([SampleRow(20, 7), SampleRow(21, 1007), SampleRow(22, 1015)]),
    )
    device = Device(poison=covers(1, 100))
    oom_splitter = OOMSplitter(4, 2000, device.release)
    parts = oom_splitter.run(plan, device)
    assert sequences(parts) == ([20, 22], [21])
    assert len(device.tried) < 30
    failed = [(c.start, c.end) for part in parts if part.result is None for c in part.plan.prefills]
    assert failed[0] == (100, 101)
    assert failed[-1][1] == 1000
    run = [(c.request, c.start, c.end) for part in parts if part.result is not None for c in part.plan.prefills]
    assert sum(end - start for request, start, end in run if request == 1) == 100


def test_decode_rows_may_run_first() -> None:
    """A failed position of a chunk fails the rest of the chunk, and a failed row nothing else."""
    rows = decodes(9).decodes
    samples = [SampleRow(20, 7), SampleRow(21, 27), *(SampleRow(i, 28 + i) for i in range(9))]
    chunks = [PrefillChunk(7, None, 0, 8, [1, 2]), PrefillChunk(8, None, 0, 20, [3, 4, 5, 6, 7])]
    plan = StepPlan(prefills=chunks, decodes=rows, samples=SampleRows.of(samples))
    device = Device()
    oom_splitter = OOMSplitter(4, 64, device.release)
    assert sequences(oom_splitter.run(plan, device, decodes_first=True)) == ([*range(9), 20, 21], [])
    assert device.tried == [9, 28]
    failing = covers(8, 10)
    device = Device(poison=lambda part: failing(part) or any(row.sequence == 3 for row in part.decodes))
    parts = oom_splitter.run(plan, device, decodes_first=True)
    assert sequences(parts) == ([0, 1, 2, *range(4, 9), 20], [3, 21])
    assert oom_splitter.limit == 64, "rows that fail alone do not lower the limit"


def test_logits_that_do_not_fit_do_not_fail_the_prompt() -> None:
    chunk = PrefillChunk(0, None, 0, 9, [1, 2, 3])
    plan = StepPlan(prefills=[chunk], samples=SampleRows.of(SampleRow(i, 8) for i in range(6)))
    device = Device(poison=lambda plan: any(s.sequence == 4 for s in plan.samples))
    parts = OOMSplitter(4, 64, device.release).run(plan, device)
    assert sequences(parts) == ([0, 1, 2, 3, 5], [4])
    assert all(not c.store for part in parts if part.result is None for c in part.plan.prefills)


def test_consecutive_rows_that_fail_alone_are_a_device_error() -> None:
    device = Device(0)
    oom_splitter = OOMSplitter(4, 64, device.release)
    for _ in range(2):
        assert sequences(oom_splitter.run(decodes(1), device)) == ([], [0])
    oom_splitter.run(StepPlan(prefills=[PrefillChunk(0, None, 0, 9, [1, 2, 3])]), lambda plan: [])  # samples no token
    with pytest.raises(DeviceError, match=r"for 3 rows, .*Tried to allocate 2\.00 GiB"):
        oom_splitter.run(decodes(1), device)
    with pytest.raises(DeviceError):
        OOMSplitter(4, 64, device.release).run(decodes(8), device)


def test_a_sampled_token_in_between_avoids_a_device_error() -> None:
    oom_splitter = OOMSplitter(4, 64, lambda: None)
    for _ in range(5):
        assert sequences(oom_splitter.run(decodes(1), Device(0))) == ([], [0])
        oom_splitter.run(decodes(1), Device())
    device = Device(poison=lambda plan: any(row.sequence < 5 for row in plan.decodes))
    assert sequences(oom_splitter.run(decodes(6), device)) == ([5], [0, 1, 2, 3, 4])


def test_other_errors_are_raised_unchanged() -> None:
    def run(plan: StepPlan) -> int:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        OOMSplitter(4, 64, lambda: None).run(decodes(4), run)


def test_tensors_of_a_failed_try_are_freed_before_the_next() -> None:
    alive: list[int] = []
    held: set[object] = set()

    class Kept:
        def __init__(self) -> None:
            held.add(id(self))
            self.me = self

        def __del__(self) -> None:
            held.discard(id(self))

    def run(plan: StepPlan) -> int:
        alive.append(len(held))
        mine = Kept()
        if plan.tokens > 1:
            raise torch.OutOfMemoryError(FULL)
        del mine.me
        return 1

    OOMSplitter(4, 64, lambda: alive.append(len(held))).run(decodes(4), run)
    assert set(alive) == {0}


MEMORY_ERRORS = [
    torch.OutOfMemoryError("x"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
OTHERS = [RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("out of memory")]


@each("problem", [*MEMORY_ERRORS, *OTHERS])
def test_out_of_memory_errors_are_recognised(problem: Exception) -> None:
    assert is_out_of_memory(problem) == (problem in MEMORY_ERRORS)
