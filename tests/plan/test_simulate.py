"""Simulated step counts against those of the scheduler."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.config import Order, SchedulerConfig, SchedulerStats
from batchgen.plan.order import begin_order
from batchgen.plan.simulate import simulate, steps_by_rows
from tests.cases import examples
from tests.plan.counted import counted, random_job
from tests.plan.test_tree import tree_of


def simulated(
    prompts: list[list[int]], limits: list[int], samples: list[int], config: SchedulerConfig
) -> SchedulerStats:
    count, lengths = np.array(samples, int), np.array(limits, int)
    return simulate(begin_order(tree_of(prompts), count, lengths, config), count, lengths, config)


@examples(200)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(0, 1)), max_size=20),
    st.integers(1, 8),
    st.sampled_from(["longest", "first-come"]),
)
def test_steps_are_exact_without_sharing(job: list[tuple[int, int, int]], slots: int, order: Order) -> None:
    """Prompts share nothing and fit into a step together with the decode rows."""
    prompts = [[i] * length for i, (length, _, _) in enumerate(job)]
    limits, samples = [j[1] for j in job], [j[2] for j in job]
    config = SchedulerConfig(9999, 4, slots, 999, order=order)
    found = simulated(prompts, limits, samples, config)
    stats = counted(prompts, np.array(limits, int), config, samples=np.array(samples, int)).stats
    assert (found.steps, found.slots, found.sampled_tokens) == (stats.steps, stats.slots, stats.sampled_tokens)
    assert (found.tail_steps, found.tail_efficiency) == (stats.tail_steps, stats.tail_efficiency)
    assert found.occupancy == stats.occupancy


@pytest.mark.parametrize(
    ("levels", "order"),
    [
        ([(512, (100, 3000))], "longest"),
        ([(10, (512, 1024)), (50, (16, 64))], "first-come"),
        ([(1, (300, 300)), (64, (100, 200)), (4, (16, 64))], "longest"),
    ],
)
def test_steps_are_close_with_shared_prefixes_and_long_prompts(levels: list, order: Order) -> None:
    prompts, limits = random_job(levels, (8, 256), 3)
    config = SchedulerConfig(99_999, 16, 64, 2048, order=order)
    found = simulated(prompts, limits.tolist(), [1] * len(prompts), config)
    stats = counted(prompts, limits, config).stats
    assert abs(found.steps - stats.steps) <= 0.004 * stats.steps + 1
    assert abs(found.tail_steps - stats.tail_steps) <= 12


def test_samples_share_the_computation_of_their_prompt() -> None:
    config = SchedulerConfig(999, 4, 4, 8)
    # Twelve tokens need two steps of eight; four samples then decode three times.
    found = simulated([[1] * 12], [4], [4], config)
    assert (found.steps, found.sampled_tokens, found.occupancy) == (5, 16, 16 / 20)
    assert simulated([[1] * 12], [4], [8], replace(config, max_num_seqs=4)).steps == 9


def test_no_rows_need_no_steps() -> None:
    found = simulated([[1]], [3], [0], SchedulerConfig(9, 4, 2, 8))
    assert (found.steps, found.occupancy, found.tail_efficiency) == (0, 1.0, 1.0)


def test_steps_of_many_samples_are_close() -> None:
    prompts, limits = random_job([(9000, (4, 8))], (4, 40), 2)
    config = SchedulerConfig(99_999, 16, 64, 512)
    found = simulated(prompts, limits.tolist(), [1] * len(prompts), config)
    stats = counted(prompts, limits, config).stats
    assert found.steps == pytest.approx(stats.steps, rel=0.01)
    assert found.sampled_tokens == stats.sampled_tokens


@examples(30)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), min_size=1, max_size=60).filter(
        lambda job: any(count for count, _ in job)
    ),
    st.integers(1, 80),
)
def test_steps_by_their_rows(job: list[tuple[int, int]], slots: int) -> None:
    samples, lengths = np.array(job).T
    steps = steps_by_rows(samples, lengths, np.ones(len(job), np.bool_), slots)
    left = np.repeat(lengths, samples)
    most = min(slots, len(left))
    assert (steps >= 0).all()
    assert not steps[most + 1 :].any()
    assert not steps[0]
    if len(left) <= slots:
        counted = Counter((left > step).sum() for step in range(left.max()))
        assert {rows: n for rows, n in enumerate(steps.tolist()) if n} == counted
    uncertain = steps_by_rows(samples, lengths, np.zeros(len(job), np.bool_), slots)
    assert 0 <= uncertain @ np.arange(slots + 1) <= 2.5 * left.sum()
