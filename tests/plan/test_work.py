"""The work that a scheduler says is left, against what it then does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from batchgen.plan.config import SchedulerConfig
from batchgen.plan.length_predictor import EXACT, Lengths
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.work import Work, WorkLeft
from tests.plan.counted import random_job
from tests.plan.test_tree import tree_of

ROOMY = SchedulerConfig(99_999, 16, 32, 512)


class Run:
    """A run of the scheduler, and the work done and left at some of its steps."""

    def __init__(
        self,
        prompts: list[list[int]],
        limits: np.ndarray,
        config: SchedulerConfig,
        *,
        samples: np.ndarray | None = None,
        targets: np.ndarray | None = None,
        between: Callable[[Scheduler, int], None] = lambda scheduler, step: None,
        every: int = 25,
    ) -> None:
        count = len(prompts)
        kinds = np.full(count, EXACT if targets is None else 0, np.int32)
        ends = (limits if targets is None else targets).tolist()
        samples = np.ones(count, np.int64) if samples is None else samples
        scheduler = self.scheduler = Scheduler(tree_of(prompts), samples, limits, config, kinds)
        self.seen: list[tuple[Work, WorkLeft]] = []
        left: dict[int, int] = {}
        step = 0
        while True:
            between(scheduler, step)
            if step % every == 0:
                self.seen.append((scheduler.work_done, scheduler.work_left()))
            if (plan := scheduler.step()) is None:
                break
            step += 1
            left.update((start.sequence, ends[start.request]) for start in plan.starts)
            for row in plan.samples:
                left[row.sequence] -= 1
            scheduler.commit([row.sequence for row in plan.samples if not left[row.sequence]])
        self.seen.append((scheduler.work_done, scheduler.work_left()))

    def pairs(self) -> list[tuple[WorkLeft, Work]]:
        """What was said to be left, and what was done from there on."""
        end = self.scheduler.work_done
        return [(left, Work(*(b - a for a, b in zip(done, end, strict=True)))) for done, left in self.seen]


@pytest.mark.parametrize(
    ("levels", "output", "samples"),
    [
        ([(120, (100, 300))], (8, 256), 1),
        ([(90, (4, 8))], (200, 200), 1),
        ([(40, (900, 1500))], (1, 4), 1),
        ([(1, (300, 300)), (8, (200, 200)), (10, (20, 60))], (8, 100), 1),
        ([(1, (300, 300)), (20, (20, 60))], (8, 100), 6),
        ([(60, (100, 300))], (1, 1), 1),
    ],
)
def test_the_work_left_is_what_the_run_then_does(
    levels: list[tuple[int, tuple[int, int]]], output: tuple[int, int], samples: int
) -> None:
    prompts, limits = random_job(levels, output, 1)
    run = Run(prompts, limits, ROOMY, samples=np.full(len(prompts), samples))
    assert len(run.pairs()) >= 3
    for left, true in run.pairs():
        assert left.least == left.expected == left.most
        expected = left.expected
        assert expected[1:4] == true[1:4], "tokens are counted"
        assert abs(expected.steps - true.steps) <= 0.01 * true.steps + 1
        if len(levels) == 1 and samples == 1:
            assert expected.decode_reads == pytest.approx(true.decode_reads, rel=1e-3)


@pytest.mark.parametrize(
    ("levels", "samples"), [([(1, (512, 512)), (100, (8, 8))], 1), ([(30, (100, 400))], 8), ([(100, (32, 64))], 1)]
)
def test_prefix_groups_go_on_saving_what_they_saved(levels: list[tuple[int, tuple[int, int]]], samples: int) -> None:
    prompts, limits = random_job(levels, (64, 64), 1)
    pairs = Run(prompts, limits, ROOMY, samples=np.full(len(prompts), samples), every=10).pairs()
    for left, true in pairs[2 : len(pairs) * 2 // 3]:
        assert left.expected.decode_reads == pytest.approx(true.decode_reads, rel=0.3)


def test_a_prompt_shares_nothing_with_copies_that_take_no_work() -> None:
    prompts, limits = random_job([(60, (100, 200))], (40, 80), 3)
    samples = np.tile([0, 1, 0], 60)
    run = Run([prompt for prompt in prompts for _ in range(3)], np.repeat(limits, 3), ROOMY, samples=samples)
    for left, true in run.pairs():
        assert left.expected.decode_reads == pytest.approx(true.decode_reads, rel=1e-3)


@pytest.mark.parametrize("output", [(8, 256), (128, 128)])
def test_steps_with_few_pages(output: tuple[int, int]) -> None:
    prompts, limits = random_job([(120, (100, 300))], output, 0)
    run = Run(prompts, limits, SchedulerConfig(200, 16, 32, 512))
    assert run.scheduler.stats.max_decode_rows < 24, "the pages hold less than the slots"
    for left, true in run.pairs():
        assert left.expected.steps == pytest.approx(true.steps, rel=0.05, abs=25)


def test_what_was_done_before_or_is_cancelled_does_not_count() -> None:
    prompts, limits = random_job([(60, (20, 40))], (50, 100), 2)
    samples = np.ones(60, np.int64)
    samples[20:] = 0

    def cancel(scheduler: Scheduler, step: int) -> None:
        if step == 10:
            for request in (3, 5, 7):
                scheduler.cancel(request)

    run = Run(prompts, limits, SchedulerConfig(999, 16, 8, 512), samples=samples, between=cancel, every=10)
    alone = int(limits[:20].sum()) - 20
    assert run.pairs()[0][0].expected.decode_tokens == alone
    for left, true in run.pairs()[1:]:
        assert left.expected[1:4] == true[1:4]
    others = run.scheduler.work_of(1 - samples)
    assert others.decode_tokens == int(limits[20:].sum()) - 40
    assert others.prompt_tokens == sum(len(prompt) for prompt in prompts[20:])


def test_unknown_lengths_have_a_range_that_narrows() -> None:
    rng = np.random.default_rng(0)
    prompts = [[i, i] for i in range(400)]
    targets = np.clip(rng.exponential(60, 400).astype(int), 1, 400)
    run = Run(prompts, np.full(400, 400), ROOMY, targets=targets)
    pairs = run.pairs()
    assert pairs[0][0].least.decode_tokens < pairs[0][1].decode_tokens < pairs[0][0].most.decode_tokens
    tokens = [[work.decode_tokens for work in left] for left, _ in pairs[:-3]]
    widths = [(most - least) / expected for expected, least, most in tokens]
    assert widths[4] < 0.6 * widths[0]
    inside = [left.least.steps <= true.steps <= left.most.steps for left, true in pairs]
    assert sum(inside) >= 0.8 * len(inside)
    limit = np.full(400, 400).sum() - 400
    assert all(left.most.decode_tokens <= limit for left, _ in pairs)


def test_lengths_of_another_job_are_expected() -> None:
    rng = np.random.default_rng(0)
    tree, limits, kinds = tree_of([[1, 2, 3]] * 500), np.full(500, 400), np.zeros(500, np.int32)
    ended = rng.integers(20, 61, 200) / 400
    seen = Lengths(200, 200, float(ended.sum()), float(np.square(ended).sum()))
    config = SchedulerConfig(99_999, 16, 16, 256)
    scheduler = Scheduler(tree, np.ones(500, np.int64), limits, config, kinds, seen=seen)
    left = scheduler.work_left()
    assert left.expected.decode_tokens == pytest.approx(500 * 39, rel=0.1)
    assert left.expected.decode_tokens > 0.9 * left.most.decode_tokens
    assert scheduler.lengths == seen
