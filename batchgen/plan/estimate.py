"""Counted cost of a plan before it runs, and deduplication of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.plan.tree import PrefixTree, blocks

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
    page_waste: float
    """Fraction of page positions that stay empty, over all samples at full length."""

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

    `samples`: [N] per request, of which 0 leaves a request out, with at most `max_num_seqs` at once; `max_new`: [N]
    maximum tokens per sample; `page_size`: positions per page.
    """
    rows = np.flatnonzero(samples[tree.order]).astype(np.int32)
    if not len(rows):
        return PlanCounts(0, 0, 0, 0, 0, 0, 0.0)
    sums = np.zeros(6, np.int64)
    peak = 0
    for part in blocks(len(rows)):
        own = part.stop - part.start
        columns = _Columns.of(tree, samples, max_new, rows, slice(part.start, part.stop + max_num_seqs))
        counts = columns.pages(page_size, max_num_seqs)
        sums += columns.sums(counts, page_size, own)
        peak = max(peak, counts.peak(max_num_seqs, own))
    sampled, prompt_tokens, distinct, output, pages, filled = sums.tolist()
    return PlanCounts(
        requests=len(rows),
        samples=sampled,
        prompt_tokens=prompt_tokens,
        distinct_prompt_tokens=distinct,
        max_output_tokens=output,
        kv_peak_pages=peak,
        page_waste=1.0 - filled / (pages * page_size),
    )


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of rows that follow each other in a tree's order, [rows] int64 each."""

    prompt: Int64s
    """Full pages of the prompt."""
    total: Int64s
    """Pages of the prompt and of a sample at its full length."""
    head: Int64s
    """Full pages shared with the previous row."""
    held: Int64s
    """Samples that run at once."""

    def peak(self, max_num_seqs: int, windows: int) -> int:
        """Most pages of the windows of neighbours with at most `max_num_seqs` samples that begin at the first rows."""
        added = self.prompt - self.head + self.held * (self.total - self.prompt)  # to those of the previous row
        page_sums = np.concatenate([[0], np.cumsum(added)])
        seq_sums = np.concatenate([[0], np.cumsum(self.held)])
        ends = np.searchsorted(seq_sums, seq_sums[:windows] + max_num_seqs, side="right") - 1
        return int((page_sums[ends] - page_sums[:windows] + self.head[:windows]).max())


@dataclass(frozen=True, slots=True)
class _Columns:
    """Rows with samples that follow each other in a tree's order, [rows] int64 each."""

    count: Int64s
    """Samples."""
    length: Int64s
    """Prompt tokens."""
    limit: Int64s
    """Maximum tokens of a sample."""
    shared: Int64s
    """Prompt tokens shared with the previous row with samples."""

    @staticmethod
    def of(
        tree: PrefixTree,
        samples: npt.NDArray[np.integer[Any]],
        max_new: npt.NDArray[np.integer[Any]],
        rows: npt.NDArray[np.int32],
        part: slice,
    ) -> _Columns:
        """The part of the rows, given their indexes in `tree.order`."""
        requests = tree.order[rows[part]]
        return _Columns(
            samples[requests].astype(np.int64),
            tree.end[tree.node_of_request[requests]].astype(np.int64),
            max_new[requests].astype(np.int64),
            _shared_with_previous(tree, rows[max(0, part.start - 1) : part.stop])[min(1, part.start) :],
        )

    def pages(self, page_size: int, max_num_seqs: int) -> _Pages:
        """Pages of the rows."""
        prompt = self.length // page_size
        total = -(-(self.length + self.limit - 1) // page_size)
        return _Pages(prompt, total, np.minimum(self.shared // page_size, prompt), np.minimum(self.count, max_num_seqs))

    def sums(self, pages: _Pages, page_size: int, rows: int) -> Int64s:
        """[6] of the first rows: samples, prompt tokens, distinct ones, output tokens, pages, their positions used."""
        count, length, limit = self.count[:rows], self.length[:rows], self.limit[:rows]
        prompt, total, head = pages.prompt[:rows], pages.total[:rows], pages.head[:rows]
        # A repeated prompt fills only its samples' positions; a sample's own pages begin in the prompt's last page.
        filled = (prompt - head) * page_size + count * (length + limit - 1 - prompt * page_size)
        columns = (
            count,
            length,
            length - self.shared[:rows],
            count * limit,
            prompt - head + count * (total - prompt),
            filled,
        )
        return np.array([column.sum() for column in columns], np.int64)


def _shared_with_previous(tree: PrefixTree, rows: npt.NDArray[np.int32]) -> Int64s:
    """[rows] tokens that the request at each given index of `tree.order` shares with the previous one in `rows`."""
    shared = np.zeros(len(rows), np.int64)
    if len(rows) > 1:
        by_row = tree.shared_len[tree.order[rows[0] + 1 : rows[-1] + 1]]
        shared[1:] = np.minimum.reduceat(by_row, rows[:-1] - rows[0])
    return shared


def find_dedup(
    node_of_request: npt.NDArray[np.integer[Any]],
    params_id: npt.NDArray[np.integer[Any]],
    greedy: npt.NDArray[np.bool_],
    max_new: npt.NDArray[np.integer[Any]],
) -> npt.NDArray[np.int32]:
    """[N] for each request the first one whose result it can reuse: itself unless both are equal and greedy.

    All are [N]: the tree node at which the prompt ends, which is equal only for equal prompts and keys; the id of the
    sampling parameters without the seed; whether the request samples greedily; its effective token limit.
    """
    leader = np.arange(len(node_of_request), dtype=np.int32)
    rows = np.flatnonzero(greedy).astype(np.int32)
    rows = rows[_repeated(node_of_request[rows])] if len(rows) else rows
    if not len(rows):
        return leader
    columns = (max_new[rows], params_id[rows], node_of_request[rows])
    places = np.lexsort(columns)
    first = np.ones(len(rows), np.bool_)
    first[1:] = np.any([np.diff(column[places]) != 0 for column in columns], axis=0)
    leader[rows[places]] = rows[places][np.flatnonzero(first)][np.cumsum(first) - 1]
    return leader


def _repeated(nodes: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
    """[R] whether a node occurs several times."""
    last, number = np.empty(int(nodes.max()) + 1, np.int32), np.arange(len(nodes), dtype=np.int32)
    last[nodes] = number
    several = np.zeros(len(last), np.bool_)
    several[nodes[last[nodes] != number]] = True
    return np.asarray(several[nodes])
