"""Step plans executed against a simulated pool that knows what every slot must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.plan.tree import build_tree
from tests.plan.simulator import Simulator

prompt = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.integers(1, 20).map(lambda n: [7] * n),
    st.integers(5, 15).flatmap(lambda n: st.lists(st.integers(0, 2), max_size=4).map(lambda x: [5] * n + x)),
    st.just([1, 2, 3, 4, 5]),
)
row = st.tuples(prompt, st.lists(st.integers(1, 8), max_size=4), st.integers(0, 3), st.integers(0, 1))
rows = st.lists(row, min_size=1, max_size=14)


@st.composite
def configs(draw: st.DrawFn, roomy: bool) -> SchedulerConfig:
    seqs = draw(st.integers(1, 8))
    return SchedulerConfig(
        num_pages=1000 if roomy else draw(st.integers(5, 24)),
        page_size=draw(st.sampled_from([1, 2, 3, 4, 8])),
        max_num_seqs=seqs,
        max_tokens_per_step=seqs + draw(st.integers(0, 30)),
        group_min_saving=draw(st.sampled_from([0, 4, 16])),
        start_together=draw(st.sampled_from([1, 8])),
    )


def simulator(rows: list[tuple], config: SchedulerConfig, lag: int = 0) -> Simulator:
    return Simulator(
        prompts=[r[0] for r in rows],
        targets=[r[1] for r in rows],
        max_new=[max(r[1], default=1) + (0 if lag else r[2]) for r in rows],
        config=config,
        keys=[r[3] for r in rows],
        lag=lag,
    )


def live_distinct(sim: Simulator) -> int:
    return len(
        {
            (sim.keys[r], *p[: i + 1])
            for r, p in enumerate(sim.prompts)
            if sim.targets[r] and r not in sim.too_large
            for i in range(len(p))
        }
    )


@settings(max_examples=400, deadline=None)
@given(rows, configs(roomy=True))
def test_every_shared_token_is_computed_once(rows: list[tuple], config: SchedulerConfig) -> None:
    sim = simulator(rows, config)
    sim.run()
    stats = sim.scheduler.stats
    assert stats.prompt_tokens == live_distinct(sim)
    assert stats.recomputed_tokens == stats.preemptions == stats.evicted_nodes == 0
    assert stats.sampled_tokens == sum(map(sum, sim.targets))
    samples = sum(map(len, sim.targets))
    assert stats.decode_tokens == stats.sampled_tokens - samples
    if samples <= config.max_num_seqs:
        assert stats.relogit_tokens == 0


@settings(max_examples=1500, deadline=None)
@given(rows, configs(roomy=False))
def test_tiny_pool(rows: list[tuple], config: SchedulerConfig) -> None:
    sim = simulator(rows, config)
    sim.run()
    stats = sim.scheduler.stats
    assert stats.prompt_tokens == live_distinct(sim)
    assert stats.sampled_tokens == sum(sum(t) for r, t in enumerate(sim.targets) if r not in sim.too_large)
    assert stats.peak_pages <= config.num_pages - 1
    if not stats.preemptions and not stats.evicted_nodes:
        # A tail that was given up is the only other thing computed again.
        assert stats.recomputed_tokens <= config.page_size * sum(map(len, sim.targets)) + stats.prompt_tokens


@settings(max_examples=400, deadline=None)
@given(rows, configs(roomy=False), st.integers(1, 3))
def test_ends_reported_late(rows: list[tuple], config: SchedulerConfig, lag: int) -> None:
    rows = [(r[0], [max(r[1])] * len(r[1]) if r[1] else [], 0, r[3]) for r in rows]
    simulator(rows, config, lag).run()


@settings(max_examples=500, deadline=None)
@given(rows, configs(roomy=False), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 13)), max_size=4))
def test_cancelled_requests(rows: list[tuple], config: SchedulerConfig, cancels: list[tuple[int, int]]) -> None:
    sim = simulator(rows, config)

    def between(step: int) -> None:
        for when, request in cancels:
            if when == step and request < len(rows):
                sim.cancel(request)

    sim.run(between)
