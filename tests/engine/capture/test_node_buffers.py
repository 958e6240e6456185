"""`NodeBuffers` on random trees and pools, against every request's prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.capture.node_buffers import NodeBuffers, split_spans
from batchgen.plan.scheduler import SchedulerConfig
from batchgen.plan.step_plan import StepPlan
from tests.plan.simulator import Simulator
from tests.plan.test_scheduler import EITHER, columns


class Capturing(Simulator):
    """Stores the identity of every needed prefix, and compares a request's rows with its prefixes."""

    def __init__(self, rows: list[tuple], wants: list[tuple[int, int]], config: SchedulerConfig) -> None:
        prompts, targets, limits, keys = columns(rows)
        super().__init__(prompts, targets, limits, config, keys)
        live = np.array([bool(t) and r not in self.too_large for r, t in enumerate(targets)])
        lengths = np.array([len(p) for p in prompts])
        self.first = np.array([w[0] for w in wants]) % lengths
        self.last = np.where(live, np.minimum(self.first + [w[1] for w in wants], lengths), 0)
        self.buffers = NodeBuffers(self.tree, self.first, self.last)
        self.unended = [len(t) for t in targets]
        self.put: list[int] = []
        self.compared = 0

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)
        flat = [self.ids(c)[p] for c in plan.prefills for p in range(c.start, c.end)]
        for batch in split_spans(self.buffers.spans(plan), 3):
            assert 0 < sum(map(len, batch)) <= 3
            for span in batch:
                values = np.array(flat[span.flat : span.flat + len(span)])
                self.buffers.put(span, "prefix", values)
                self.put += values.tolist()

    def count(self, plan: StepPlan) -> list[int]:
        finished = super().count(plan)
        for sequence in finished:
            request = self.owners[sequence][0]
            self.unended[request] -= 1
            if not self.unended[request] and self.buffers.needs(request):
                expected = self.prompt_ids[request][self.first[request] : self.last[request]]
                assert self.buffers.gather(request, "prefix").tolist() == expected
                self.buffers.release(request)
                self.compared += 1
        return finished

    def wanted(self) -> set[int]:
        """Identities of all needed prefixes, including those between the ranges of one node's requests."""
        return {i for r, ids in enumerate(self.prompt_ids) for i in ids[self.first[r] : self.last[r]]}


wants = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=14, max_size=14)


@settings(max_examples=90, deadline=None)
@given(EITHER, wants)
def test_each_request_gets_its_positions(job: tuple[list[tuple], SchedulerConfig], wants: list) -> None:
    """In pools of many pages, and for little more than one request."""
    rows, config = job
    sim = Capturing(rows, wants[: len(rows)], config)
    sim.run()
    assert len(sim.put) == len(set(sim.put)) == sim.buffers.positions, "a position was stored twice"
    assert sim.wanted() <= set(sim.put)
    assert sim.compared == sum(map(sim.buffers.needs, range(len(rows))))
    assert sim.buffers.nbytes == 0, "some arrays were not freed"
    assert bool(sim.buffers) == (sim.compared > 0)
