"""The shapes of `batchgen bench plan` against a trie: order, shared and computed tokens, page waste."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.bench.jobs.planning import PLAN_SHAPES, PlanSize, draw_prompts
from batchgen.plan.estimate import find_dedup, plan_counts
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.plan.sort import sort_prompts
from batchgen.plan.tree import build_tree
from tests.cases import examples
from tests.plan.simulator import Simulator
from tests.plan.test_tree import flat
from tests.plan.trie import Trie, count_pages


def prompts_of(shape: str, size: PlanSize) -> list[list[int]]:
    ids = np.concatenate(list(draw_prompts(shape, size)))
    return ids.reshape(size.rows, size.tokens).tolist()


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def assert_sorted(prompts: list[list[int]], keys: list[int] | None = None) -> None:
    """Check the order and the shared lengths against Python's sort."""
    order, shared = sort_prompts(*flat(prompts), None if keys is None else np.array(keys, np.int64))
    known = keys or [0] * len(prompts)
    assert order.tolist() == sorted(range(len(prompts)), key=lambda i: (known[i], prompts[i], i))
    for place in range(1, len(prompts)):
        before, after = order[place - 1], order[place]
        alike = common(prompts[before], prompts[after]) if known[before] == known[after] else 0
        assert shared[place] == alike


@pytest.mark.parametrize("highest", [3, 40, 2**31 - 2])
@pytest.mark.parametrize("part", [1, 7, 1 << 18])
def test_rows_are_sorted_some_at_a_time(highest: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(highest)
    for name in ("PART", "BLOCK"):
        monkeypatch.setattr(f"batchgen.plan.sort.{name}", part)
    ids = [rng.randrange(highest + 1) for _ in range(3)] + [highest]
    prompts = [[rng.choice(ids) for _ in range(rng.randint(1, 12))] for _ in range(300)]
    assert_sorted(prompts)
    assert_sorted(prompts, [rng.randrange(3) for _ in prompts])


@pytest.mark.parametrize("block", [1, 7])
@pytest.mark.parametrize("order", ["longest", "first-come", "tree"])
def test_plans_do_not_depend_on_the_size_of_blocks(block: int, order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(block)
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 9))] for _ in range(200)]
    samples = np.array([rng.choice([0, 1, 1, 3]) for _ in prompts], np.int32)
    limits = np.array([rng.randint(1, 900) for _ in prompts], np.int32)
    kinds = np.array([rng.randint(-1, 1) for _ in prompts], np.int32)

    def planned(pages: int) -> list[Any]:
        tree = build_tree(*flat(prompts))
        scheduler = Scheduler(tree, samples, limits, SchedulerConfig(pages, 4, 16, 160, order=order), kinds)
        found = [plan_counts(tree, samples, limits, 4, 16), scheduler.work_left(), scheduler.work_of(samples)]
        leaders = find_dedup(tree.node_of_request, kinds, samples > 0, limits)
        steps = []
        for _ in range(60):
            plan = scheduler.step()
            steps.append((plan.prefills, list(plan.decodes)))
            scheduler.commit([])
        return [*found, steps, leaders.tolist(), scheduler.work_left()]

    whole = planned(300), planned(20_000)
    monkeypatch.setattr("batchgen.plan.tree.BLOCK", block)
    assert (planned(300), planned(20_000)) == whole


@pytest.mark.parametrize("shape", PLAN_SHAPES)
@pytest.mark.parametrize(("rows", "tokens", "page"), [(64, 37, 4), (101, 83, 16), (30, 400, 16)])
def test_planned_equals_run_equals_trie(shape: str, rows: int, tokens: int, page: int) -> None:
    prompts = prompts_of(shape, PlanSize(rows, tokens))
    assert_sorted(prompts)
    trie = Trie([])
    known = {request: trie.add(prompts[request]) for request in sorted(range(rows), key=lambda i: (prompts[i], i))}
    samples = [1 + request % 3 for request in range(rows)]
    limits = [1 + request % 5 for request in range(rows)]
    targets = [[limits[request]] * samples[request] for request in range(rows)]
    sim = Simulator(prompts, targets, limits, SchedulerConfig(20_000, page, 16, 160))
    planned = plan_counts(sim.tree, np.array(samples, np.int32), np.array(limits, np.int32), page, 16)
    sim.run()
    assert sim.scheduler.stats.prompt_tokens == sim.tree.distinct_tokens == trie.nodes
    assert planned.distinct_prompt_tokens == trie.nodes
    assert [sim.tree.cached_tokens(request) for request in range(rows)] == [known[request] for request in range(rows)]
    assert planned.page_waste == pytest.approx(count_pages(prompts, samples, limits, page).waste, abs=1e-12)


def test_shapes_match_their_names() -> None:
    size = PlanSize(200, 120)
    distinct = {shape: Trie(prompts_of(shape, size)).nodes for shape in PLAN_SHAPES}
    assert distinct["identical"] == 120
    assert distinct["common-roots"] == 96 + 200 * 24
    assert distinct["unshared"] >= 200 * 119
    # Ten levels of 12 tokens with two branches each; 200 rows visit some of them.
    assert distinct["deep-tree"] % 12 == 0
    assert 12 * 200 < distinct["deep-tree"] < 12 * 200 * 8
    near = prompts_of("near-duplicates", size)
    base = [sorted(column)[len(column) // 2] for column in zip(*near, strict=True)]
    assert all(sum(a != b for a, b in zip(base, row, strict=True)) <= 2 for row in near)


@examples(200)
@given(st.data())
def test_sort_with_small_windows_and_blocks(data: st.DataObject) -> None:
    """Rows much longer than a window, with a few changes and random lengths, with and without keys."""
    base = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))
    edit = st.tuples(st.integers(0, 59), st.integers(0, 3))
    row = st.tuples(st.lists(edit, max_size=3), st.integers(1, 60), st.integers(0, 1))
    rows = data.draw(st.lists(row, max_size=30))
    prompts = []
    for edits, length, _ in rows:
        row = list(base)
        for place, value in edits:
            row[place % len(row)] = value
        prompts.append(row[: max(1, min(length, len(row)))])
    keys = [key for *_, key in rows] if data.draw(st.booleans()) else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchgen.plan.sort.FIRST_WINDOW", data.draw(st.sampled_from([1, 2, 3, 64])))
        patch.setattr("batchgen.plan.sort.LAST_WINDOW", data.draw(st.sampled_from([3, 5, 256])))
        patch.setattr("batchgen.plan.sort.BLOCK", data.draw(st.sampled_from([1, 7, 1 << 16])))
        assert_sorted(prompts, keys)
    if keys is None and prompts:
        assert build_tree(*flat(prompts)).distinct_tokens == Trie(prompts).nodes


def test_nested_and_diverging_prompts() -> None:
    """Every prompt extends the previous one; every prompt diverges one token later than the previous one."""
    stairs = [[5] * n for n in range(1, 300)]
    assert_sorted(stairs[::-1])
    assert build_tree(*flat(stairs)).distinct_tokens == 299
    caterpillar = [[5] * n + [n % 2 * 9] for n in range(300)]
    assert_sorted(caterpillar)
    assert build_tree(*flat(caterpillar)).distinct_tokens == Trie(caterpillar).nodes


@pytest.mark.parametrize("shape", ["unshared", "deep-tree"])
def test_memory_depends_on_rows_not_on_tokens(shape: str) -> None:
    """Ten times the tokens need no more memory in addition to the ids: under 250 bytes per prompt."""
    rows = 20_000

    def peak(tokens: int) -> int:
        ids = np.concatenate(list(draw_prompts(shape, PlanSize(rows, tokens))))
        offsets = np.arange(rows + 1, dtype=np.int64) * tokens
        tracemalloc.start()
        tree = build_tree(ids, offsets)
        plan_counts(tree, np.ones(rows, np.int32), np.full(rows, 64, np.int32), 16, 256)
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    blocks = 4 << 20
    assert peak(30) < rows * 250 + blocks
    assert peak(300) < rows * 250 + blocks
