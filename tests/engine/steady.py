"""Runs a job on the simulated GPU and counts the transfers and waits of each step."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from batchgen.engine.engine import Engine
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.step_plan import StepPlan
from batchgen.request.completion import Completion
from tests.engine.fake_cuda import Sync, fake_cuda
from tests.engine.fake_device import Counts, Wait

__all__ = ["Job", "Step", "run_job", "steady_steps"]


@dataclass(frozen=True, slots=True)
class Step:
    """Counts between two plans."""

    plan: StepPlan
    syncs: list[Sync]
    copies: list[str]
    """Lines that copied pinned memory without the `Device`."""
    uploads: int
    uploads_into: int
    downloads: Counter[str]
    replays: int


@dataclass(frozen=True, slots=True)
class Job:
    """Results and counts of a whole job."""

    done: list[Completion]
    steps: list[Step]
    syncs: list[Sync]
    """Host waits from the first step on; the start of a job may wait"""
    waits: list[Wait]
    """Waits for tokens, from the first step on"""
    counts: Counts
    """Counts of the whole run, including its start"""


def run_job(folder: Path, work: list[dict[str, Any]], *, run_dummy: bool = False, **options: Any) -> Job:
    """Run the rows `work` on the simulated GPU with Triton's kernels.

    `run_dummy`: also run the dummy run first, as on a GPU, which takes as long as the job.
    """
    options = {"max_num_seqs": 8, "max_tokens_per_step": 32, "page_size": 4, **options}
    with fake_cuda(captures=options.pop("captures", False)) as gpu:
        engine = Engine(str(folder), attention="triton", dtype="float32", device="cuda", **options)
        snapshots: list[tuple[StepPlan | None, int, int, Counts]] = []
        plan_step = Scheduler.step

        def step(scheduler: Scheduler) -> StepPlan | None:
            plan = plan_step(scheduler)
            counts = gpu.device.counts
            snapshots.append((plan, len(gpu.syncs), len(gpu.copies), deepcopy(counts)))
            return plan

        with ExitStack() as stack:
            stack.enter_context(patch.object(Scheduler, "step", step))
            if not run_dummy:
                stack.enter_context(patch("batchgen.engine.engine.measure_largest_step", lambda *args: (0, args[4][1])))
            done = list(engine.generate(work, ordered=True))
        steps = []
        for (plan, syncs, copies, before), (_, next_syncs, next_copies, after) in pairwise(snapshots):
            if plan is not None:
                steps.append(
                    Step(
                        plan,
                        gpu.syncs[syncs:next_syncs],
                        gpu.copies[copies:next_copies],
                        after.uploads - before.uploads,
                        after.uploads_into - before.uploads_into,
                        Counter(after.downloads) - Counter(before.downloads),
                        after.replays - before.replays,
                    )
                )
        counts = gpu.device.counts
        first = len(snapshots[0][3].waits)
        waits = [wait for wait in counts.waits[first:] if wait.lane == "tokens"]
        return Job(done, steps, gpu.syncs[snapshots[0][1] :], waits, counts)


def steady_steps(job: Job) -> list[Step]:
    """Decode-only steps between two other decode-only steps with the same rows."""

    def rows(step: Step) -> list[int] | None:
        plan = step.plan
        return None if plan.prefills or plan.starts or plan.copies else [row.sequence for row in plan.decodes]

    found = []
    for before, step, after in zip(job.steps, job.steps[1:], job.steps[2:], strict=False):
        if rows(step) is not None and rows(before) == rows(step) == rows(after):
            found.append(step)
    return found
