"""Begin order: against a recursive implementation, and its effect on counted steps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.config import Order
from batchgen.plan.order import begin_order, renumber
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.plan.tree import PrefixTree
from tests.cases import examples
from tests.plan.counted import counted, random_job
from tests.plan.test_tree import tree_of

prompts_and_values = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(0, 4)), min_size=1, max_size=16
)


def naive_order(prompts: list[list[int]], values: list[int]) -> list[int]:
    """Requests sorted by the highest value below at each branch of the trie, recursively."""

    def below(prefix: list[int]) -> list[int]:
        return [r for r, p in enumerate(prompts) if p[: len(prefix)] == prefix]

    def walk(prefix: list[int]) -> list[int]:
        own = [r for r in below(prefix) if len(prompts[r]) == len(prefix)]
        found = sorted(own, key=lambda r: (-values[r], r))
        tokens = sorted({prompts[r][len(prefix)] for r in below(prefix) if len(prompts[r]) > len(prefix)})
        for token in sorted(tokens, key=lambda t: (-max(values[r] for r in below([*prefix, t])), t)):
            found += walk([*prefix, token])
        return found

    return walk([])


def paths(tree: PrefixTree, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    requests = tree.order[tree.first_row].tolist()
    return [tuple(prompts[r][:e]) for r, e in zip(requests, tree.end.tolist(), strict=True)]


@examples(300)
@given(prompts_and_values)
def test_renumbered_tree_equals_recursion(job: list[tuple[list[int], int]]) -> None:
    prompts, values = [j[0] for j in job], [j[1] for j in job]
    before = tree_of(prompts)
    value = np.array(values, np.int64)
    ranges = zip(before.first_row, before.last_row, strict=True)
    key = np.array([value[before.order[a : b + 1]].max() for a, b in ranges])
    tree, old = renumber(before, -key, value)
    best = key[old]
    assert tree.order.tolist() == naive_order(prompts, values)
    assert sorted(paths(tree, prompts)) == sorted(paths(before, prompts))
    assert tree.distinct_tokens == before.distinct_tokens
    by_path = {path: node for node, path in enumerate(paths(tree, prompts))}
    for node, path in enumerate(paths(tree, prompts)):
        below = [r for r, p in enumerate(prompts) if tuple(p[: len(path)]) == path]
        assert sorted(tree.order[tree.first_row[node] : tree.last_row[node] + 1].tolist()) == below
        assert best[node] == max(values[r] for r in below)
        under = [n for p, n in by_path.items() if p[: len(path)] == path]
        assert sorted(under) == list(range(node, tree.subtree_end[node]))
        parent = int(tree.parent[node])
        assert parent < node
        assert tree.start[node] == (0 if parent < 0 else tree.end[parent])
    for r, prompt in enumerate(prompts):
        assert by_path[tuple(prompt)] == tree.node_of_request[r]
    previous: list[int] = []
    for r in tree.order.tolist():
        common = 0
        while common < min(len(previous), len(prompts[r])) and previous[common] == prompts[r][common]:
            common += 1
        assert tree.shared_len[r] == common
        previous = prompts[r]


@examples(200)
@given(prompts_and_values, st.sampled_from(["longest", "tree", "first-come"]), st.integers(1, 3))
def test_parents_begin_before_their_children(job: list[tuple[list[int], int]], order: Order, slots: int) -> None:
    config = SchedulerConfig(num_pages=99, page_size=2, max_num_seqs=slots, max_tokens_per_step=99, order=order)
    samples = np.array([1 if j[1] else 0 for j in job])
    begin = begin_order(tree_of([j[0] for j in job]), samples, np.array([max(1, j[1]) for j in job]), config)
    rank = list(range(len(begin.tree))) if begin.rank is None else begin.rank.tolist()
    assert sorted(rank) == list(range(len(begin.tree)))
    assert all(rank[p] < rank[n] for n, p in enumerate(begin.tree.parent.tolist()) if p >= 0)


def begun(prompts: list[list[int]], limits: list[int], order: Order, pages: int = 99) -> list[int]:
    """Requests in the order in which they begin, one at a time."""
    config = SchedulerConfig(num_pages=pages, page_size=2, max_num_seqs=1, max_tokens_per_step=99, order=order)
    scheduler = Scheduler(tree_of(prompts), np.ones(len(prompts), int), np.array(limits), config)
    found: list[int] = []
    drawn: Counter[int] = Counter()
    while (plan := scheduler.step()) is not None:
        found += [start.request for start in plan.starts]
        drawn.update(row.sequence for row in plan.samples)
        scheduler.commit([row.sequence for row in plan.samples if drawn[row.sequence] == limits[found[row.sequence]]])
    return found


def test_orders_of_a_small_example() -> None:
    prompts = [[1, 1], [2, 2, 2], [2, 2, 3], [4], [5, 5]]
    limits = [3, 2, 9, 5, 5]
    assert begun(prompts, limits, "tree") == [0, 1, 2, 3, 4]
    assert begun(prompts[::-1], limits[::-1], "first-come") == [0, 1, 2, 3, 4]
    # Of two rows with limit five the one with the shorter prompt begins first. The prefix 2, 2 waits for its short row.
    assert begun(prompts, limits, "longest") == [2, 3, 4, 0, 1]
    # In a small pool it may not wait.
    assert begun(prompts, limits, "longest", pages=7) == [2, 1, 3, 4, 0]


def test_cancelled_and_empty_requests_are_skipped() -> None:
    config = SchedulerConfig(num_pages=99, page_size=2, max_num_seqs=1, max_tokens_per_step=99)
    scheduler = Scheduler(tree_of([[1], [2], [3]]), np.array([1, 0, 1]), np.array([2, 90, 3]), config)
    assert scheduler.cancel(2) == []
    plan = scheduler.step()
    assert [start.request for start in plan.starts] == [0]


JOBS = {
    "unique": [(512, (32, 256))],
    "ten prefixes": [(10, (512, 1024)), (50, (16, 64))],
    "a tree": [(1, (300, 300)), (10, (512, 1024)), (50, (16, 64))],
    "many small families": [(128, (100, 200)), (4, (16, 64))],
}


@pytest.mark.parametrize("levels", JOBS.values(), ids=JOBS)
def test_longest_first_leaves_no_ragged_tail(levels: list[tuple[int, tuple[int, int]]]) -> None:
    """Rows of 8 to 256 tokens in 64 slots need hardly more than the minimum number of steps."""
    prompts, limits = random_job(levels, (8, 256), 0)
    config = {"num_pages": 4000, "page_size": 16, "max_num_seqs": 64, "max_tokens_per_step": 2048}
    longest = counted(prompts, limits, SchedulerConfig(**config))
    first_come = counted(prompts, limits, SchedulerConfig(**config, order="first-come"))
    least = -(-int(limits.sum()) // 64)
    assert longest.stats.steps <= 1.03 * least < 1.08 * least <= first_come.stats.steps
    assert longest.stats.tail_steps < 50 < 150 < first_come.stats.tail_steps
    assert longest.stats.occupancy > 0.97
    for run in (longest, first_come):
        assert run.stats.prompt_tokens == run.distinct_tokens
        assert run.stats.recomputed_tokens == run.stats.evicted_nodes == run.stats.preemptions == 0
    if len(levels) > 1:
        # Rows with the same prefix run together, so it is read once for all of them.
        assert longest.stats.decode_kv_reads < 0.88 * first_come.stats.decode_kv_reads


def test_the_last_stretch_holds_few_prefixes() -> None:
    """If prefixes are long for the pool, subtrees are not interleaved: one after the other needs fewer pages."""
    prompts, limits = random_job([(10, (512, 512)), (50, (16, 16))], (8, 256), 0)
    config = {"page_size": 16, "max_num_seqs": 64, "max_tokens_per_step": 2048}
    wide = counted(prompts, limits, SchedulerConfig(num_pages=4000, **config))
    narrow = counted(prompts, limits, SchedulerConfig(num_pages=900, **config))
    assert narrow.stats.decode_kv_reads < wide.stats.decode_kv_reads
    assert narrow.stats.prompt_tokens == narrow.distinct_tokens


def test_tail_of_a_small_example() -> None:
    # Two slots; lengths 3, 2, 1: the last one begins in step 3, together with the first one's last token.
    config = SchedulerConfig(num_pages=99, page_size=2, max_num_seqs=2, max_tokens_per_step=99)
    run = counted([[1], [2], [3]], np.array([3, 2, 1]), config)
    assert (run.stats.steps, run.stats.tail_steps, run.stats.tail_efficiency) == (3, 0, 1.0)
    assert run.stats.occupancy == 1.0
    # In input order the longest begins last and runs alone.
    run = counted([[1], [2], [3]], np.array([1, 2, 3]), SchedulerConfig(99, 2, 2, 99, order="first-come"))
    assert (run.stats.steps, run.stats.tail_steps, run.stats.tail_tokens) == (4, 2, 2)
    assert (run.stats.tail_efficiency, run.stats.occupancy) == (0.5, 0.75)
