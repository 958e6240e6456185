"""Splitting a step plan: running the parts on the simulated pool is equivalent to running the step."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.scheduler import SchedulerConfig
from batchgen.plan.step_plan import (
    DecodeRow,
    DecodeRows,
    PrefillChunk,
    PrefixGroup,
    SampleRow,
    SampleRows,
    SequenceStart,
    StepPlan,
    split_decodes,
    split_plan,
)
from tests.cases import examples
from tests.plan.simulator import Simulator
from tests.plan.test_scheduler import EITHER, columns, tight_jobs
from tests.plan.test_state_slots import hybrid, windows


class SplittingSimulator(Simulator):
    """Runs every step in parts, split at random; the fraction `unsplit` of them is not split."""

    random = Random(0)
    unsplit = 0.3

    def execute(self, plan: StepPlan) -> None:
        for part in self.parts(plan):
            super().execute(part)

    def parts(self, plan: StepPlan) -> list[StepPlan]:
        if self.random.random() < self.unsplit:
            return [plan]
        at = self.random.choice([None, self.random.randint(0, plan.tokens + 1)])
        split = split_plan(plan, self.size, at, self.spans)
        if split is None:
            assert plan.tokens <= 1 or self.spans is not None
            return [plan]
        assert_equivalent(plan, *split, self.size)
        return [part for part in split for part in self.parts(part)]

    def check_groups(self, plan: StepPlan) -> None:
        """Check the groups, except for their savings and for being those of the last step."""
        covered = [0] * len(plan.decodes)
        for group in plan.groups:
            assert len(group.rows) >= 2
            for row in group.rows:
                assert plan.decodes[row].pages[group.start_page : group.end_page] == group.pages
                assert covered[row] == group.start_page
                covered[row] = group.end_page
                assert group.end_page * self.size <= plan.decodes[row].position


def flat(plan: StepPlan) -> list[tuple]:
    """(request, sequence, position) of each flat token."""
    chunks = [(c.request, c.sequence, at) for c in plan.prefills for at in range(c.start, c.end)]
    return chunks + [(None, row.sequence, row.position) for row in plan.decodes]


def stored(plan: StepPlan, size: int) -> list[tuple[int, int]]:
    """(page, offset) of each stored position, in order."""
    chunks = [(c.pages[at // size], at % size) for c in plan.prefills if c.store for at in range(c.start, c.end)]
    return chunks + [(row.pages[row.position // size], row.position % size) for row in plan.decodes]


def attended(plan: StepPlan, size: int) -> list[list[int]]:
    """Pages that each flat token attends to."""
    chunks = [c.pages[: at // size + 1] for c in plan.prefills for at in range(c.start, c.end)]
    return chunks + [row.pages for row in plan.decodes]


def sampled(plan: StepPlan) -> list[tuple]:
    tokens = flat(plan)
    return [(sample.sequence, tokens[sample.token]) for sample in plan.samples]


def assert_equivalent(plan: StepPlan, first: StepPlan, second: StepPlan, size: int) -> None:
    """Check that the two parts are equivalent to the plan."""
    again = plan.tokens == 1
    assert [*flat(first), *flat(second)[again:]] == flat(plan)
    assert stored(first, size) + stored(second, size) == stored(plan, size)
    assert [*attended(first, size), *attended(second, size)[again:]] == attended(plan, size)
    assert sampled(first) + sampled(second) == sampled(plan)
    assert (first.starts, first.copies) == (plan.starts, plan.copies)
    assert not second.starts
    assert not second.copies
    for part in (first, second):
        assert part.tokens >= 1
        sizes = [(p.tokens, len(p.samples), sum(c.store for c in p.prefills)) for p in (part, plan)]
        assert sizes[0] != sizes[1]
        for chunk in part.prefills:
            assert len(chunk.pages) == -(-chunk.end // size)


@examples(150)
@given(EITHER, st.sampled_from([0.0, 0.3]), st.randoms(use_true_random=False))
def test_parts_are_equivalent_to_the_step(
    job: tuple[list[tuple], SchedulerConfig], unsplit: float, random: Random
) -> None:
    requests, config = job
    prompts, targets, limits, keys = columns(requests)
    sim = SplittingSimulator(prompts, targets, limits, config, keys)
    sim.random, sim.unsplit = random, unsplit
    sim.run()


class DecodesFirst(Simulator):
    """Runs the decode rows of each step in front of its chunks."""

    def execute(self, plan: StepPlan) -> None:
        if not (plan.prefills and plan.decodes):
            super().execute(plan)
            return
        decodes, rest = split_decodes(plan)
        assert (decodes.decodes, decodes.groups, rest.prefills) == (plan.decodes, plan.groups, plan.prefills)
        assert sampled(rest) + sampled(decodes) == sampled(plan)
        super().execute(decodes)
        super().execute(rest)

    def count_window_pages(self, plan: StepPlan) -> None:
        """Those of a part say nothing about the step."""


@examples(150)
@given(tight_jobs(), st.sampled_from([None, 0, 2, 1000]), windows, st.integers(0, 2))
def test_decode_rows_run_in_front_of_chunks(
    job: tuple[list[tuple], SchedulerConfig], more: int | None, window: int | None, lag: int
) -> None:
    """Also with windows and recurrent states, preemptions and evictions; `more`: spare slots, None without states."""
    requests, config = job
    if lag:
        requests = [(r[0], [max(r[1])] * len(r[1]) if r[1] else [], 0, 0) for r in requests]
    prompts, targets, limits, keys = columns(requests)
    config = config if more is None else hybrid(config, more, window)
    DecodesFirst(prompts, targets, limits, config, keys, lag).run()


def test_chunk_is_cut_between_positions() -> None:
    plan = StepPlan(
        starts=[SequenceStart(3, 0, 0)],
        prefills=[PrefillChunk(0, None, 3, 10, [5, 6, 7]), PrefillChunk(1, 2, 0, 1, [8])],
        decodes=DecodeRows.of([DecodeRow(1, 4, [9, 10])]),
        samples=SampleRows.of([SampleRow(3, 6), SampleRow(2, 7), SampleRow(1, 8)]),
    )
    split = split_plan(plan, 4)
    assert split[0] == StepPlan(starts=plan.starts, prefills=[PrefillChunk(0, None, 3, 7, [5, 6])])
    assert split[1] == StepPlan(
        prefills=[PrefillChunk(0, None, 7, 10, [5, 6, 7]), PrefillChunk(1, 2, 0, 1, [8])],
        decodes=plan.decodes,
        samples=SampleRows.of([SampleRow(3, 2), SampleRow(2, 3), SampleRow(1, 4)]),
    )


def test_groups_keep_the_rows_of_the_same_part() -> None:
    decodes = DecodeRows.of(DecodeRow(i, 20, [1, 2, 3 + i // 2, 9 + i, 20 + i, 30 + i]) for i in range(6))
    groups = [PrefixGroup(list(range(6)), [1, 2], 0, 2)]
    groups += [PrefixGroup([i, i + 1], [3 + i // 2], 2, 3) for i in (0, 2, 4)]
    split = split_plan(StepPlan(decodes=decodes, groups=groups), 4, 3)
    for part in split:
        pair = [0, 1] if part is split[0] else [1, 2]
        assert [(group.rows, group.end_page) for group in part.groups] == [([0, 1, 2], 2), (pair, 3)]
    last = split_plan(split[1], 4, 2)
    assert last[1] == StepPlan(decodes=decodes[5:])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_samples_of_one_token_are_split(count: int) -> None:
    chunk = PrefillChunk(0, None, 7, 8, [1, 2])
    plan = StepPlan(prefills=[chunk], samples=SampleRows.of(SampleRow(i, 0) for i in range(count)))
    split = split_plan(plan, 4)
    assert [part.prefills[0].store for part in split] == [True, False]
    assert [len(part.samples) for part in split] == [count // 2, count - count // 2]
    assert [*split[0].samples, *split[1].samples] == plan.samples


def test_plans_that_cannot_be_split() -> None:
    chunk = PrefillChunk(0, None, 7, 8, [1, 2])
    assert split_plan(StepPlan(), 4) is None
    assert split_plan(StepPlan(prefills=[chunk]), 4) is None
    row, draw = DecodeRows.of([DecodeRow(0, 3, [1])]), SampleRows.of([SampleRow(0, 0)])
    assert split_plan(StepPlan(decodes=row, samples=draw), 4) is None
    kept = PrefillChunk(0, None, 7, 8, [1, 2], store=False)
    assert split_plan(StepPlan(prefills=[kept], samples=draw), 4) is None


def test_pages_of_a_step_are_those_of_its_positions() -> None:
    rng = Random(0)
    for _ in range(200):
        size, pool, held, new = rng.randint(1, 5), range(1, 30), set[int](), set[int]()

        def table(length: int, size: int = size, pool: range = pool) -> list[int]:
            return [rng.choice(pool) for _ in range(-(-length // size))]

        chunks, rows = [], []
        for _ in range(rng.randint(0, 3)):
            start, length, store = rng.randint(0, 9), rng.randint(1, 9), rng.random() < 0.7
            chunk = PrefillChunk(0, None, start, start + length, table(start + length), store=store)
            chunks.append(chunk)
            held |= {chunk.pages[at // size] for at in range(start if store else chunk.end)}
            new |= {chunk.pages[at // size] for at in range(start, chunk.end) if store}
        for sequence in range(rng.randint(0, 4)):
            row = DecodeRow(sequence, rng.randint(0, 12), table(16))
            rows.append(row)
            held |= {row.pages[at // size] for at in range(row.position)}
            new.add(row.pages[row.position // size])
        plan = StepPlan(prefills=chunks, decodes=DecodeRows.of(rows))
        assert [each.tolist() for each in plan.pages_used(size)] == [sorted(held), sorted(new)]
