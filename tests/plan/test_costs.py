"""Copying a page's positions or computing them anew: whichever costs less, and what either does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.plan.costs import COPY_PAGE, COPY_POSITION, copying_pays
from batchgen.plan.scheduler import SchedulerConfig
from tests.plan.simulator import Simulator
from tests.plan.test_scheduler import configs, live_distinct, rows, simulator, tight_jobs


def test_the_smallest_shared_segment_pays() -> None:
    """A branch off one shared token copies one position, which costs less than that token: every node is kept."""
    assert all(copying_pays(positions) for positions in range(1, 1024))
    assert COPY_PAGE + COPY_POSITION < 1


@settings(max_examples=150, deadline=None)
@given(st.one_of(tight_jobs(), st.tuples(rows, configs())), st.sampled_from([2.5, 1000.0]))
def test_what_is_not_copied_is_computed_anew(job: tuple[list[tuple], SchedulerConfig], page_cost: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchgen.plan.costs.COPY_PAGE", page_cost)
        sim = simulator(*job)
        sim.run()
    assert sim.scheduler.stats.prompt_tokens == live_distinct(sim)
    if page_cost > job[1].page_size:
        assert sim.scheduler.stats.page_copies == 0


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows after five shared tokens, pages of four: the first goes on in the fifth's page, two copy it or not."""
    prompts = [[1, 1, 1, 1, 1, last] for last in (2, 3, 4)]
    config = SchedulerConfig(100, 4, 8, 64)
    copied = Simulator(prompts, [[2]] * 3, [2] * 3, config)
    copied.run()
    assert (copied.scheduler.stats.page_copies, copied.scheduler.stats.recomputed_tokens) == (2, 0)
    monkeypatch.setattr("batchgen.plan.costs.COPY_PAGE", 1.0)
    computed = Simulator(prompts, [[2]] * 3, [2] * 3, config)
    computed.run()
    assert (computed.scheduler.stats.page_copies, computed.scheduler.stats.recomputed_tokens) == (0, 2)
    assert computed.scheduler.stats.prompt_tokens == copied.scheduler.stats.prompt_tokens == 8
