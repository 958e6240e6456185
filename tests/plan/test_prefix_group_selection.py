"""Selection of prefix groups, against the best of all subsets."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.prefix_group_selection import SharedNode, select_groups
from tests.cases import examples


def net_savings(nodes: list[SharedNode], chosen: set[int], size: int, cost: float, row_cost: float) -> float:
    """Savings of the passes minus their cost."""
    total = 0.0
    for place in chosen:
        above = nodes[place].parent
        while above >= 0 and above not in chosen:
            above = nodes[above].parent
        covered = nodes[above].full_pages if above >= 0 else 0
        rows, pages = nodes[place].rows, nodes[place].full_pages - covered
        total += (rows - 1) * pages * size - cost - rows * row_cost
    return total


def best_savings(nodes: list[SharedNode], size: int, cost: float, row_cost: float) -> float:
    """Highest net savings of all subsets of nodes."""
    places = range(len(nodes))
    return max(
        net_savings(nodes, set(some), size, cost, row_cost)
        for count in range(len(nodes) + 1)
        for some in combinations(places, count)
    )


@st.composite
def forests(draw: st.DrawFn) -> list[SharedNode]:
    """Forests with parents before children; a node has at least its children's rows."""
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
    return [SharedNode(*values) for values in zip(parents, rows, full, strict=True)]


costs = st.one_of(st.just(0), st.integers(0, 400), st.floats(0, 400))


@examples(500)
@given(forests(), st.sampled_from([1, 3, 16]), costs, costs)
def test_selection_is_optimal(nodes: list[SharedNode], size: int, cost: float, row_cost: float) -> None:
    chosen = select_groups(nodes, size, cost, row_cost)
    assert len(chosen) == len(nodes)
    passes = {place for place, covered in enumerate(chosen) if covered >= 0}
    for place in passes:
        above = nodes[place].parent
        while above >= 0 and above not in passes:
            above = nodes[above].parent
        assert chosen[place] == (nodes[above].full_pages if above >= 0 else 0) < nodes[place].full_pages
    assert abs(net_savings(nodes, passes, size, cost, row_cost) - best_savings(nodes, size, cost, row_cost)) < 1e-6


def test_short_root_above_long_groups_is_not_selected() -> None:
    """Of its 31 saved reads of a page the groups save all but one: 16 positions, less than a pass costs."""
    nodes = [SharedNode(-1, 32, 1), SharedNode(0, 16, 20), SharedNode(0, 16, 20)]
    assert select_groups(nodes, 16, 256) == [-1, 0, 0]
    assert select_groups(nodes, 16, 16) == [0, 1, 1]


def test_root_of_many_groups_is_selected() -> None:
    nodes = [SharedNode(-1, 64, 16), *(SharedNode(0, 8, 48) for _ in range(8))]
    assert select_groups(nodes, 16, 256) == [0] + [16] * 8


def test_short_root_is_not_selected_if_rows_have_a_cost() -> None:
    """The root saves 7 more reads of its 256 positions than the groups do, and costs 64 times `row_cost`."""
    nodes = [SharedNode(-1, 64, 16), *(SharedNode(0, 8, 48) for _ in range(8))]
    assert select_groups(nodes, 16, 256, 32) == [-1] + [0] * 8
    assert select_groups(nodes, 16, 256, 20) == [0] + [16] * 8
    long = [SharedNode(-1, 64, 64), *(SharedNode(0, 8, 96) for _ in range(8))]
    assert select_groups(long, 16, 256, 32) == [0] + [64] * 8


def test_deep_path() -> None:
    """A thousand levels at each of which one row leaves the path: passes pay at some of them."""
    nodes = [SharedNode(place - 1, 1001 - place, place + 1) for place in range(1000)]
    passes = [place for place, covered in enumerate(select_groups(nodes, 16, 256)) if covered >= 0]
    assert 20 < len(passes) < 500
    gaps = [b - a for a, b in pairwise(passes)]
    assert max(gaps) < 20
