"""What is kept of prompts, on random trees and pools, against every request's own prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.capture import PromptCapture, batches
from batchgen.plan.scheduler import SchedulerConfig
from batchgen.plan.types import StepPlan
from tests.plan.simulator import Simulator
from tests.plan.test_scheduler import configs, rows, tight_jobs


class Capturing(Simulator):
    """Keeps the identity of every wanted prefix, and compares what a request gets with its own prefixes."""

    def __init__(self, rows: list[tuple], wants: list[tuple[int, int]], config: SchedulerConfig) -> None:
        prompts, targets = [r[0] for r in rows], [r[1] for r in rows]
        limits = [max(r[1], default=1) + r[2] for r in rows]
        super().__init__(prompts, targets, limits, config, [r[3] for r in rows])
        live = np.array([bool(t) and r not in self.too_large for r, t in enumerate(targets)])
        lengths = np.array([len(p) for p in prompts])
        self.first = np.array([w[0] for w in wants]) % lengths
        self.last = np.where(live, np.minimum(self.first + [w[1] for w in wants], lengths), 0)
        self.capture = PromptCapture(self.tree, self.first, self.last)
        self.unended = [len(t) for t in targets]
        self.put: list[int] = []
        self.compared = 0

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)
        flat = [self.ids(c)[p] for c in plan.prefills for p in range(c.start, c.end)]
        for batch in batches(self.capture.pieces(plan), 3):
            assert 0 < sum(map(len, batch)) <= 3
            for piece in batch:
                values = np.array(flat[piece.flat : piece.flat + len(piece)])
                self.capture.put(piece, "prefix", values)
                self.put += values.tolist()

    def count(self, plan: StepPlan) -> list[int]:
        finished = super().count(plan)
        for sequence in finished:
            request = self.who[sequence][0]
            self.unended[request] -= 1
            if not self.unended[request] and self.capture.wants(request):
                expected = self.prompt_ids[request][self.first[request] : self.last[request]]
                assert self.capture.gather(request, "prefix").tolist() == expected
                self.capture.release(request)
                self.compared += 1
        return finished

    def wanted(self) -> set[int]:
        """Identities of all wanted prefixes, and of those between the wants of one node's requests."""
        return {i for r, ids in enumerate(self.prompt_ids) for i in ids[self.first[r] : self.last[r]]}


wants = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=14, max_size=14)


def check(rows: list[tuple], wants: list[tuple[int, int]], config: SchedulerConfig) -> None:
    sim = Capturing(rows, wants[: len(rows)], config)
    sim.run()
    assert len(sim.put) == len(set(sim.put)) == sim.capture.positions, "a position was kept twice"
    assert sim.wanted() <= set(sim.put)
    assert sim.compared == sum(map(sim.capture.wants, range(len(rows))))
    assert sim.capture.nbytes == 0, "something is kept for nobody"
    assert bool(sim.capture) == (sim.compared > 0)


@settings(max_examples=200, deadline=None)
@given(rows, wants, configs(num_pages=1000))
def test_each_request_gets_its_own_positions(rows: list[tuple], wants: list, config: SchedulerConfig) -> None:
    check(rows, wants, config)


@settings(max_examples=300, deadline=None)
@given(tight_jobs(), wants)
def test_in_pools_that_hold_hardly_one_request(job: tuple[list[tuple], SchedulerConfig], wants: list) -> None:
    check(job[0], wants, job[1])


@settings(max_examples=100, deadline=None)
@given(rows, configs(num_pages=1000))
def test_whole_prompts_are_kept_once_per_distinct_token(rows: list[tuple], config: SchedulerConfig) -> None:
    sim = Capturing(rows, [(0, 1000)] * len(rows), config)
    sim.run()
    assert sim.capture.positions == sim.scheduler.stats.prompt_tokens == len(sim.wanted())


def test_rows_that_want_nothing_keep_nothing() -> None:
    prompts = [[1, 2, 3], [1, 2, 4, 5]]
    sim = Capturing([(p, [1], 0, 0) for p in prompts], [(0, 0)] * 2, SchedulerConfig(20, 2, 4, 8))
    sim.run()
    assert not sim.capture
    assert sim.capture.positions == 0
