"""Pages foreseen, against counting step by step; what is admitted by them; expected ends."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.plan.config import SchedulerConfig
from batchgen.plan.curve import Samples, pages_by_step, peak_pages, with_begun
from batchgen.plan.ends import EXACT, Ends
from batchgen.plan.nodes import Nodes
from batchgen.plan.outlook import Entry, Outlook
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.sequences import Sequences
from tests.plan.counted import counted, random_job
from tests.plan.simulator import Simulator
from tests.plan.slow_outlook import SlowOutlook
from tests.plan.test_scheduler import rows, simulator
from tests.plan.test_tree import tree_of

columns = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 30), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12
)
released = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=5)
begun = st.lists(st.integers(0, 60), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(columns, released, begun, st.integers(0, 20), st.integers(1, 5))
def test_curve_against_counting_every_step(
    job: list[tuple[int, int, int, int]], nodes: list[tuple[int, int]], new: list[int], prompt: int, size: int
) -> None:
    # A row that decodes has the page of the position it feeds; one that is to begin may lack some.
    table = [
        (end, fed, max(0, fed // size + 1 - spare), min(freed, max(0, fed // size + 1 - spare)))
        for end, fed, spare, freed in job
    ]
    gone = [(table[release % len(table)][0], pages) for release, pages in nodes]

    def use(step: int) -> int:
        held = sum((fed + step) // size + 1 - have if end >= step else -freed for end, fed, have, freed in table)
        return held - sum(pages for release, pages in gone if release < step)

    release, pages = np.array(gone, np.int64).reshape(-1, 2).T
    curve = pages_by_step(Samples(*np.array(table).T, release, pages), size)
    assert curve.tolist() == [use(step) for step in range(max(end for end, *_ in table) + 2)]
    assert peak_pages(curve) == max(0, *curve)
    both = with_begun(curve, np.array(new), prompt, prompt // size, 1, size)
    for step, pages_then in enumerate(both.tolist()):
        more = sum((prompt + step) // size + 1 - prompt // size for end in new if end >= step) - (new[0] >= step)
        assert pages_then == use(step) + more
    assert len(both) > max(new)


def test_no_samples_need_nothing() -> None:
    none = np.zeros(0, np.int64)
    assert pages_by_step(Samples(none, none, none, none, none, none), 4).tolist() == [0]


class Both(Outlook):
    """An outlook that asks the slow one, too."""

    asked = 0
    refused = 0

    def __init__(self, nodes: Nodes, sequences: Sequences, ends: Ends) -> None:
        super().__init__(nodes, sequences, ends)
        self.slow = SlowOutlook(nodes, sequences, ends)

    def look(self, waiting: Iterable[Entry]) -> None:
        entries = list(waiting)
        super().look(entries)
        self.slow.look(entries)

    def admit(self, entry: Entry) -> bool:
        found = self._with(entry)
        assert (peak_pages(found.curve), found.pages) == self.slow.peak_with(entry)
        admitted = super().admit(entry)
        assert admitted is self.slow.admit(entry)
        Both.asked += 1
        Both.refused += not admitted
        return admitted

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self.slow.add(entry)


def random_tree_job(rng: Random) -> tuple[list[list[int]], list[list[int]], list[int], list[int]]:
    """Prompts of a deep tree, tokens of their samples, limits, kinds."""
    base = [rng.randint(0, 1) for _ in range(rng.randint(4, 30))]
    longest = rng.choice([3, 8, 40])
    prompts, targets, limits, kinds = [], [], [], []
    for _ in range(rng.choice([20, 30, 60])):
        prompts.append(base[: rng.randint(1, len(base))] + [rng.randint(0, 2) for _ in range(rng.randint(0, 9))])
        made = [rng.randint(1, longest) for _ in range(rng.choice([1, 1, 1, 2, 5, 12, 0]))]
        exact = rng.random() < 0.5
        targets.append([max(made, default=1)] * len(made) if exact else made)
        limits.append(max(made, default=1) + (0 if exact else rng.choice([0, 0, 20, 100])))
        kinds.append(EXACT if exact else rng.randint(0, 3))
    return prompts, targets, limits, kinds


def test_outlook_against_the_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random jobs in small pools, ends read late, requests cancelled: the same pages are foreseen at every asking."""
    monkeypatch.setattr("batchgen.plan.admission.Outlook", Both)
    for seed in range(10):
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
            targets = [[limit] * len(made) for made, limit in zip(targets, limits, strict=True)]
        sim = Simulator(prompts, targets, limits, config, None, lag, kinds)
        cancelled = {rng.randint(0, 60): rng.randrange(len(prompts)) for _ in range(rng.choice([0, 0, 5]))}
        sim.run(lambda step, sim=sim, cancelled=cancelled: step in cancelled and sim.cancel(cancelled[step]))
    assert Both.asked > 300
    assert Both.refused > 100


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 40))
def test_ends_by_columns(seed: int, ended: int) -> None:
    """As one by one, but for roundings of the last bit."""
    rng = np.random.default_rng(seed)
    count = 50
    ends = Ends(rng.integers(1, 3000, count).astype(np.int32), rng.integers(-1, 4, count).astype(np.int32))
    for i in range(count):
        ends.begin(i, i, int(rng.integers(1, 9)))
    for i in range(ended):
        ends.end([i], int(rng.integers(9, 2000)))
    made = rng.integers(0, 3000, count)
    together = ends.remaining_of(np.arange(count), np.arange(count), made, 2000).tolist()
    assert together == [ends.remaining(i, i, m, 2000) for i, m in enumerate(made.tolist())]


@settings(max_examples=200, deadline=None)
@given(rows, st.integers(5, 30), st.sampled_from([1, 2, 4]), st.sampled_from([2, 8]))
def test_nothing_is_thrown_out_where_ends_are_known(job: list[tuple], pages: int, size: int, slots: int) -> None:
    """Rows that run to their limit: none that could be put off begins and is preempted."""
    job = [(r[0], [max(r[1])] * len(r[1]) if r[1] else [], 0, r[3]) for r in job]
    config = SchedulerConfig(pages, size, slots, slots + 20, start_together=1)
    sim = simulator(job, config, kinds=[EXACT] * len(job))
    sim.run()
    assert sim.scheduler.stats.preemptions == 0


def test_what_a_step_admits_is_counted_once() -> None:
    """A long row, and short ones of three pages that are gone before it grows.

    At full length 11 of these fit beside it. The outlook lets in as many more as there are threes in what is left.
    """
    limits = np.array([161] + 29 * [4])
    config = SchedulerConfig(61, 16, max_num_seqs=30, max_tokens_per_step=2000, order="tree")
    tree, kinds = tree_of([[i] * 40 for i in range(30)]), np.full(30, EXACT, np.int32)
    scheduler = Scheduler(tree, np.ones(30, int), limits, config, kinds)
    plan = scheduler.step()
    assert plan is not None
    assert len(plan.starts) == 1 + 11 + 4
    assert scheduler.pages_in_use == 3 * len(plan.starts)


@pytest.mark.parametrize("pages", [300, 600, 900])
@pytest.mark.parametrize("levels", [[(512, (32, 256))], [(10, (512, 1024)), (50, (16, 64))]], ids=["unique", "shared"])
def test_a_small_pool_is_filled_and_nothing_preempted(levels: list[tuple[int, tuple[int, int]]], pages: int) -> None:
    """Lengths known: no position is computed twice, and fewer steps than in input order."""
    prompts, limits = random_job(levels, (8, 256), 0)
    config = SchedulerConfig(num_pages=pages, page_size=16, max_num_seqs=64, max_tokens_per_step=2048)
    kinds = np.full(len(prompts), EXACT, np.int32)
    ours = counted(prompts, limits, config, kinds=kinds)
    theirs = counted(prompts, limits, replace(config, order="first-come", admission="free"), kinds=kinds)
    assert ours.stats.preemptions == ours.stats.recomputed_tokens == ours.stats.evicted_nodes == 0
    assert ours.stats.prompt_tokens == ours.distinct_tokens
    assert ours.stats.steps < 0.99 * theirs.stats.steps
    if ours.stats.steps > 1.2 * limits.sum() / 64:  # else it is the slots that are full
        assert theirs.stats.recomputed_tokens > 0
        assert np.mean(ours.pages) > 0.88 * pages
    assert max(ours.pages) < pages


@pytest.mark.parametrize("pages", [300, 600])
@pytest.mark.parametrize(
    ("levels", "length"),
    [([(512, (8, 32))], 250), ([(512, (200, 256))], 128), ([(10, (512, 1024)), (50, (16, 64))], 128)],
    ids=["short prompts", "long prompts", "shared"],
)
def test_rows_of_one_length_do_not_fill_the_pool_in_waves(
    levels: list[tuple[int, tuple[int, int]]], length: int, pages: int
) -> None:
    """They begin one after the other: at any time some are at their beginning and some near their end."""
    prompts, _ = random_job(levels, (1, 1), 0)
    config = SchedulerConfig(num_pages=pages, page_size=16, max_num_seqs=64, max_tokens_per_step=2048)
    kinds = np.full(len(prompts), EXACT, np.int32)
    ours = counted(prompts, np.full(len(prompts), length), config, kinds=kinds)
    assert ours.stats.preemptions == ours.stats.recomputed_tokens == ours.stats.evicted_nodes == 0
    steady = ours.pages[2 * length : -2 * length]
    assert np.mean(steady) > 0.84 * pages


@pytest.mark.parametrize("spread", ["exponential", "uniform", "alike"])
def test_ends_that_are_learnt(spread: str) -> None:
    """Limits far above the lengths: few rows are preempted that begin as soon as there are pages."""
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


@pytest.mark.parametrize(
    ("samples", "pages", "prompt", "output"),
    [(8, 60, 200, (100, 100)), (8, 90, 20, (50, 200)), (16, 90, 60, (100, 100)), (16, 60, 60, (25, 200))],
)
def test_samples_in_a_pool_that_holds_few(samples: int, pages: int, prompt: int, output: tuple[int, int]) -> None:
    """They begin as pages go, a few at a time: nothing is preempted, for less than half as many steps again."""
    prompts, limits = random_job([(160 // samples, (prompt // 2, prompt))], output, 0)
    config = SchedulerConfig(num_pages=pages, page_size=16, max_num_seqs=64, max_tokens_per_step=2048)
    count, kinds = np.full(len(prompts), samples), np.full(len(prompts), EXACT, np.int32)
    ours = counted(prompts, limits, config, samples=count, kinds=kinds)
    free = counted(prompts, limits, replace(config, admission="free"), samples=count, kinds=kinds)
    assert ours.stats.preemptions == ours.stats.recomputed_tokens == 0
    assert free.stats.recomputed_tokens > 0.5 * ours.stats.prompt_tokens
    assert ours.stats.steps < 1.45 * free.stats.steps
    assert max(ours.pages) < pages


def test_a_refusal_is_not_asked_again_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two ends the outlook is looked at once for every page that rows grow."""
    config = SchedulerConfig(num_pages=40, page_size=16, max_num_seqs=8, max_tokens_per_step=99)
    scheduler = Scheduler(tree_of([[i] * 20 for i in range(4)]), np.ones(4, int), np.full(4, 400), config)
    looks = count()
    outlook = scheduler._prompts._admission._outlook
    look = outlook.look
    monkeypatch.setattr(outlook, "look", lambda waiting: (next(looks), look(waiting)))
    for _ in range(320):
        assert scheduler.step() is not None
        scheduler.commit(())
    assert next(looks) <= 2 + 320 // 16


def test_an_outlook_runs_no_python_for_each_sample() -> None:
    """As many calls for two hundred samples of unlike kinds as for forty."""
    calls = {}
    for slots in (40, 200):
        config = SchedulerConfig(num_pages=50 * slots, page_size=16, max_num_seqs=slots, max_tokens_per_step=9999)
        kinds, limits = np.arange(slots, dtype=np.int32) % 5, np.full(slots, 4000)
        scheduler = Scheduler(tree_of([[7, i, i] for i in range(slots)]), np.ones(slots, int), limits, config, kinds)
        for _ in range(3):
            assert scheduler.step() is not None
            scheduler.commit(())
        assert len(scheduler._sequences.running) == slots
        seen = []
        sys.setprofile(lambda _, event, __, seen=seen: seen.append(event))
        scheduler._prompts._admission._outlook.look([])
        sys.setprofile(None)
        calls[slots] = len(seen)
    assert calls[40] == calls[200] < 400


def test_a_pool_that_holds_everything_is_never_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, limits = random_job([(4, (20, 40)), (10, (5, 9))], (8, 64), 0)
    config = SchedulerConfig(num_pages=1000, page_size=4, max_num_seqs=8, max_tokens_per_step=99)
    monkeypatch.setattr("batchgen.plan.outlook.Outlook.look", None)
    assert counted(prompts, limits, config).stats.preemptions == 0


def test_expected_ends() -> None:
    limits = np.array([100, 4000, 4000, 4000], np.int32)
    ends = Ends(limits, np.array([EXACT, 0, 0, 1], np.int32))
    assert ends.expected.tolist() == [100, 512, 512, 512]
    assert [ends.remaining(0, 0, made, 5) for made in (0, 30, 99, 100)] == [100, 70, 1, 1]
    ends.begin(7, 0, 1)
    ends.end([7], 100)

    def mean(request: int, made: int = 0) -> float:
        return float(np.mean([ends.remaining(i, request, made, 500) for i in range(2000)]))

    # Nothing is known: 512 at the mean, one far from the other. What has come far already tells nothing.
    assert 490 < mean(1) < 530
    assert 490 < mean(1, 300) < 530
    assert mean(1, 3990) <= 10
    for i in range(64):
        ends.begin(i, 1, 0)
        ends.end([i], 99)
    # All of a kind had 100 tokens: so will the next, and one that is past that is about to end.
    assert 100 <= mean(1) < 115
    assert mean(1, 60) < 55
    assert mean(1, 200) < 10
    # It is told of another kind, too, while nothing is known of that one.
    assert mean(3) < 120


def test_those_under_way_tell_that_it_takes_longer() -> None:
    ends = Ends(np.full(20, 1000, np.int32))
    for i in range(20):
        ends.begin(i, i, 0)
    ends.end([0], 9)
    early = np.mean([ends.remaining(i, i, 10, 10) for i in range(20)])
    late = np.mean([ends.remaining(i, i, 500, 500) for i in range(20)])
    assert early < 400 < 450 < late
