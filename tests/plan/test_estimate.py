"""Counted costs of a plan, against the scheduler and against counting by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.estimate import find_dedup, plan_counts
from tests.cases import examples
from tests.plan.simulator import Simulator
from tests.plan.test_scheduler import SchedulerConfig, rows, simulator
from tests.plan.test_tree import tree_of


def counts_of(sim: Simulator) -> tuple:
    samples = np.array([len(t) for t in sim.targets], np.int32)
    return samples, np.array([max(t, default=1) for t in sim.targets], np.int32)


def window_pages(prompts: list[list[int]], max_new: list[int], samples: list[int], size: int) -> int:
    """Number of pages with distinct contents of some requests at full length."""
    pages = set()
    for r, (prompt, new, n) in enumerate(zip(prompts, max_new, samples, strict=True)):
        for page in range(-(-(len(prompt) + new - 1) // size)):
            full = (page + 1) * size <= len(prompt)
            pages |= {(*prompt[: (page + 1) * size],) if full else ("own", r, s, page) for s in range(n)}
    return len(pages)


@examples(300)
@given(rows, st.sampled_from([1, 2, 4, 8]), st.integers(1, 6))
def test_planned_counts_equal_the_run(rows: list[tuple], size: int, seqs: int) -> None:
    rows = [(r[0], [max(r[1])] * len(r[1]) if r[1] else [], 0, 0) for r in rows]
    sim = simulator(rows, SchedulerConfig(2000, size, seqs, seqs + 20))
    samples, max_new = counts_of(sim)
    planned = plan_counts(sim.tree, samples, max_new, size, seqs)
    sim.run()
    stats = sim.scheduler.stats
    assert planned.distinct_prompt_tokens == stats.prompt_tokens
    assert planned.prompt_tokens == sum(len(r[0]) for r in rows if r[1])
    assert planned.max_output_tokens == stats.sampled_tokens
    assert planned.samples == samples.sum()
    if not planned.samples:
        return
    assert 0.0 <= planned.page_waste < 1.0
    assert planned.sharing_ratio == planned.prompt_tokens / stats.prompt_tokens

    live = [r for r in sim.tree.order.tolist() if samples[r]]
    best = 0
    for i in range(len(live)):
        for j in range(i + 1, len(live) + 1):
            part = live[i:j]
            held = [min(int(samples[r]), seqs) for r in part]
            if sum(held) <= seqs:
                lengths = [int(max_new[r]) for r in part]
                prompts = [sim.prompts[r] for r in part]
                best = max(best, window_pages(prompts, lengths, held, size))
    assert planned.kv_peak_pages == best


def test_counts_of_no_samples() -> None:
    tree = tree_of([[1, 2]])
    planned = plan_counts(tree, np.array([0]), np.array([1]), 16, 4)
    assert (planned.requests, planned.distinct_prompt_tokens, planned.sharing_ratio) == (0, 0, 1.0)


def test_page_waste_of_a_small_example() -> None:
    # One page of four is shared; each row then fills 1 + 3 - 1 = 3 of the 4 positions of another page.
    tree = tree_of([[1, 1, 1, 1, 2], [1, 1, 1, 1, 3]])
    planned = plan_counts(tree, np.array([1, 1]), np.array([3, 3]), 4, 8)
    assert planned.kv_peak_pages == 3
    assert planned.page_waste == 1 - (4 + 3 + 3) / 12


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans(), st.integers(1, 2)), max_size=20))
def test_dedup_equals_a_dict(table: list[tuple[int, int, bool, int]]) -> None:
    node, params, greedy, max_new = (np.array([t[i] for t in table]) for i in range(4))
    first: dict[tuple[int, int, int], int] = {}
    expected = [first.setdefault((t[0], t[1], t[3]), i) if t[2] else i for i, t in enumerate(table)]
    assert find_dedup(node, params, greedy.astype(bool), max_new).tolist() == expected
