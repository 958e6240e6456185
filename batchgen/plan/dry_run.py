"""Dry run of a plan: its steps without a model, with every sample running to its limit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchgen.plan.cache_groups import PageCounts
from batchgen.plan.scheduler import Scheduler


def peak_pages(
    scheduler: Scheduler, max_new: npt.NDArray[np.integer], most_tokens: int, lag: int = 0
) -> tuple[PageCounts, bool]:
    """Most pages in use at once, and whether all samples have ended.

    Args:
        scheduler: the job's, before its first step.
        max_new: [N] tokens of each sample, by request.
        most_tokens: sampled tokens after which the dry run stops, since they take its time.
        lag: steps that are planned before the end of a sample is known.
    """
    stats, left = scheduler.stats, dict[int, int]()
    ended: list[list[int]] = [[] for _ in range(lag)]
    while stats.sampled_tokens < most_tokens and (plan := scheduler.step()) is not None:
        left.update((start.sequence, int(max_new[start.request])) for start in plan.starts)
        for row in plan.samples:
            left[row.sequence] -= 1
        ended.append([row.sequence for row in plan.samples if not left[row.sequence]])
        scheduler.commit(ended.pop(0))
    return PageCounts(stats.peak_pages, stats.peak_window_pages), not scheduler.unended
