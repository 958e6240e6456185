"""The time left of a job, on a clock that runs as the job's work says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from batchgen.job.display.eta import EtaTracker
from batchgen.job.display.progress import TimeLeft
from batchgen.plan.config import SchedulerConfig
from batchgen.plan.length_predictor import EXACT
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.work import Work, WorkLeft
from tests.plan.counted import random_job
from tests.plan.test_tree import tree_of

COSTS = (5e-3, 1e-4, 1e-8, 2e-5, 2e-8, 3e-7)
"""Seconds of a step, of a token, of a position that a prompt token attends to, in addition of a decoded token, of a
position that it attends to, and of one that is read for that."""
PRIOR = (3e-3, 1.2e-4, 2e-8, 1e-5, 2e-8, 2e-7)
"""Other seconds, which the tracker is given."""
CONFIG = SchedulerConfig(99_999, 16, 16, 256)


class Device:
    """A clock that runs by the work of a scheduler's steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.now = 50.0
        self._done = scheduler.work_done

    def __call__(self) -> float:
        return self.now

    def run(self, done: Work) -> None:
        """Let the time pass that it takes to do all work up to `done`."""
        steps, tokens, reads, decoded, *attended = (b - a for a, b in zip(self._done, done, strict=True))
        self.now += float(np.dot(COSTS, (steps, tokens + decoded, reads, decoded, *attended)))
        self._done = done


class SlowScheduler(Scheduler):
    """A scheduler of a large job: time passes while it looks at all work that is left."""

    clock: Device
    planning: float

    def work_left(self) -> WorkLeft:
        self.clock.now += self.planning
        return super().work_left()


def run(
    prompts: list[list[int]],
    limits: np.ndarray,
    config: SchedulerConfig,
    *,
    samples: np.ndarray | None = None,
    targets: np.ndarray | None = None,
    asynchronous: bool = False,
    planning: float = 0.0,
) -> Iterator[tuple[float, TimeLeft | None]]:
    """The time and the estimate at every step of a run, and at its end.

    `planning`: seconds that a look at all work left takes.
    """
    count = len(prompts)
    samples = np.ones(count, np.int64) if samples is None else samples
    kinds = np.full(count, EXACT if targets is None else 0, np.int32)
    lengths = limits if targets is None else targets
    scheduler = SlowScheduler(tree_of(prompts), samples, limits, config, kinds)
    device = scheduler.clock = Device(scheduler)
    scheduler.planning = planning
    before = np.where(samples > 0, 0, 1)
    earlier = scheduler.work_of(before) if before.any() else Work()
    tracker = EtaTracker(scheduler, PRIOR, earlier, device)
    left: dict[int, int] = {}
    while True:
        found = tracker.tick(asynchronous)
        yield device.now, found
        planned = scheduler.work_done
        plan = scheduler.step()
        if asynchronous:
            device.run(planned)  # the last step ends while this one is planned
        if plan is None:
            yield device.now, found
            return
        left.update((start.sequence, int(lengths[start.request])) for start in plan.starts)
        for row in plan.samples:
            left[row.sequence] -= 1
        scheduler.commit([row.sequence for row in plan.samples if not left[row.sequence]])
        if not asynchronous:
            device.run(scheduler.work_done)


def judged(seen: list[tuple[float, TimeLeft | None]]) -> Iterator[tuple[float, float, TimeLeft]]:
    """(share of the run, seconds left, estimate) of a run from 5 % on, until a second is left."""
    began, end = seen[0][0], seen[-1][0]
    for now, found in seen:
        if (now - began) >= 0.05 * (end - began) and end - now > 1.0:
            assert found is not None
            yield (now - began) / (end - began), end - now, found


JOBS = {
    "short prompts, long outputs": ([(120, (8, 16))], (250, 250), 1),
    "long prompts, short outputs": ([(120, (600, 1500))], (8, 8), 1),
    "shared prefix": ([(1, (1000, 1000)), (300, (32, 32))], (96, 96), 1),
    "tree": ([(1, (300, 300)), (10, (300, 500)), (30, (20, 60))], (96, 96), 1),
    "mixed lengths": ([(300, (32, 256))], (8, 256), 1),
    "several samples": ([(40, (100, 400))], (128, 128), 8),
    "prompts only": ([(300, (200, 600))], (1, 1), 1),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_estimate_is_right_from_a_twentieth_of_the_run_on(name: str) -> None:
    levels, output, samples = JOBS[name]
    prompts, limits = random_job(levels, output, 3)
    seen = list(run(prompts, limits, CONFIG, samples=np.full(len(prompts), samples)))
    for share, true, found in judged(seen):
        assert found.seconds == pytest.approx(true, rel=0.1, abs=0.3), f"at {share:.0%}"
        assert found.work_done == pytest.approx(share, abs=0.05)


def test_pages_that_hold_fewer_samples_than_there_are_slots() -> None:
    prompts, limits = random_job([(200, (32, 256))], (8, 256), 3)
    for share, true, found in judged(list(run(prompts, limits, SchedulerConfig(120, 16, 16, 256)))):
        assert found.seconds == pytest.approx(true, rel=0.1, abs=0.5), f"at {share:.0%}"


def test_a_long_tail_has_a_range_until_it_is_seen() -> None:
    prompts, limits = random_job([(48, (32, 256))], (64, 64), 3)
    limits[::16] = 2500
    found = list(judged(list(run(prompts, limits, SchedulerConfig(99_999, 16, 64, 1024)))))
    assert found[0][2].most > 1.1 * found[0][2].seconds
    for share, true, left in found:
        if share > 0.2:
            assert left.seconds == pytest.approx(true, rel=0.1, abs=0.3), f"at {share:.0%}"


def test_a_resumed_job_starts_with_the_work_of_its_earlier_runs() -> None:
    prompts, limits = random_job([(200, (32, 64))], (100, 100), 3)
    samples = np.ones(200, np.int64)
    samples[:120] = 0
    found = list(judged(list(run(prompts, limits, CONFIG, samples=samples))))
    assert found[0][2].work_done == pytest.approx(0.6 + 0.05 * 0.4, abs=0.05)
    for share, true, left in found:
        assert left.seconds == pytest.approx(true, rel=0.1, abs=0.3), f"at {share:.0%}"
        assert left.work_done == pytest.approx(0.6 + 0.4 * share, abs=0.05)


def test_a_step_in_flight_is_not_done() -> None:
    prompts, limits = random_job([(200, (256, 256))], (1, 1), 3)  # steps of 31 ms
    for share, true, found in judged(list(run(prompts, limits, CONFIG, asynchronous=True))):
        assert -0.01 < found.seconds - true < 0.2, f"at {share:.0%}: estimates are some steps old"


def test_lengths_that_the_model_decides_are_learnt() -> None:
    prompts, limits = random_job([(400, (8, 16))], (400, 400), 3)
    targets = np.random.default_rng(0).integers(20, 60, size=400)
    found = list(judged(list(run(prompts, limits, CONFIG, targets=targets))))
    share, true, left = found[0]
    assert left.least < true < left.most
    assert left.most > 2 * left.least
    for share, true, left in found:
        if share > 0.3:
            assert left.seconds == pytest.approx(true, rel=0.2, abs=0.3), f"at {share:.0%}"
        if share > 0.6:
            assert left.seconds == pytest.approx(true, rel=0.1, abs=0.3), f"at {share:.0%}"


@pytest.mark.parametrize("planning", [0.01, 1.0])
def test_rows_that_end_at_once_take_what_they_were_expected_to_do_out(planning: float) -> None:
    """Many rows, most of which end after one of four tokens, in a job whose work left takes long to look at."""
    prompts, limits = random_job([(3000, (8, 16))], (4, 4), 3)
    targets = np.where(np.random.default_rng(0).random(3000) < 0.85, 1, 4)
    found = list(judged(list(run(prompts, limits, CONFIG, targets=targets, planning=planning))))
    for share, true, left in found:
        assert left.seconds == pytest.approx(true, rel=0.3), f"at {share:.0%}"
        assert left.work_done == pytest.approx(share, abs=0.1), f"at {share:.0%}"
        assert left.most < 2 * left.least, f"at {share:.0%}: one number tells it"


def test_nothing_is_estimated_before_steps_have_run_and_nothing_is_left_at_the_end() -> None:
    prompts, limits = random_job([(60, (32, 64))], (100, 100), 3)
    seen = list(run(prompts, limits, CONFIG))
    assert seen[0][1] is None
    shares = [found.work_done for _, found in seen if found is not None]
    assert shares == sorted(shares)
    assert shares[-1] > 0.98
    last = seen[-1][1]
    assert last is not None
    assert last.seconds < 0.2
