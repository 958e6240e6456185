"""The choice of passes over shared pages against all choices there are."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.plan.levels import LevelNode, choose_levels


def gain(nodes: list[LevelNode], chosen: set[int], size: int, cost: float, row_cost: float) -> float:
    """What the passes save, less what they cost."""
    total = 0.0
    for place in chosen:
        above = nodes[place].parent
        while above >= 0 and above not in chosen:
            above = nodes[above].parent
        covered = nodes[above].full if above >= 0 else 0
        total += (nodes[place].rows - 1) * (nodes[place].full - covered) * size - cost - nodes[place].rows * row_cost
    return total


def best(nodes: list[LevelNode], size: int, cost: float, row_cost: float) -> float:
    """Of all subsets."""
    places = range(len(nodes))
    return max(
        gain(nodes, set(some), size, cost, row_cost)
        for count in range(len(nodes) + 1)
        for some in combinations(places, count)
    )


@st.composite
def forests(draw: st.DrawFn) -> list[LevelNode]:
    """Parents before children; a node has at least its children's rows, and may have but one child."""
    parents = draw(st.lists(st.integers(-1, 8), max_size=9))
    parents = [min(parent, place - 1) for place, parent in enumerate(parents)]
    longer = [draw(st.integers(0, 6)) for _ in parents]
    rows = [draw(st.integers(0, 4)) for _ in parents]
    for place in range(len(parents) - 1, -1, -1):
        rows[place] = max(rows[place], 2)
        if parents[place] >= 0:
            rows[parents[place]] += rows[place]
    full: list[int] = []
    for place, parent in enumerate(parents):
        full.append(longer[place] + (full[parent] if parent >= 0 else 0))
    return [LevelNode(*values) for values in zip(parents, rows, full, strict=True)]


costs = st.one_of(st.just(0), st.integers(0, 400), st.floats(0, 400))


@settings(max_examples=500, deadline=None)
@given(forests(), st.sampled_from([1, 3, 16]), costs, costs)
def test_no_other_choice_saves_more(nodes: list[LevelNode], size: int, cost: float, row_cost: float) -> None:
    chosen = choose_levels(nodes, size, cost, row_cost)
    assert len(chosen) == len(nodes)
    passes = {place for place, covered in enumerate(chosen) if covered >= 0}
    for place in passes:
        above = nodes[place].parent
        while above >= 0 and above not in passes:
            above = nodes[above].parent
        assert chosen[place] == (nodes[above].full if above >= 0 else 0) < nodes[place].full
    assert abs(gain(nodes, passes, size, cost, row_cost) - best(nodes, size, cost, row_cost)) < 1e-6


def test_a_short_root_above_long_groups_gets_no_pass() -> None:
    """Its 31 saved reads of a page are the groups' own but for one: 16 positions, less than a pass costs."""
    nodes = [LevelNode(-1, 32, 1), LevelNode(0, 16, 20), LevelNode(0, 16, 20)]
    assert choose_levels(nodes, 16, 256) == [-1, 0, 0]
    assert choose_levels(nodes, 16, 16) == [0, 1, 1]


def test_a_root_of_many_groups_gets_one() -> None:
    nodes = [LevelNode(-1, 64, 16), *(LevelNode(0, 8, 48) for _ in range(8))]
    assert choose_levels(nodes, 16, 256) == [0] + [16] * 8


def test_rows_that_cost_something_leave_a_short_root_to_its_groups() -> None:
    """The root saves 7 reads of its 256 positions more than the groups do with it, and costs 64 rows' parts."""
    nodes = [LevelNode(-1, 64, 16), *(LevelNode(0, 8, 48) for _ in range(8))]
    assert choose_levels(nodes, 16, 256, 32) == [-1] + [0] * 8
    assert choose_levels(nodes, 16, 256, 20) == [0] + [16] * 8
    long = [LevelNode(-1, 64, 64), *(LevelNode(0, 8, 96) for _ in range(8))]
    assert choose_levels(long, 16, 256, 32) == [0] + [64] * 8


def test_a_deep_path() -> None:
    """Each row leaves the path a page further on: passes pay every so often, and a thousand levels are no trouble."""
    nodes = [LevelNode(place - 1, 1001 - place, place + 1) for place in range(1000)]
    passes = [place for place, covered in enumerate(choose_levels(nodes, 16, 256)) if covered >= 0]
    assert 20 < len(passes) < 500
    gaps = [b - a for a, b in pairwise(passes)]
    assert max(gaps) < 20
