"""Simulation of a job's steps before it runs: samples occupy slots in begin order until their expected ends.

Pages are not limited, and steps in which nothing begins or ends are skipped.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.plan.config import SchedulerConfig, SchedulerStats
from batchgen.plan.order import BeginOrder

Int64s = npt.NDArray[np.int64]


def simulate(
    order: BeginOrder,
    samples: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    config: SchedulerConfig,
) -> SchedulerStats:
    """Simulate the steps of a job: samples occupy slots in begin order until their ends, and pages are not limited.

    Args:
        order: prefix tree and begin order.
        samples: [N] samples per request; 0 leaves a request out.
        lengths: [N] tokens that each sample generates, at least 1 for requests with samples.
        config: slots, and tokens per step.

    Returns:
        Steps, slots and sampled tokens; the other counters stay 0.
    """
    prompts, outputs = _in_order(order, samples, lengths)
    slots, budget = min(config.max_num_seqs, len(outputs)), config.max_tokens_per_step
    ends: list[int] = []  # heap of the steps in which running samples have ended
    step = room = backlog = 0
    for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
        backlog += prompt
        if len(ends) == slots and ends[0] > step:
            step, room = ends[0], 0
        while ends and ends[0] <= step:
            heapq.heappop(ends)
        # Prompt tokens that do not fit into this step are computed in the next ones, together with their decode rows.
        if not room:
            room = budget - len(ends)
        while backlog > room:
            backlog -= room
            step += 1
            while ends and ends[0] <= step:
                heapq.heappop(ends)
            room = budget - len(ends)
        room -= backlog
        backlog = 0
        heapq.heappush(ends, step + output)
    last = max(ends, default=0)
    tail = [end - step - 1 for end in ends]
    return SchedulerStats(
        steps=last,
        sampled_tokens=int(outputs.sum()),
        slots=slots,
        tail_steps=max(0, last - step - 1),
        tail_tokens=sum(t for t in tail if t > 0),
    )


def _in_order(
    order: BeginOrder, samples: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.integer[Any]]
) -> tuple[Int64s, Int64s]:
    """[samples] prompt tokens that each sample computes; [samples] tokens that it generates; both in begin order."""
    tree = order.tree
    live = np.flatnonzero(samples[tree.order] > 0)
    if not len(live):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first = np.searchsorted(live, tree.first_row)
    reached = np.flatnonzero(first < np.searchsorted(live, tree.last_row, side="right"))
    # The first sample below a node computes it.
    computed = np.zeros(len(live), np.int64)
    np.add.at(computed, first[reached], (tree.end - tree.start)[reached])
    requests = tree.order[live]
    if order.rank is not None:
        turn = np.argsort(order.rank[tree.node_of_request[requests]], kind="stable")
        requests, computed = requests[turn], computed[turn]
    count = samples[requests]
    starts = np.cumsum(count) - count
    prompts = np.zeros(int(count.sum()), np.int64)
    prompts[starts] = computed
    return prompts, np.repeat(lengths[requests].astype(np.int64), count)
