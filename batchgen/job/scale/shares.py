"""Shares of a job for processes: neighbours in the prefix tree stay together, and all take about equally long."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from batchgen.engine.workload import JobWorkload
from batchgen.plan.length_predictor import LengthPredictor

_OUTPUT_COST: Final = 4.0
"""Cost of a sampled token in computed prompt tokens, which need fewer reads of the weights."""
_CUT_WITHIN: Final = 0.05
"""A share may be larger or smaller than the others by this part, so that fewer shared tokens are computed twice."""

Requests = npt.NDArray[np.int64]


def shares(workload: JobWorkload, wanted: npt.NDArray[np.bool_], count: int) -> list[Requests]:
    """The requests that remain as `count` lists, which may be empty.

    Requests of one prompt, and those that are copies of another one, are in one list.

    Args:
        workload: the job.
        wanted: [N] the requests to hand out.
        count: number of lists.
    """
    tree, own = workload.tree, np.arange(len(workload.done))
    expected = LengthPredictor(workload.max_tokens, workload.kinds()).expected
    lengths = tree.end[tree.node_of_request].astype(np.float64)
    costs = np.where(wanted & (workload.samples > 0), lengths - tree.shared_len, 0.0)
    costs += np.where(wanted, _OUTPUT_COST * expected * workload.samples, 0.0)
    order = tree.order
    after = np.cumsum(costs[order])
    total, cuts = after[-1] if len(after) else 0.0, [0]
    for number in range(1, count):
        low, best, high = (
            int(np.searchsorted(after, total * (number + part) / count)) for part in (-_CUT_WITHIN, 0.0, _CUT_WITHIN)
        )
        near = tree.shared_len[order[low : high + 1]]
        cut = low + int(near.argmin()) if len(near) and near.min() < near[min(best - low, len(near) - 1)] else best
        cuts.append(max(cut, cuts[-1]))
    share = np.zeros(len(own), np.int32)
    for number, cut in enumerate(cuts[1:], 1):
        share[order[cut:]] = number
    first = workload.first_text
    share = share[first[workload.leader[first]]]
    return [np.flatnonzero(wanted & (share == number)) for number in range(count)]
