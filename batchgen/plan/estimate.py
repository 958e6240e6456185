"""What a plan will cost, counted before it runs, and which requests need not run at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.plan.tree import PrefixTree

__all__ = ["PlanCounts", "find_dedup", "plan_counts"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """Counted quantities of a job, over the requests that have samples."""

    requests: int
    samples: int
    prompt_tokens: int
    distinct_prompt_tokens: int
    """Nodes of the exact trie: the prompt tokens a run computes when nothing is evicted."""
    max_output_tokens: int
    """Tokens generated if every sample reaches its limit."""
    kv_peak_pages: int
    """Pages held if the most demanding `max_num_seqs` neighbours in tree order stand at full length together.

    Beside these a run holds a partly filled page for each node that is still to branch.
    """
    kv_unshared_peak_pages: int
    """The same if nothing were shared."""
    page_waste: float
    """Share of positions of the pages behind `kv_peak_pages`, over all samples at full length, that stay empty."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that need not be computed, over one sample of each request."""
        return self.prompt_tokens - self.distinct_prompt_tokens

    @property
    def sharing_ratio(self) -> float:
        """Prompt tokens per prompt token computed; 1.0 shares nothing."""
        return self.prompt_tokens / self.distinct_prompt_tokens if self.distinct_prompt_tokens else 1.0

    def least_steps(self, max_num_seqs: int, max_tokens_per_step: int) -> int:
        """Steps below which no schedule can stay if every sample reaches its limit."""
        decode = self.max_output_tokens - self.samples
        work = -(-(self.distinct_prompt_tokens + decode) // max_tokens_per_step)
        return max(work, -(-self.max_output_tokens // max_num_seqs))


def plan_counts(
    tree: PrefixTree,
    samples: npt.NDArray[np.integer[Any]],
    max_new: npt.NDArray[np.integer[Any]],
    page_size: int,
    max_num_seqs: int,
) -> PlanCounts:
    """Count what a job computes and holds.

    Args:
        tree: prefix tree of all requests.
        samples: [N] samples per request; 0 leaves a request out.
        max_new: [N] most tokens per sample.
        page_size: positions of a page.
        max_num_seqs: most samples at once.
    """
    by_row = samples[tree.order].astype(np.int64)
    rows = np.flatnonzero(by_row)
    if not len(rows):
        return PlanCounts(0, 0, 0, 0, 0, 0, 0, 0.0)
    requests = tree.order[rows]
    count = by_row[rows]
    length = tree.end[tree.node_of_request[requests]].astype(np.int64)
    limit = max_new[requests].astype(np.int64)
    shared = _shared_with_previous(tree, rows)
    prompt_pages = length // page_size
    total_pages = -(-(length + limit - 1) // page_size)
    own = total_pages - prompt_pages
    held = np.minimum(count, max_num_seqs)
    head = np.minimum(shared // page_size, prompt_pages)
    all_pages = int((prompt_pages - head + count * own).sum())
    # A repeated prompt fills no positions but its samples'; a sample's own pages begin inside the prompt's last one.
    filled = int((prompt_pages * page_size - head * page_size).sum())
    filled += int((count * (length + limit - 1 - prompt_pages * page_size)).sum())
    return PlanCounts(
        requests=len(rows),
        samples=int(count.sum()),
        prompt_tokens=int(length.sum()),
        distinct_prompt_tokens=int((length - shared).sum()),
        max_output_tokens=int((count * limit).sum()),
        kv_peak_pages=_peak(prompt_pages - head + held * own, head, held, max_num_seqs),
        kv_unshared_peak_pages=_peak(held * total_pages, np.zeros_like(head), held, max_num_seqs),
        page_waste=1.0 - filled / (all_pages * page_size),
    )


def _shared_with_previous(tree: PrefixTree, rows: Int64s) -> Int64s:
    """[rows] tokens shared by the request at each of the given places of the order with the one before it."""
    shared = np.zeros(len(rows), np.int64)
    if len(rows) > 1:
        by_row = tree.shared_len[tree.order][: rows[-1] + 1]
        shared[1:] = np.minimum.reduceat(by_row, rows[:-1] + 1)
    return shared


def _peak(pages: Int64s, head: Int64s, held: Int64s, max_num_seqs: int) -> int:
    """Most pages of any window of neighbours that holds at most `max_num_seqs` samples.

    `pages` [rows] are those that a row adds to its predecessor's, `head` [rows] those it shares with it.
    """
    page_sums = np.concatenate([[0], np.cumsum(pages)])
    seq_sums = np.concatenate([[0], np.cumsum(held)])
    ends = np.searchsorted(seq_sums, seq_sums[:-1] + max_num_seqs, side="right") - 1
    return int((page_sums[ends] - page_sums[:-1] + head).max())


def find_dedup(
    node_of_request: npt.NDArray[np.integer[Any]],
    params_id: npt.NDArray[np.integer[Any]],
    greedy: npt.NDArray[np.bool_],
    max_new: npt.NDArray[np.integer[Any]],
) -> Int64s:
    """[N] for each request the lowest-numbered one whose result it can take: itself unless both are equal and greedy.

    Args:
        node_of_request: [N] tree node at which the prompt ends: equal for equal prompts (and keys) only.
        params_id: [N] equal for equal sampling parameters only, seeds aside.
        greedy: [N] whether the request draws nothing.
        max_new: [N] effective limits.
    """
    leader = np.arange(len(node_of_request))
    rows = np.flatnonzero(greedy)
    if not len(rows):
        return leader
    columns = (max_new[rows], params_id[rows], node_of_request[rows])
    places = np.lexsort(columns)
    first = np.ones(len(rows), np.bool_)
    first[1:] = np.any([np.diff(column[places]) != 0 for column in columns], axis=0)
    leader[rows[places]] = rows[places][np.flatnonzero(first)][np.cumsum(first) - 1]
    return leader
