"""Counted cost of a plan before it runs, and deduplication of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.plan.tree import PrefixTree

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """Counted quantities of a job, over the requests that have samples."""

    requests: int
    samples: int
    prompt_tokens: int
    distinct_prompt_tokens: int
    """Number of distinct prompt prefixes: the prompt tokens a run computes if nothing is evicted."""
    max_output_tokens: int
    """Number of tokens generated if every sample reaches its limit."""
    kv_peak_pages: int
    """Pages held while the most demanding `max_num_seqs` neighbours in tree order are at full length together.

    A run also holds a partly filled page for each node that has yet to branch.
    """
    kv_unshared_peak_pages: int
    """`kv_peak_pages` without prefix sharing."""
    page_waste: float
    """Fraction of page positions that stay empty, over all samples at full length."""

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that need not be computed, counting each request once."""
        return self.prompt_tokens - self.distinct_prompt_tokens

    @property
    def sharing_ratio(self) -> float:
        """Prompt tokens per computed prompt token; 1.0 without sharing."""
        return self.prompt_tokens / self.distinct_prompt_tokens if self.distinct_prompt_tokens else 1.0


def plan_counts(
    tree: PrefixTree,
    samples: npt.NDArray[np.integer[Any]],
    max_new: npt.NDArray[np.integer[Any]],
    page_size: int,
    max_num_seqs: int,
) -> PlanCounts:
    """Count the tokens that a job computes and the pages that it holds.

    Args:
        tree: prefix tree of all requests.
        samples: [N] samples per request; 0 leaves a request out.
        max_new: [N] maximum tokens per sample.
        page_size: positions per page.
        max_num_seqs: maximum number of samples at once.
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
    # A repeated prompt fills only its samples' positions; a sample's own pages begin in the prompt's last page.
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
    """[rows] tokens that the request at each given index of `tree.order` shares with the previous one in `rows`."""
    shared = np.zeros(len(rows), np.int64)
    if len(rows) > 1:
        by_row = tree.shared_len[tree.order][: rows[-1] + 1]
        shared[1:] = np.minimum.reduceat(by_row, rows[:-1] + 1)
    return shared


def _peak(pages: Int64s, head: Int64s, held: Int64s, max_num_seqs: int) -> int:
    """Most pages of any window of neighbouring rows with at most `max_num_seqs` samples.

    Args:
        pages: [rows] pages that each row adds to its predecessor's.
        head: [rows] pages that each row shares with its predecessor.
        held: [rows] samples of each row that run at once.
        max_num_seqs: maximum number of samples at once.
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
    """[N] for each request the first one whose result it can reuse: itself unless both are equal and greedy.

    Args:
        node_of_request: [N] tree node at which the prompt ends; equal only for equal prompts and keys.
        params_id: [N] id of the sampling parameters without the seed.
        greedy: [N] whether the request samples greedily.
        max_new: [N] effective token limits.
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
