"""Recurrent states: steps run on a simulated pool of slots, and states and computed tokens are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.cache_groups import CacheGroup
from batchgen.plan.scheduler import SchedulerConfig
from batchgen.plan.state_slots import StateGroup
from batchgen.plan.step_plan import split_plan
from batchgen.plan.window_pages import WindowGroup
from tests.cases import examples
from tests.plan.test_scheduler import configs, live_distinct, rows, simulator, tight_jobs


def hybrid(config: SchedulerConfig, more: int = 1000, window: int | None = None) -> SchedulerConfig:
    """The limits for a model with layers of attention and recurrent layers, with `more` slots than needed."""
    states = StateGroup((1,), 1)
    groups = [CacheGroup((0,), 1), replace(states, num_pages=states.least_pages(config.page_size) + more)]
    if window is not None:
        held = WindowGroup((2,), 1, window)
        groups.insert(1, replace(held, num_pages=held.least_pages(config.page_size) + more))
    return replace(config, cache_groups=tuple(groups))


windows = st.sampled_from([None, None, 1, 3, 12])


@examples(80)
@given(rows, configs(num_pages=1000))
def test_each_token_is_computed_once_where_memory_is_plenty(rows: list[tuple], config: SchedulerConfig) -> None:
    """The steps are those of a model without states."""
    plain, sim = simulator(rows, config), simulator(rows, hybrid(config))
    plain.run()
    sim.run()
    stats = sim.scheduler.stats
    assert stats.prompt_tokens == live_distinct(sim)
    assert sim.state_tokens == stats.prompt_tokens + stats.decode_tokens
    assert replace(stats, peak_states=0) == plain.scheduler.stats


@examples(150)
@given(tight_jobs(), st.sampled_from([0, 0, 1, 3, 10, 1000]), windows, st.integers(0, 2))
def test_every_request_that_fits_alone_finishes(
    job: tuple[list[tuple], SchedulerConfig], more: int, window: int | None, lag: int
) -> None:
    """Chunks, branches, preemptions and evictions read the states they should, in pools that are short of either."""
    rows, config = job
    if lag:
        rows = [(r[0], [max(r[1])] * len(r[1]) if r[1] else [], 0, 0) for r in rows]
    sim = simulator(rows, hybrid(config, more, window), lag)
    sim.run()
    assert sim.scheduler.stats.prompt_tokens == live_distinct(sim)


@examples(50)
@given(tight_jobs(), windows, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 13)), max_size=4))
def test_cancelled_requests_free_their_states(
    job: tuple[list[tuple], SchedulerConfig], window: int | None, cancels: list[tuple[int, int]]
) -> None:
    simulator(job[0], hybrid(job[1], 2, window)).run_cancelling(cancels)


@pytest.mark.parametrize("slots", [0, 2, 5, 100])
def test_a_prefix_is_computed_once_whatever_the_number_of_slots(slots: int) -> None:
    """Rows that share a prefix in groups, one of which begins as soon as there are slots."""
    job = [([1] * 50 + [group] * 20 + [i] * 3, [5, 5], 0, 0) for group in range(4) for i in range(6)]
    sim = simulator(job, hybrid(SchedulerConfig(400, 4, 8, 64), slots))
    sim.run()
    stats = sim.scheduler.stats
    assert (stats.recomputed_tokens, stats.evicted_nodes, stats.preemptions) == (0, 0, 0)
    assert sim.state_tokens == 50 + 4 * 20 + 24 * 3 + 24 * 2 * 4


def test_states_are_kept_at_branches_alone() -> None:
    """A chain of branches: each node's state goes once its last user has read it."""
    job = [([*range(i), 99], [4], 0, 0) for i in range(1, 30)]
    sim = simulator(job, hybrid(SchedulerConfig(1000, 4, 4, 64)))
    most = 0

    def count(_: int) -> None:
        nonlocal most
        scheduler = sim.scheduler
        waiting = sim.nodes_to_start(set())
        running = len(sim.owners) - len(sim.ended)
        most = max(most, scheduler.group_pages_in_use[-1] - running - len(waiting))

    sim.run(count)
    assert most <= 4


def test_a_cut_step_goes_on_from_its_own_state() -> None:
    job = [([1, 2, 3, 4, 5, 6], [2], 0, 0), ([1, 2, 3, 7], [2], 0, 0)]
    sim = simulator(job, hybrid(SchedulerConfig(100, 4, 4, 64)))
    plan = sim.scheduler.step()
    for at in range(1, plan.tokens):
        first, second = split_plan(plan, 4, at)
        spans = [[tuple(span) for chunk in part.prefills for span in chunk.states] for part in (first, second)]
        whole = [tuple(span) for chunk in plan.prefills for span in chunk.states]
        ends = {end for end, *_ in whole}
        assert [span for span in (*spans[0], *spans[1]) if span[0] in ends and span[1] != span[2]] != []
        if spans[0] and spans[0][-1][0] not in ends:
            slot = spans[0][-1][2]
            assert spans[1][0][1:] == (slot, slot)
