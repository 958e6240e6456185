"""Steps cut in two: the parts are run by the simulated pool in the step's place, and add up to it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.plan.scheduler import SchedulerConfig
from batchgen.plan.split import split_plan
from batchgen.plan.types import (
    DecodeRow,
    DecodeRows,
    PrefillChunk,
    PrefixGroup,
    SampleRow,
    SampleRows,
    SequenceStart,
    StepPlan,
)
from tests.plan.simulator import Simulator
from tests.plan.test_scheduler import configs, rows, tight_jobs

EITHER = st.one_of(tight_jobs(), st.tuples(rows, configs(num_pages=400)))


class Halving(Simulator):
    """Runs every step in parts, cut at random; `whole` of them are not cut."""

    random = Random(0)
    whole = 0.3

    def execute(self, plan: StepPlan) -> None:
        for part in self.parts(plan):
            super().execute(part)

    def parts(self, plan: StepPlan) -> list[StepPlan]:
        if self.random.random() < self.whole:
            return [plan]
        at = self.random.choice([None, self.random.randint(0, plan.tokens + 1)])
        halves = split_plan(plan, self.size, at)
        if halves is None:
            assert plan.tokens <= 1
            return [plan]
        add_up(plan, *halves, self.size)
        return [part for half in halves for part in self.parts(half)]

    def check_groups(self, plan: StepPlan) -> None:
        """As for a whole step, but for what a group must save and what the last step's were."""
        covered = [0] * len(plan.decodes)
        for group in plan.groups:
            assert len(group.rows) >= 2
            for row in group.rows:
                assert plan.decodes[row].pages[group.start_page : group.end_page] == group.pages
                assert covered[row] == group.start_page
                covered[row] = group.end_page
                assert group.end_page * self.size <= plan.decodes[row].position


def flat(plan: StepPlan) -> list[tuple]:
    """What each flat token is."""
    chunks = [(c.request, c.sequence, at) for c in plan.prefills for at in range(c.start, c.end)]
    return chunks + [(None, row.sequence, row.position) for row in plan.decodes]


def stored(plan: StepPlan, size: int) -> list[tuple[int, int]]:
    """(page, offset) of what is written, in order."""
    chunks = [(c.pages[at // size], at % size) for c in plan.prefills if c.store for at in range(c.start, c.end)]
    return chunks + [(row.pages[row.position // size], row.position % size) for row in plan.decodes]


def attended(plan: StepPlan, size: int) -> list[list[int]]:
    """By flat token, the pages it sees."""
    chunks = [c.pages[: at // size + 1] for c in plan.prefills for at in range(c.start, c.end)]
    return chunks + [row.pages for row in plan.decodes]


def drawn(plan: StepPlan) -> list[tuple]:
    tokens = flat(plan)
    return [(sample.sequence, tokens[sample.token]) for sample in plan.samples]


def add_up(plan: StepPlan, first: StepPlan, second: StepPlan, size: int) -> None:
    """The halves do what the plan does."""
    again = plan.tokens == 1
    assert [*flat(first), *flat(second)[again:]] == flat(plan)
    assert stored(first, size) + stored(second, size) == stored(plan, size)
    assert [*attended(first, size), *attended(second, size)[again:]] == attended(plan, size)
    assert drawn(first) + drawn(second) == drawn(plan)
    assert (first.starts, first.copies) == (plan.starts, plan.copies)
    assert not second.starts
    assert not second.copies
    for half in (first, second):
        assert half.tokens >= 1
        assert (half.tokens, len(half.samples), sum(c.store for c in half.prefills)) != (
            plan.tokens,
            len(plan.samples),
            sum(c.store for c in plan.prefills),
        )
        for chunk in half.prefills:
            assert len(chunk.pages) == -(-chunk.end // size)


@settings(max_examples=300, deadline=None)
@given(EITHER, st.sampled_from([0.0, 0.3]), st.randoms(use_true_random=False))
def test_parts_do_what_the_step_does(job: tuple[list[tuple], SchedulerConfig], whole: float, random: Random) -> None:
    made, config = job
    sim = Halving(
        prompts=[r[0] for r in made],
        targets=[r[1] for r in made],
        max_new=[max(r[1], default=1) + r[2] for r in made],
        config=config,
        keys=[r[3] for r in made],
    )
    sim.random, sim.whole = random, whole
    sim.run()


def test_a_chunk_is_cut_at_a_position() -> None:
    plan = StepPlan(
        starts=[SequenceStart(3, 0, 0)],
        prefills=[PrefillChunk(0, None, 3, 10, [5, 6, 7]), PrefillChunk(1, 2, 0, 1, [8])],
        decodes=DecodeRows.of([DecodeRow(1, 4, [9, 10])]),
        samples=SampleRows.of([SampleRow(3, 6), SampleRow(2, 7), SampleRow(1, 8)]),
    )
    halves = split_plan(plan, 4)
    assert halves is not None
    assert halves[0] == StepPlan(starts=plan.starts, prefills=[PrefillChunk(0, None, 3, 7, [5, 6])])
    assert halves[1] == StepPlan(
        prefills=[PrefillChunk(0, None, 7, 10, [5, 6, 7]), PrefillChunk(1, 2, 0, 1, [8])],
        decodes=plan.decodes,
        samples=SampleRows.of([SampleRow(3, 2), SampleRow(2, 3), SampleRow(1, 4)]),
    )


def test_groups_are_those_of_the_rows_that_stay_together() -> None:
    decodes = DecodeRows.of(DecodeRow(i, 20, [1, 2, 3 + i // 2, 9 + i, 20 + i, 30 + i]) for i in range(6))
    groups = [PrefixGroup(list(range(6)), [1, 2], 0, 2)]
    groups += [PrefixGroup([i, i + 1], [3 + i // 2], 2, 3) for i in (0, 2, 4)]
    halves = split_plan(StepPlan(decodes=decodes, groups=groups), 4, 3)
    assert halves is not None
    for half in halves:
        assert [(group.rows, group.end_page) for group in half.groups] == [
            ([0, 1, 2], 2),
            ([0, 1] if half is halves[0] else [1, 2], 3),
        ]
    last = split_plan(halves[1], 4, 2)
    assert last is not None
    assert last[1] == StepPlan(decodes=decodes[5:])


@pytest.mark.parametrize("draws", [1, 2, 5])
def test_samples_of_one_token_are_dealt_out(draws: int) -> None:
    chunk = PrefillChunk(0, None, 7, 8, [1, 2])
    plan = StepPlan(prefills=[chunk], samples=SampleRows.of(SampleRow(i, 0) for i in range(draws)))
    halves = split_plan(plan, 4)
    assert halves is not None
    assert [half.prefills[0].store for half in halves] == [True, False]
    assert [len(half.samples) for half in halves] == [draws // 2, draws - draws // 2]
    assert [*halves[0].samples, *halves[1].samples] == plan.samples


def test_what_is_left_when_nothing_can_be_cut() -> None:
    chunk = PrefillChunk(0, None, 7, 8, [1, 2])
    assert split_plan(StepPlan(), 4) is None
    assert split_plan(StepPlan(prefills=[chunk]), 4) is None
    row, draw = DecodeRows.of([DecodeRow(0, 3, [1])]), SampleRows.of([SampleRow(0, 0)])
    assert split_plan(StepPlan(decodes=row, samples=draw), 4) is None
    kept = PrefillChunk(0, None, 7, 8, [1, 2], store=False)
    assert split_plan(StepPlan(prefills=[kept], samples=draw), 4) is None
