"""No chunk ends inside of a span of positions that see one another, however small the steps and the pool are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.scheduler import SchedulerConfig
from batchgen.plan.spans import ItemSpans, PromptSpans
from batchgen.plan.step_plan import StepPlan, split_plan
from batchgen.plan.window_pages import WindowGroup
from tests.cases import examples
from tests.plan.simulator import FIRST_ITEM, Simulator
from tests.plan.test_scheduler import configs
from tests.plan.test_step_plan import SplittingSimulator
from tests.plan.test_window_pages import windowed

FEATURES = {0: 5, 1: 3, 2: 1, 3: 8}
"""Item -> its features."""
LONGEST = max(FEATURES.values())


def with_items(parts: list[int]) -> list[int]:
    """A prompt: numbers below 0 name items."""
    found: list[int] = []
    for part in parts:
        found += [part] if part >= 0 else [FIRST_ITEM - 1 - part] * FEATURES[-1 - part]
    return found


def naive_spans(ids: list[int]) -> list[tuple[int, int]]:
    """The spans of a prompt, position by position."""
    found: list[tuple[int, int]] = []
    seen: dict[int, int] = {}
    for at, token in enumerate(ids):
        if token < FIRST_ITEM or FEATURES[token - FIRST_ITEM] == 1:
            continue
        begins = seen.get(token, 0) % FEATURES[token - FIRST_ITEM] == 0
        seen[token] = seen.get(token, 0) + 1
        if not begins and found and found[-1][1] == at and ids[at - 1] == token:
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((at, at + 1))
    return found


class WholeSimulator(SplittingSimulator):
    """Checks that every part of a step has whole spans, as far as they were not computed before."""

    def spans_of(self, request: int) -> list[tuple[int, int]]:
        """The spans of a request's prompt."""
        return naive_spans(self.prompts[request])

    def execute(self, plan: StepPlan) -> None:
        for part in self.parts(plan):
            for chunk in part.prefills:
                for start, end in self.spans_of(chunk.request):
                    assert not start < chunk.end < end, (chunk, start, end)
            Simulator.execute(self, part)


class PromptSimulator(WholeSimulator):
    """As above, of prompts that begin with 0: each of them is one span."""

    def spans_of(self, request: int) -> list[tuple[int, int]]:
        """The spans of a request's prompt."""
        prompt = self.prompts[request]
        return [(0, len(prompt))] if prompt[0] == 0 else []


parts = st.lists(st.integers(-4, 2), min_size=1, max_size=9)
samples = st.lists(st.integers(1, 6), max_size=3)
jobs = st.lists(st.tuples(parts, samples), min_size=1, max_size=10)


class WholeWindowSimulator(WholeSimulator):
    """Steps of a model with windows, which are not run in parts here."""

    unsplit = 1.0

    def count_window_pages(self, plan: StepPlan) -> None:
        """A chunk that ends in front of a span keeps a page of its window for a step more."""


def run_job(job: list[tuple[list[int], list[int]]], config: SchedulerConfig, window: int | None, seed: int = 0) -> None:
    prompts = [with_items(row[0]) for row in job]
    limits = [max(row[1], default=1) for row in job]
    needed = max(-(-(len(p) + n) // config.page_size) for p, n in zip(prompts, limits, strict=True))
    most = max(config.max_tokens_per_step, LONGEST)
    config = replace(config, max_tokens_per_step=most, num_pages=max(config.num_pages, needed + 2))
    if window is not None:
        config = windowed(config, window)
        full, held = config.cache_groups
        assert isinstance(held, WindowGroup)
        held = replace(held, num_pages=held.least_pages(config.page_size, LONGEST))
        config = replace(config, cache_groups=(full, held))
    kind = WholeSimulator if window is None else WholeWindowSimulator
    sim = kind(prompts, [row[1] for row in job], limits, config, features=FEATURES)
    sim.random.seed(seed)
    sim.run()


@examples(150)
@given(jobs, configs(), st.integers(0, 2))
def test_chunks_hold_whole_spans(job: list[tuple[list[int], list[int]]], config: SchedulerConfig, seed: int) -> None:
    run_job(job, config, None, seed)


@examples(100)
@given(jobs, configs(), st.sampled_from([1, 4, 40]))
def test_chunks_hold_whole_spans_in_models_with_windows(
    job: list[tuple[list[int], list[int]]], config: SchedulerConfig, window: int
) -> None:
    run_job(job, config, window)


words = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@examples(100)
@given(st.lists(st.tuples(words, samples), min_size=1, max_size=10), configs(), st.integers(0, 2))
def test_chunks_hold_whole_prompts(job: list[tuple[list[int], list[int]]], config: SchedulerConfig, seed: int) -> None:
    """Prompts that are one span share with equal ones alone; others share as ever."""
    prompts = [row[0] for row in job]
    keys = [1 + prompts.index(prompt) if prompt[0] == 0 else 0 for prompt in prompts]
    lengths = [len(prompt) if key else 0 for key, prompt in zip(keys, prompts, strict=True)]
    limits = [max(row[1], default=1) for row in job]
    needed = max(-(-(len(p) + n) // config.page_size) for p, n in zip(prompts, limits, strict=True))
    most = max(config.max_tokens_per_step, *lengths, 1)
    config = replace(config, max_tokens_per_step=most, num_pages=max(config.num_pages, needed + 2))
    sim = PromptSimulator(prompts, [row[1] for row in job], limits, config, keys, lengths=lengths)
    sim.random.seed(seed)
    sim.run()


def test_whole_prompts_are_their_only_span() -> None:
    spans = PromptSpans(np.array([0, 5]))
    assert (spans.longest, spans.within(0, 0, 9), spans.within(1, 0, 9)) == (5, [], [(0, 5)])
    assert [spans.whole(0, end) for end in (1, 4)] == [1, 4]
    assert [spans.whole(1, end) for end in (0, 1, 4, 5, 6)] == [0, 0, 0, 5, 6]
    assert spans.within(1, 4, 7) == [(4, 5)]  # the last token is computed again, and sees all of the others
    assert spans.within(1, 5, 7) == []


@given(parts, parts)
def test_spans_are_those_found_position_by_position(first: list[int], second: list[int]) -> None:
    prompts = [with_items(first), with_items(second)]
    offsets = np.array([0, len(prompts[0]), len(prompts[0]) + len(prompts[1])])
    sizes = np.array([FEATURES[item] for item in sorted(FEATURES)])
    spans = ItemSpans(np.array([*prompts[0], *prompts[1]], np.int32), offsets, FIRST_ITEM, sizes)
    for request, ids in enumerate(prompts):
        expected = naive_spans(ids)
        assert spans.within(request, 0, len(ids)) == expected
        for end in range(len(ids) + 1):
            inside = [start for start, stop in expected if start < end < stop]
            assert spans.whole(request, end) == (inside[0] if inside else end)


def test_a_step_that_does_not_fit_is_cut_around_a_span() -> None:
    ids = [1, 2, *[FIRST_ITEM] * 5, 3]
    spans = ItemSpans(np.array(ids, np.int32), np.array([0, len(ids)]), FIRST_ITEM, np.array([5]))
    sim = Simulator([ids], [[1]], [1], SchedulerConfig(9, 2, 4, 16), features={0: 5})
    plan = sim.scheduler.step()
    assert plan is not None
    for at, cut in ((1, 1), (2, 2), (3, 2), (6, 2), (7, 7)):
        split = split_plan(plan, 2, at, spans)
        assert split[0].tokens == cut
    behind = split_plan(split_plan(plan, 2, 2, spans)[1], 2, 1, spans)  # type: ignore[index]
    assert behind[0].tokens == 5
    assert split_plan(behind[0], 2, 2, spans) is None


@pytest.mark.parametrize("limit", [1, 4])
def test_a_lower_limit_of_tokens_still_holds_the_longest_span(limit: int) -> None:
    ids = [1, *[FIRST_ITEM] * 5, 3]
    sim = Simulator([ids], [[2]], [2], SchedulerConfig(9, 2, 1, 16), features={0: 5})
    sim.scheduler.limit_tokens(limit)
    sim.run()
    assert sim.scheduler.config.max_tokens_per_step == 5
