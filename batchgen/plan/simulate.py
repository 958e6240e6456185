"""A job's steps before it runs: rows take slots in their order and give them back at their expected ends.

Pages are no limit here, and nothing is done for a step in which nothing begins or ends: a million rows take seconds.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.plan.config import SchedulerConfig
from batchgen.plan.order import BeginOrder

__all__ = ["Simulated", "simulate"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Simulated:
    """Counted as `SchedulerStats` does."""

    steps: int
    sampled_tokens: int
    slots: int
    tail_steps: int
    tail_tokens: int

    @property
    def occupancy(self) -> float:
        """Tokens drawn over those that full steps would have drawn; 1.0 of no steps."""
        return self.sampled_tokens / (self.steps * self.slots) if self.steps else 1.0

    @property
    def tail_efficiency(self) -> float:
        """The same over the steps in which nothing was left to begin."""
        return self.tail_tokens / (self.tail_steps * self.slots) if self.tail_steps else 1.0


def simulate(
    order: BeginOrder,
    samples: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    config: SchedulerConfig,
) -> Simulated:
    """Run a job without its tokens.

    Args:
        order: its tree, in the order of beginning.
        samples: [N] samples per request; 0 leaves a request out.
        lengths: [N] tokens that each sample draws, at least 1 where there are samples.
        config: slots and tokens of a step.
    """
    prompts, outputs = _in_order(order, samples, lengths)
    slots, budget = min(config.max_num_seqs, len(outputs)), config.max_tokens_per_step
    ends: list[int] = []  # step in which each sample under way is gone
    step = room = behind = 0
    for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
        behind += prompt
        if len(ends) == slots and ends[0] > step:
            step, room = ends[0], 0
        while ends and ends[0] <= step:
            heapq.heappop(ends)
        # What does not fit into this step is computed in the next ones, beside the rows that decode then.
        if not room:
            room = budget - len(ends)
        while behind > room:
            behind -= room
            step += 1
            while ends and ends[0] <= step:
                heapq.heappop(ends)
            room = budget - len(ends)
        room -= behind
        behind = 0
        heapq.heappush(ends, step + output)
    last = max(ends, default=0)
    tail = [end - step - 1 for end in ends]
    return Simulated(last, int(outputs.sum()), slots, max(0, last - step - 1), sum(t for t in tail if t > 0))


def _in_order(
    order: BeginOrder, samples: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.integer[Any]]
) -> tuple[Int64s, Int64s]:
    """[samples] prompt tokens that each one computes and tokens that it draws, in the order of beginning."""
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
