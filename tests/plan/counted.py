"""Runs of the scheduler for its counters only, without a simulated pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.plan.config import SchedulerConfig, SchedulerStats
from batchgen.plan.scheduler import Scheduler
from tests.plan.test_tree import tree_of


@dataclass
class Counted:
    """Counters of a run, and the pages in use and sampled rows of each step."""

    stats: SchedulerStats
    distinct_tokens: int
    pages: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)


def random_job(
    levels: list[tuple[int, tuple[int, int]]], output: tuple[int, int], seed: int
) -> tuple[list[list[int]], npt.NDArray[np.int64]]:
    """Prompts and limits of a random tree, in random order; `levels` is (children, (least, most) tokens) per level."""
    rng = np.random.default_rng(seed)
    prefixes: list[list[int]] = [[]]
    for children, (least, most) in levels:
        several = [prefix for prefix in prefixes for _ in range(children)]
        prefixes = [p + rng.integers(0, 50_000, size=int(rng.integers(least, most + 1))).tolist() for p in several]
    limits = rng.integers(output[0], output[1] + 1, size=len(prefixes))
    order = rng.permutation(len(prefixes)).tolist()
    return [prefixes[i] for i in order], limits[order]


def counted(
    prompts: list[list[int]],
    limits: npt.NDArray[np.int64],
    config: SchedulerConfig,
    *,
    targets: npt.NDArray[np.int64] | None = None,
    samples: npt.NDArray[np.int64] | None = None,
    kinds: npt.NDArray[np.int32] | None = None,
) -> Counted:
    """Run a job whose samples end after `targets` tokens; None: at their limits."""
    ends = (limits if targets is None else targets).tolist()
    tree = tree_of(prompts)
    samples = np.ones(len(prompts), np.int64) if samples is None else samples
    scheduler = Scheduler(tree, samples, limits, config, kinds)
    run = Counted(scheduler.stats, tree.distinct_tokens)
    left: dict[int, int] = {}
    while (plan := scheduler.step()) is not None:
        left.update((start.sequence, ends[start.request]) for start in plan.starts)
        run.pages.append(scheduler.group_pages_in_use[0])
        run.drawn.append(len(plan.samples))
        for row in plan.samples:
            left[row.sequence] -= 1
        scheduler.commit([row.sequence for row in plan.samples if not left[row.sequence]])
    return run
