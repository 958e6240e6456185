"""Page forecast against counting step by step; admission by the forecast; expected lengths."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.block_manager import BlockManager
from batchgen.plan.config import SchedulerConfig
from batchgen.plan.length_predictor import EXACT, LengthPredictor
from batchgen.plan.page_forecast import Candidate, PageForecast, Samples, pages_by_step, peak_pages, with_new_samples
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.sequences import SequenceScheduler
from tests.cases import examples
from tests.plan.counted import counted, random_job
from tests.plan.simulator import Simulator
from tests.plan.slow_page_forecast import SlowPageForecast
from tests.plan.test_scheduler import rows, simulator
from tests.plan.test_tree import tree_of

columns = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 30), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12
)
released = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=5)
begun = st.lists(st.integers(0, 60), min_size=1, max_size=5)


@examples(300)
@given(columns, released, begun, st.integers(0, 20), st.integers(1, 5))
def test_page_use_equals_counting_every_step(
    job: list[tuple[int, int, int, int]], nodes: list[tuple[int, int]], new: list[int], prompt: int, size: int
) -> None:
    # A decoding row has the page of the position it feeds; one that has yet to begin may lack some.
    table = [
        (end, position, max(0, position // size + 1 - spare), min(freed, max(0, position // size + 1 - spare)))
        for end, position, spare, freed in job
    ]
    gone = [(table[release % len(table)][0], pages) for release, pages in nodes]

    def use(step: int) -> int:
        held = sum((at + step) // size + 1 - pages if end >= step else -freed for end, at, pages, freed in table)
        return held - sum(pages for release, pages in gone if release < step)

    release, pages = np.array(gone, np.int64).reshape(-1, 2).T
    usage = pages_by_step(Samples(*np.array(table).T, release, pages), size)
    assert usage.tolist() == [use(step) for step in range(max(end for end, *_ in table) + 2)]
    assert peak_pages(usage) == max(0, *usage)
    both = with_new_samples(usage, np.array(new), prompt, prompt // size, 1, size)
    for step, pages_then in enumerate(both.tolist()):
        more = sum((prompt + step) // size + 1 - prompt // size for end in new if end >= step) - (new[0] >= step)
        assert pages_then == use(step) + more
    assert len(both) > max(new)


def test_no_samples_need_no_pages() -> None:
    none = np.zeros(0, np.int64)
    assert pages_by_step(Samples(none, none, none, none, none, none), 4).tolist() == [0]


class CheckedForecast(PageForecast):
    """Page forecast that compares every result with the slow one."""

    checks = 0
    refusals = 0

    def __init__(self, nodes: BlockManager, sequences: SequenceScheduler, predictor: LengthPredictor) -> None:
        super().__init__(nodes, sequences, predictor)
        self.slow = SlowPageForecast(nodes, sequences, predictor)

    def update(self, waiting: Iterable[Candidate]) -> None:
        candidates = list(waiting)
        super().update(candidates)
        self.slow.update(candidates)

    def admit(self, candidate: Candidate) -> bool:
        found = self._with_candidate(candidate)
        assert (peak_pages(found.usage), found.pages) == self.slow.peak_with(candidate)
        admitted = super().admit(candidate)
        assert admitted is self.slow.admit(candidate)
        CheckedForecast.checks += 1
        CheckedForecast.refusals += not admitted
        return admitted

    def add(self, candidate: Candidate) -> None:
        super().add(candidate)
        self.slow.add(candidate)


def random_tree_job(rng: Random) -> tuple[list[list[int]], list[list[int]], list[int], list[int]]:
    """Prompts of a deep tree, output lengths of their samples, limits and kinds."""
    base = [rng.randint(0, 1) for _ in range(rng.randint(4, 30))]
    longest = rng.choice([3, 8, 40])
    prompts, targets, limits, kinds = [], [], [], []
    for _ in range(rng.choice([20, 30, 60])):
        prompts.append(base[: rng.randint(1, len(base))] + [rng.randint(0, 2) for _ in range(rng.randint(0, 9))])
        generated = [rng.randint(1, longest) for _ in range(rng.choice([1, 1, 1, 2, 5, 12, 0]))]
        exact = rng.random() < 0.5
        targets.append([max(generated, default=1)] * len(generated) if exact else generated)
        limits.append(max(generated, default=1) + (0 if exact else rng.choice([0, 0, 20, 100])))
        kinds.append(EXACT if exact else rng.randint(0, 3))
    return prompts, targets, limits, kinds


def test_forecast_equals_the_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random jobs in small pools, with ends read late and cancelled requests: every forecast is equal."""
    monkeypatch.setattr("batchgen.plan.admission.PageForecast", CheckedForecast)
    for seed in range(4):
        rng = Random(seed)
        prompts, targets, limits, kinds = random_tree_job(rng)
        size, seqs = rng.choice([1, 2, 3, 4, 8]), rng.choice([3, 20, 100])
        need = max(-(-(len(p) + limit - 1) // size) for p, limit in zip(prompts, limits, strict=True))
        config = SchedulerConfig(
            num_pages=1 + need + rng.choice([0, 2, 10, 40, 200]),
            page_size=size,
            max_num_seqs=seqs,
            max_tokens_per_step=seqs + rng.choice([0, 3, 30]),
            start_together=rng.choice([1, 8]),
            order=rng.choice(["longest", "tree"]),
        )
        lag = rng.choice([0, 0, 1, 2])
        if lag:  # then a sample may end nowhere but at its limit
            targets = [[limit] * len(generated) for generated, limit in zip(targets, limits, strict=True)]
        sim = Simulator(prompts, targets, limits, config, None, lag, kinds)
        cancelled = {rng.randint(0, 60): rng.randrange(len(prompts)) for _ in range(rng.choice([0, 0, 5]))}
        sim.run(lambda step, sim=sim, cancelled=cancelled: step in cancelled and sim.cancel(cancelled[step]))
    assert CheckedForecast.checks > 100
    assert CheckedForecast.refusals > 30


@examples(100)
@given(st.integers(0, 2**31), st.integers(0, 40))
def test_predicted_lengths_of_columns_equal_those_of_single_samples(seed: int, ended: int) -> None:
    """`remaining_of` equals `remaining` for every sample."""
    rng = np.random.default_rng(seed)
    count = 50
    limits, kinds = rng.integers(1, 3000, count), rng.integers(-1, 4, count)
    predictor = LengthPredictor(limits.astype(np.int32), kinds.astype(np.int32))
    for i in range(count):
        predictor.begin(i, i, int(rng.integers(1, 9)))
    for i in range(ended):
        predictor.end([i], int(rng.integers(9, 2000)))
    generated = rng.integers(0, 3000, count)
    together = predictor.remaining_of(np.arange(count), np.arange(count), generated, 2000).tolist()
    assert together == [predictor.remaining(i, i, m, 2000) for i, m in enumerate(generated.tolist())]


@examples(200)
@given(rows, st.integers(5, 30), st.sampled_from([1, 2, 4]), st.sampled_from([2, 8]))
def test_no_preemption_if_lengths_are_known(job: list[tuple], pages: int, size: int, slots: int) -> None:
    """Rows that run to their limit begin only if they need not be preempted.

    While none runs, one begins in any case: a pool may not hold its prompt next to those that it shares tokens with.
    """
    job = [(r[0], [max(r[1])] * len(r[1]) if r[1] else [], 0, r[3]) for r in job]
    prompts = {tuple(prompt) for prompt, *_ in job}
    pages = max(pages, sum(-(-len(prompt) // size) for prompt in prompts) + 8 // size + 2)
    config = SchedulerConfig(pages, size, slots, slots + 20, start_together=1)
    sim = simulator(job, config, kinds=[EXACT] * len(job))
    sim.run()
    assert sim.scheduler.stats.preemptions == 0


def test_samples_admitted_in_one_step_are_counted_once() -> None:
    """A long row, and short ones of three pages that end before it grows.

    At full length 11 of these fit next to it. The forecast admits one more per three remaining pages.
    """
    limits = np.array([161] + 29 * [4])
    config = SchedulerConfig(61, 16, max_num_seqs=30, max_tokens_per_step=2000, order="tree")
    tree, kinds = tree_of([[i] * 40 for i in range(30)]), np.full(30, EXACT, np.int32)
    scheduler = Scheduler(tree, np.ones(30, int), limits, config, kinds)
    plan = scheduler.step()
    assert len(plan.starts) == 1 + 11 + 4
    assert scheduler.group_pages_in_use[0] == 3 * len(plan.starts)


@pytest.mark.parametrize(
    ("levels", "pages"),
    [([(512, (32, 256))], 300), ([(512, (32, 256))], 900), ([(10, (512, 1024)), (50, (16, 64))], 600)],
)
def test_small_pool_is_filled_without_preemption(levels: list[tuple[int, tuple[int, int]]], pages: int) -> None:
    """With known lengths no position is computed twice, and the job needs fewer steps than in input order."""
    prompts, limits = random_job(levels, (8, 256), 0)
    config = SchedulerConfig(num_pages=pages, page_size=16, max_num_seqs=64, max_tokens_per_step=2048)
    kinds = np.full(len(prompts), EXACT, np.int32)
    ours = counted(prompts, limits, config, kinds=kinds)
    theirs = counted(prompts, limits, replace(config, order="first-come", admission="free"), kinds=kinds)
    assert ours.stats.preemptions == ours.stats.recomputed_tokens == ours.stats.evicted_nodes == 0
    assert ours.stats.prompt_tokens == ours.distinct_tokens
    assert ours.stats.steps < 0.99 * theirs.stats.steps
    if ours.stats.steps > 1.2 * limits.sum() / 64:  # else the slots are the limit
        assert theirs.stats.recomputed_tokens > 0
        assert np.mean(ours.pages) > 0.88 * pages
    assert max(ours.pages) < pages


@pytest.mark.parametrize(
    ("levels", "length", "pages"),
    [([(512, (8, 32))], 250, 300), ([(512, (200, 256))], 128, 600), ([(10, (512, 1024)), (50, (16, 64))], 128, 300)],
    ids=["short prompts", "long prompts", "shared"],
)
def test_rows_of_equal_length_keep_the_pool_evenly_filled(
    levels: list[tuple[int, tuple[int, int]]], length: int, pages: int
) -> None:
    """Rows begin at intervals: at any time some are at their beginning and some near their end."""
    prompts, _ = random_job(levels, (1, 1), 0)
    config = SchedulerConfig(num_pages=pages, page_size=16, max_num_seqs=64, max_tokens_per_step=2048)
    kinds = np.full(len(prompts), EXACT, np.int32)
    ours = counted(prompts, np.full(len(prompts), length), config, kinds=kinds)
    assert ours.stats.preemptions == ours.stats.recomputed_tokens == ours.stats.evicted_nodes == 0
    steady = ours.pages[2 * length : -2 * length]
    assert np.mean(steady) > 0.84 * pages


@pytest.mark.parametrize("spread", ["exponential", "uniform", "alike"])
def test_learnt_lengths_avoid_preemption(spread: str) -> None:
    """With limits far above the lengths, the forecast preempts fewer rows than admission by free pages."""
    prompts, limits = random_job([(512, (8, 32))], (2048, 2048), 0)
    rng = np.random.default_rng(1)
    targets = {
        "exponential": np.minimum(rng.geometric(1 / 250, len(prompts)), 2048),
        "uniform": rng.integers(8, 500, len(prompts)),
        "alike": rng.normal(250, 30, len(prompts)).astype(int),
    }[spread]
    config = SchedulerConfig(num_pages=400, page_size=16, max_num_seqs=64, max_tokens_per_step=2048)
    ours = counted(prompts, limits, config, targets=targets)
    greedy = counted(prompts, limits, replace(config, admission="free"), targets=targets)
    assert ours.stats.preemptions < 0.5 * greedy.stats.preemptions
    assert ours.stats.recomputed_tokens < 0.6 * greedy.stats.recomputed_tokens
    assert ours.stats.steps < (1.6 if spread == "alike" else 1.12) * greedy.stats.steps


@pytest.mark.parametrize(("samples", "pages", "prompt", "output"), [(8, 60, 200, (100, 100)), (16, 60, 60, (25, 200))])
def test_samples_begin_in_part_in_a_pool_that_holds_few(
    samples: int, pages: int, prompt: int, output: tuple[int, int]
) -> None:
    """Samples begin a few at a time as pages are freed: no preemption, at the cost of less than 45 % more steps."""
    prompts, limits = random_job([(160 // samples, (prompt // 2, prompt))], output, 0)
    config = SchedulerConfig(num_pages=pages, page_size=16, max_num_seqs=64, max_tokens_per_step=2048)
    count, kinds = np.full(len(prompts), samples), np.full(len(prompts), EXACT, np.int32)
    ours = counted(prompts, limits, config, samples=count, kinds=kinds)
    free = counted(prompts, limits, replace(config, admission="free"), samples=count, kinds=kinds)
    assert ours.stats.preemptions == ours.stats.recomputed_tokens == 0
    assert free.stats.recomputed_tokens > 0.5 * ours.stats.prompt_tokens
    assert ours.stats.steps < 1.45 * free.stats.steps
    assert max(ours.pages) < pages


def test_expected_lengths() -> None:
    limits = np.array([100, 4000, 4000, 4000], np.int32)
    predictor = LengthPredictor(limits, np.array([EXACT, 0, 0, 1], np.int32))
    assert predictor.expected.tolist() == [100, 512, 512, 512]
    assert [predictor.remaining(0, 0, generated, 5) for generated in (0, 30, 99, 100)] == [100, 70, 1, 1]
    predictor.begin(7, 0, 1)
    predictor.end([7], 100)

    def mean(request: int, generated: int = 0) -> float:
        return float(np.mean([predictor.remaining(i, request, generated, 500) for i in range(2000)]))

    # Nothing is known: the mean is 512 with a wide spread, regardless of the tokens generated so far.
    assert 490 < mean(1) < 530
    assert 490 < mean(1, 300) < 530
    assert mean(1, 3990) <= 10
    for i in range(64):
        predictor.begin(i, 1, 0)
        predictor.end([i], 99)
    # All samples of the kind had 100 tokens: so will the next, and one with more is about to end.
    assert 100 <= mean(1) < 115
    assert mean(1, 60) < 55
    assert mean(1, 200) < 10
    # Another kind without ended samples has the same expected length.
    assert mean(3) < 120


def test_running_samples_raise_the_expected_length() -> None:
    predictor = LengthPredictor(np.full(20, 1000, np.int32))
    for i in range(20):
        predictor.begin(i, i, 0)
    predictor.end([0], 9)
    early = np.mean([predictor.remaining(i, i, 10, 10) for i in range(20)])
    late = np.mean([predictor.remaining(i, i, 500, 500) for i in range(20)])
    assert early < 400 < 450 < late


def calls_per_step(scheduler: Scheduler, steps: int) -> float:
    """Python calls that planning takes."""
    events: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda _, event, __: events.append(event))
    try:
        for _ in range(steps):
            assert scheduler.step() is not None
            scheduler.commit(())
    finally:
        sys.setprofile(before)
    return events.count("call") / steps


def waiting_rows(rows: int, limit: int, config: SchedulerConfig, kinds: int) -> Scheduler:
    """A scheduler of rows with different prompts, one sample each, of several kinds."""
    tree, columns = tree_of([[i] * 20 for i in range(rows)]), np.arange(rows, dtype=np.int32) % kinds
    return Scheduler(tree, np.ones(rows, int), np.full(rows, limit), config, columns)


def test_refused_rows_cost_a_step_little() -> None:
    """Between two ends the forecast changes only when rows take pages."""
    config = SchedulerConfig(num_pages=40, page_size=16, max_num_seqs=8, max_tokens_per_step=99)
    alone, refusing = (calls_per_step(waiting_rows(rows, 400, config, 1), 320) for rows in (1, 4))
    assert refusing < 1.5 * alone


def test_a_forecast_runs_no_python_code_per_sample() -> None:
    """Steps with waiting rows that the forecast refuses, for 40 and for 200 running samples."""
    cost = []
    for slots in (40, 200):
        config = SchedulerConfig(num_pages=50 * slots, page_size=16, max_num_seqs=2 * slots, max_tokens_per_step=9999)
        scheduler = waiting_rows(2 * slots, 4000, config, 5)
        calls_per_step(scheduler, 3)
        cost.append(calls_per_step(scheduler, 64))
    assert cost[1] < 1.2 * cost[0]
