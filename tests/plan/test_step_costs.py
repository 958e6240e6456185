"""Costs of steps, learnt from times that are made up of known costs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from batchgen.plan.step_costs import StepCosts
from batchgen.plan.work import Work

TRUE = (2e-3, 5e-5, 1e-8, 2e-5, 1e-8, 3e-7)
"""Seconds of a step, of any token, of a position that a prompt token attends to, in addition of a decoded token, of a
position that it attends to, and of one that is read for that."""


def seconds(work: Work) -> float:
    tokens = work.prompt_tokens + work.decode_tokens
    quantities = (work.steps, tokens, work.prompt_reads, work.decode_tokens, work.decode_positions, work.decode_reads)
    return float(np.dot(TRUE, quantities))


def steps(count: int) -> Iterator[Work]:
    """A prompt of 1,024 tokens, then 32 rows whose contexts grow."""
    for _ in range(4):
        yield Work(1, 1024, 1024 * 500)
    for step in range(count):
        yield Work(1, 0, 0, 32, *[32 * (128 + step)] * 2)


REST = Work(1000, 0, 0, 32_000, *[32_000 * 700] * 2)


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_only_the_ratios_of_the_given_costs_matter(factor: float) -> None:
    costs = StepCosts([factor * cost for cost in TRUE])
    costs.observe(seconds(Work(1, 1024, 1024 * 500)), Work(1, 1024, 1024 * 500))
    found = costs.estimate(REST)
    assert found.mean == pytest.approx(seconds(REST), rel=0.01)


def test_the_costs_are_learnt_whatever_was_given() -> None:
    costs = StepCosts(np.multiply(TRUE, (3.0, 0.3, 1.0, 4.0, 2.0, 0.25)).tolist())
    for work in steps(500):
        costs.observe(seconds(work), work)
    found = costs.estimate(REST)
    assert found.mean == pytest.approx(seconds(REST), rel=0.05)


def test_an_estimate_is_the_less_certain_the_less_was_seen() -> None:
    widths = []
    for count in (0, 5, 50, 500):
        costs = StepCosts(TRUE)
        rng = np.random.default_rng(0)
        for work in steps(count):
            costs.observe(seconds(work) * rng.uniform(0.9, 1.1), work)
        found = costs.estimate(REST)
        widths.append(found.deviation / found.mean)
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 0.3
    assert widths[-1] < 0.05


def test_no_cost_is_negative() -> None:
    costs = StepCosts(TRUE)
    costs.observe(1.0, Work(10, 0, 0, 100, 0))
    costs.observe(0.5, Work(10, 0, 0, 100, 9e6))
    found = [costs.estimate(Work(*(float(i == at) for i in range(5)))) for at in range(5)]
    assert all(one is not None and one.mean >= 0 for one in found)


def test_nothing_is_known_before_a_step_was_timed() -> None:
    costs = StepCosts(TRUE)
    assert costs.estimate(REST) is None
    costs.observe(0.0, Work(1))
    assert costs.estimate(REST) is None


def test_fitted_costs_are_relative_to_those_given() -> None:
    costs = StepCosts(TRUE)
    for work in steps(200):
        costs.observe(3 * seconds(work), work)
    fitted, found = costs.fitted(), costs.estimate(REST)
    assert fitted.estimate(REST, TRUE) == found
    twice = fitted.estimate(REST, [2 * cost for cost in TRUE])
    assert (twice.mean, twice.deviation) == pytest.approx((2 * found.mean, 2 * found.deviation))
    assert fitted.parts(REST, TRUE).sum() == pytest.approx(found.mean)
