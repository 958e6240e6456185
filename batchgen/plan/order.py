"""Order in which prompts begin.

Rows that share a prefix stay together: only children of one node are reordered. In the last stretch of a job subtrees
are interleaved, so that the samples that begin last are short, whichever subtree they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.plan.config import SchedulerConfig
from batchgen.plan.estimate import plan_counts
from batchgen.plan.tree import PrefixTree

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_LAST_STRETCH = 2
"""Length of the last stretch, in multiples of the tokens that all slots generate at the longest row's length."""
_SIMILAR_RATIO = 1.1
"""Lengths count as similar if the longest is at most this many times the mean."""
_TIE_BITS = 20
_GOLDEN_RATIO = 0.6180339887498949
"""Multiples of this, modulo 1, visit all parts of a sorted list evenly."""
_MAX_HELD_FRACTION = 8
"""Prefixes shared in the last stretch, which stay in memory throughout it, use at most 1/8 of the pool."""


@dataclass(frozen=True, slots=True)
class BeginOrder:
    """A prefix tree numbered in the order in which subtrees begin, with the exceptions from depth-first order."""

    tree: PrefixTree
    rank: Int32s | None
    """[M] rank of each node in the begin order, a parent before its children; None for depth first."""
    interval: float = 0.0
    """Steps between the starts of two samples. If all have one length they would begin, fill the pool and end together;
    this interval keeps the pool evenly filled. 0 if lengths differ."""


def begin_order(
    tree: PrefixTree,
    samples: npt.NDArray[np.integer[Any]],
    expected: npt.NDArray[np.integer[Any]],
    config: SchedulerConfig,
) -> BeginOrder:
    """Order a job's prompts as `config.order` says.

    `longest`: subtrees by their longest expected sample, the longest first; among equals those with more tokens to
    decode per prompt token. If the pool cannot hold the longest together, long and short ones are mixed, except in the
    last stretch. `first-come`: by request number, regardless of sharing. `tree`: in the tree's own order.

    Args:
        tree: prefix tree of all requests.
        samples: [N] samples per request; 0 leaves a request out.
        expected: [N] expected tokens of a sample.
        config: limits and the order.
    """
    if config.order == "tree" or not len(tree):
        return BeginOrder(tree, None)
    live = samples > 0
    if config.order == "first-come":
        value = np.where(live, -np.arange(len(samples), dtype=np.int64), -len(samples))
        best = _range_max(value[tree.order], tree.first_row, tree.last_row)
        tree, old = renumber(tree, best, value)
        return BeginOrder(tree, _rank_from(best[old], 0))
    value = np.where(live, expected, 0).astype(np.int64)
    work = value * samples
    best = _range_max(value[tree.order], tree.first_row, tree.last_row)
    tree, old = renumber(tree, (best << _TIE_BITS) + _decode_share(tree, work), value)
    best = best[old]
    at_once = config.max_num_seqs
    counts = plan_counts(tree, samples, expected, config.page_size, at_once)
    mixed = counts.kv_peak_pages >= config.num_pages
    if mixed:
        # The longest samples together would all reach their full length and end at the same time: mix the lengths.
        tree, old = renumber(tree, _interleaving_keys(tree), value)
        best = best[old]
        at_once = _held_at_once(tree, samples, expected, config)
    elif not (tree.parent >= 0).any():
        return BeginOrder(tree, None)
    begin = _last_stretch(tree, work, int(best.max()) * at_once * _LAST_STRETCH, config)
    if mixed:
        tree, old = renumber(tree, np.where(np.arange(len(tree)) < begin, np.iinfo(np.int64).max, best), value)
        best = best[old]
    interval = _interval(tree, samples, expected, config) if mixed else 0.0
    return BeginOrder(tree, _rank_from(best, begin) if begin < len(tree) else None, interval)


def renumber(tree: PrefixTree, key: Int64s, value: Int64s) -> tuple[PrefixTree, Int64s]:
    """Reorder the children of every node.

    Args:
        tree: any tree.
        key: [M] sort key of each node; among siblings higher keys come first, ties keep their order.
        value: [N] sort key of each request; among the requests of a node higher values come first.

    Returns:
        The reordered tree, and [M] the previous id of each of its nodes.
    """
    count = len(tree)
    ids = np.arange(count)
    siblings = np.lexsort((-key, tree.parent))
    own = np.bincount(tree.node_of_request, minlength=count)
    parent = tree.parent.astype(np.int64)
    place = _path_sums(tree, _offsets(siblings, parent, tree.subtree_end - ids) + (parent >= 0))
    taken = (tree.last_row - tree.first_row + 1).astype(np.int64)
    first_row = _path_sums(tree, _offsets(siblings, parent, taken) + np.where(parent >= 0, own[parent], 0))
    old = np.empty(count, np.int64)
    old[place] = ids
    order = _order(tree, first_row, own, value)
    first = first_row[old].astype(np.int32)
    start, end = tree.start[old], tree.end[old]
    node_of_request = place.astype(np.int32)[tree.node_of_request]
    shared = end[node_of_request]
    opening = np.flatnonzero(np.diff(first, prepend=-1))  # the topmost of the nodes that begin with a row
    shared[order[first[opening]]] = start[opening]
    ordered = replace(
        tree,
        parent=np.where(parent >= 0, place[parent], -1)[old].astype(np.int32),
        start=start,
        end=end,
        request=order[first],
        first_row=first,
        last_row=(first + taken[old] - 1).astype(np.int32),
        subtree_end=(place + tree.subtree_end - ids)[old].astype(np.int32),
        order=order,
        node_of_request=node_of_request,
        shared_len=shared,
    )
    return ordered, old


def _order(tree: PrefixTree, first_row: Int64s, own: npt.NDArray[np.integer[Any]], value: Int64s) -> Int32s:
    """[N] requests in the new order: by new node, within a node by descending value."""
    node = tree.node_of_request[tree.order]
    place = np.arange(len(node)) + (first_row - tree.first_row)[node]
    order = np.empty(len(node), np.int32)
    order[place] = tree.order
    among = np.sort(place[own[node] > 1])
    several = order[among]
    order[among] = several[
        np.lexsort((-value[several], tree.node_of_request[several], first_row[tree.node_of_request[several]]))
    ]
    return order


def _interleaving_keys(tree: PrefixTree) -> Int64s:
    """[M] sort keys that interleave all parts of a node's sorted children."""
    among = _offsets(np.argsort(tree.parent, kind="stable"), tree.parent.astype(np.int64), np.ones(len(tree), np.int64))
    return np.asarray((among * _GOLDEN_RATIO % 1.0 * (1 << 40)).astype(np.int64))


def _offsets(siblings: Int64s, parent: Int64s, size: npt.NDArray[np.integer[Any]]) -> Int64s:
    """[M] total `size` of the siblings before each node, in the order of `siblings`."""
    sizes = size[siblings].astype(np.int64)
    before = np.cumsum(sizes) - sizes
    opening = np.flatnonzero(np.diff(parent[siblings], prepend=-2))
    before -= np.repeat(before[opening], np.diff(np.append(opening, len(siblings))))
    offsets = np.empty(len(siblings), np.int64)
    offsets[siblings] = before
    return offsets


def _path_sums(tree: PrefixTree, steps: Int64s) -> Int64s:
    """[M] sum of `steps` on the path from the root to each node."""
    closed = np.zeros(len(tree) + 1, np.int64)
    np.add.at(closed, tree.subtree_end, steps)
    return np.asarray(np.cumsum(steps) - np.cumsum(closed)[:-1])


def _range_max(values: Int64s, first: Int32s, last: Int32s) -> Int64s:
    """[M] maximum of `values[first:last + 1]` for each node, by windows of doubling width."""
    result = np.empty(len(first), np.int64)
    level = np.frexp((last - first + 1).astype(np.float64))[1] - 1
    by_level = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[by_level], np.arange(int(level.max()) + 2))
    window = values
    for k in range(len(bounds) - 1):
        if k:
            window = np.maximum(window[: -(1 << k - 1)], window[1 << k - 1 :])
        nodes = by_level[bounds[k] : bounds[k + 1]]
        result[nodes] = np.maximum(window[first[nodes]], window[last[nodes] + 1 - (1 << k)])
    return result


def _decode_share(tree: PrefixTree, work: Int64s) -> Int64s:
    """[M] decoded fraction of the tokens below each node, as an integer of `_TIE_BITS` bits."""
    rows = np.concatenate([[0], np.cumsum(work[tree.order])])
    tokens = np.concatenate([[0], np.cumsum((tree.end - tree.start).astype(np.int64))])
    below = tokens[tree.subtree_end] - tokens[:-1]
    decoded = rows[tree.last_row + 1] - rows[tree.first_row]
    return np.asarray((decoded / (decoded + below) * ((1 << _TIE_BITS) - 1)).astype(np.int64))


def _held_at_once(
    tree: PrefixTree,
    samples: npt.NDArray[np.integer[Any]],
    expected: npt.NDArray[np.integer[Any]],
    config: SchedulerConfig,
) -> int:
    """Approximate number of samples that the pool holds at once, halfway through their output and without sharing."""
    length = tree.end[tree.node_of_request].astype(np.int64)
    steps = samples * expected.astype(np.int64)
    pages = (steps * (length + expected / 2)).sum() / max(1, int(steps.sum())) / config.page_size
    return max(1, min(config.max_num_seqs, int(config.num_pages / max(1.0, pages))))


def _interval(
    tree: PrefixTree,
    samples: npt.NDArray[np.integer[Any]],
    expected: npt.NDArray[np.integer[Any]],
    config: SchedulerConfig,
) -> float:
    """`BeginOrder.interval`: a sample's length divided by the samples that the pool holds next to one prefix."""
    live = samples > 0
    output = float(expected[live].mean())
    if expected[live].max() > _SIMILAR_RATIO * output:
        return 0.0
    node = tree.node_of_request[live]
    own = np.where(samples[live] > 1, 0, tree.end[node] - tree.start[node])
    shared = int((tree.end[node] - own).max()) // config.page_size
    each = (float(own.mean()) + output / 2) / config.page_size + 0.5
    return output / max(1.0, min(config.max_num_seqs, (config.num_pages - shared) / each))


def _last_stretch(tree: PrefixTree, work: Int64s, most: int, config: SchedulerConfig) -> int:
    """First node of the last stretch: at most `most` work is left, and the shared prefixes use few pages."""
    count = len(tree)
    shared = tree.subtree_end > np.arange(1, count + 1)
    left = np.cumsum(work[tree.order][::-1])[::-1]
    begin = int(np.searchsorted(tree.first_row, np.searchsorted(-left, -most)))
    pages = np.where(shared, tree.end // config.page_size - tree.start // config.page_size, 0).astype(np.int64)
    held = np.cumsum(pages[::-1])[::-1]
    # Ancestors stay in memory for their remaining descendants; those that stay to the job's end anyway do not count.
    above = _path_sums(tree, np.where(tree.subtree_end < count, pages, 0))
    held += np.where(tree.parent < 0, 0, above[tree.parent])
    few = np.flatnonzero(held[begin:] <= config.num_pages // _MAX_HELD_FRACTION)
    return begin + int(few[0]) if len(few) else count


def _rank_from(best: Int64s, begin: int) -> Int32s:
    """[M] ranks: depth first before node `begin`, by descending value from there on."""
    rank = np.arange(len(best), dtype=np.int32)
    rank[begin + np.argsort(-best[begin:], kind="stable")] = np.arange(begin, len(best), dtype=np.int32)
    return rank
