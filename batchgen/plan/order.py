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
from batchgen.plan.tree import PrefixTree, blocks

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

    `samples`: [N] per request; 0 leaves a request out; `expected`: [N] expected tokens of a sample.
    """
    if config.order == "tree" or not len(tree):
        return BeginOrder(tree, None)
    value = _values(samples, expected, config)
    best = _best(tree, value)
    if config.order == "first-come":
        tree, old = renumber(tree, -best.astype(np.int64), value)
        return BeginOrder(tree, _rank_from(best[old], 0))
    tree, old = renumber(tree, _by_length_and_share(tree, best, value, samples), value)
    best = best[old]
    del old
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
    most = int(best.max()) * at_once * _LAST_STRETCH
    begin = _last_stretch(tree, _first_of_last(tree.order, value, samples, most), config)
    if mixed:
        key = -best.astype(np.int64)
        key[:begin] = np.iinfo(np.int64).min
        tree, old = renumber(tree, key, value)
        best = best[old]
    interval = _interval(tree, samples, expected, config) if mixed else 0.0
    return BeginOrder(tree, _rank_from(best, begin) if begin < len(tree) else None, interval)


def _values(
    samples: npt.NDArray[np.integer[Any]], expected: npt.NDArray[np.integer[Any]], config: SchedulerConfig
) -> Int32s:
    """[N] sort key of each request, higher first: its expected tokens, or by its number. The least without samples."""
    if config.order == "first-come":
        return np.where(samples > 0, -np.arange(len(samples), dtype=np.int32), np.int32(-len(samples)))
    tokens: Int32s = expected.astype(np.int32, copy=False)
    return tokens if (samples > 0).all() else np.where(samples > 0, tokens, np.int32(0))


def renumber(tree: PrefixTree, key: Int64s, value: Int32s) -> tuple[PrefixTree, Int32s]:
    """Reorder the children of every node.

    Args:
        tree: any tree.
        key: [M] sort key of each node; among siblings lower keys come first, ties keep their order.
        value: [N] sort key of each request; among the requests of a node higher values come first.

    Returns:
        The reordered tree, and [M] the previous id of each of its nodes.
    """
    count = len(tree)
    siblings = np.lexsort((key, tree.parent)).astype(np.int32)
    del key
    ids = np.arange(count, dtype=np.int32)
    child = tree.parent >= 0
    size = tree.subtree_end - ids
    steps = _offsets(siblings, tree.parent, size)
    steps += child
    place = _path_sums(tree, steps)
    old = np.empty(count, np.int32)
    old[place] = ids
    del ids
    subtree_end = (place + size)[old]
    del size
    own = np.bincount(tree.node_of_request, minlength=count).astype(np.int32)
    taken = tree.last_row - tree.first_row + np.int32(1)
    steps = _offsets(siblings, tree.parent, taken)
    del taken
    np.add(steps, own[tree.parent], out=steps, where=child)
    first_row = _path_sums(tree, steps)
    del steps
    order = _order(tree, first_row, own, value)
    del own
    first_row = first_row[old]
    end = tree.end[old]
    node_of_request = place[tree.node_of_request]
    parent = np.where(child, place[tree.parent], np.int32(-1))[old]
    del place, child
    ordered = replace(
        tree,
        parent=parent,
        end=end,
        first_row=first_row,
        subtree_end=subtree_end,
        order=order,
        node_of_request=node_of_request,
        shared_len=end[node_of_request],
    )
    _set_shared(ordered)
    return ordered, old


def _set_shared(tree: PrefixTree) -> None:
    """Set `shared_len` of the requests that open a node; the others repeat a prompt."""
    before = np.int32(-1)
    for part in blocks(len(tree)):
        first = tree.first_row[part]
        opening = np.diff(first, prepend=before) != 0  # the topmost of the nodes that begin with a row
        above = tree.parent[part][opening]
        tree.shared_len[tree.order[first[opening]]] = np.where(above >= 0, tree.end[above], 0)
        before = first[-1]


def _order(tree: PrefixTree, first_row: Int32s, own: Int32s, value: Int32s) -> Int32s:
    """[N] requests in the new order: by new node, within a node by descending value."""
    node = tree.node_of_request[tree.order]
    place = (first_row - tree.first_row)[node]
    place += np.arange(len(node), dtype=np.int32)
    order = np.empty(len(node), np.int32)
    order[place] = tree.order
    among = np.sort(place[own[node] > 1])
    del place, node
    several = order[among]
    order[among] = several[
        np.lexsort((-value[several], tree.node_of_request[several], first_row[tree.node_of_request[several]]))
    ]
    return order


def _interleaving_keys(tree: PrefixTree) -> Int64s:
    """[M] sort keys that interleave all parts of a node's sorted children."""
    siblings = np.argsort(tree.parent, kind="stable").astype(np.int32)
    among = _offsets(siblings, tree.parent, np.ones(len(tree), np.int32))
    return -(among * _GOLDEN_RATIO % 1.0 * (1 << 40)).astype(np.int64)


def _offsets(siblings: Int32s, parent: Int32s, size: Int32s) -> Int32s:
    """[M] total `size` of the siblings before each node, in the order of `siblings`."""
    before = size[siblings]
    of_parent = parent[siblings]
    opening = np.flatnonzero(np.diff(of_parent, prepend=np.int32(-2)))
    del of_parent
    sizes = before.copy()
    np.cumsum(sizes, dtype=np.int32, out=before)
    before -= sizes
    del sizes
    before -= np.repeat(before[opening], np.diff(np.append(opening, len(siblings))))
    offsets = np.empty(len(siblings), np.int32)
    offsets[siblings] = before
    return offsets


def _path_sums(tree: PrefixTree, steps: Int32s) -> Int32s:
    """[M] sum of `steps` on the path from the root to each node; each sum has 32 bits."""
    # Partial sums may leave 32 bits: they come back with what is taken off.
    closed = np.zeros(len(tree) + 1, np.int32)
    np.add.at(closed, tree.subtree_end, steps)
    sums = np.cumsum(steps, dtype=np.int32)
    sums -= np.cumsum(closed[:-1], dtype=np.int32)
    return sums


def _best(tree: PrefixTree, value: Int32s) -> Int32s:
    """[M] largest value of a request below each node."""
    by_row, last = value[tree.order], tree.last_row
    best = by_row[tree.first_row]
    wide = np.flatnonzero(last > tree.first_row)
    if len(wide):
        best[wide] = _range_max(by_row, tree.first_row[wide], last[wide])
    return best


def _range_max(values: Int32s, first: Int32s, last: Int32s) -> Int32s:
    """[R] maximum of `values[first:last + 1]`, by windows of doubling width."""
    result = np.empty(len(first), np.int32)
    level = (np.frexp((last - first + 1).astype(np.float64))[1] - 1).astype(np.int8)
    by_level = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[by_level], np.arange(int(level.max()) + 2))
    window = values
    for k in range(len(bounds) - 1):
        if k:
            window = np.maximum(window[: -(1 << k - 1)], window[1 << k - 1 :])
        nodes = by_level[bounds[k] : bounds[k + 1]]
        result[nodes] = np.maximum(window[first[nodes]], window[last[nodes] + 1 - (1 << k)])
    return result


def _by_length_and_share(
    tree: PrefixTree, best: Int32s, value: Int32s, samples: npt.NDArray[np.integer[Any]]
) -> Int64s:
    """[M] sort keys: by falling `best`, then by the falling share of decoded tokens, of `_TIE_BITS` bits."""
    count, requests = len(tree), len(tree.order)
    rows, tokens = np.zeros(requests + 1, np.int64), np.zeros(count + 1, np.int64)
    for part in blocks(requests):
        row = tree.order[part]
        np.multiply(value[row], samples[row], out=rows[1:][part], dtype=np.int64)
    np.cumsum(rows, out=rows)
    np.subtract(tree.end, tree.start, out=tokens[1:], dtype=np.int64)
    np.cumsum(tokens, out=tokens)
    keys = -best.astype(np.int64)
    keys <<= _TIE_BITS
    for at in blocks(count):
        end, after = tree.subtree_end[at], tree.row_after(at)
        below = tokens[end] - tokens[:-1][at]
        decoded = rows[after] - rows[tree.first_row[at]]
        keys[at] -= (decoded / (decoded + below) * ((1 << _TIE_BITS) - 1)).astype(np.int64)
    return keys


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
    shared, each = pages_held(tree, samples, expected, config.page_size)
    return output / max(1.0, min(config.max_num_seqs, (config.num_pages - shared) / each))


def pages_held(
    tree: PrefixTree,
    samples: npt.NDArray[np.integer[Any]],
    expected: npt.NDArray[np.integer[Any]],
    page_size: int,
) -> tuple[int, float]:
    """Pages of the longest shared prefix, and those of a sample next to it, on average halfway through its output."""
    live = samples > 0
    node = tree.node_of_request[live]
    own = np.where(samples[live] > 1, 0, tree.end[node] - tree.start[node])
    shared = int((tree.end[node] - own).max()) // page_size
    return shared, (float(own.mean()) + float(expected[live].mean()) / 2) / page_size + 0.5


def _last_stretch(tree: PrefixTree, row: int, config: SchedulerConfig) -> int:
    """First node of the last stretch: its rows are at `row` or later, and the shared prefixes use few pages."""
    count = len(tree)
    begin = int(np.searchsorted(tree.first_row, row))
    # The nodes from there on, after those above them.
    nodes = np.append(np.flatnonzero(tree.subtree_end[:begin] > begin), np.arange(begin, count))
    above_them = len(nodes) - (count - begin)
    ends, parents = tree.subtree_end[nodes], tree.parent[nodes]
    starts = np.where(parents >= 0, tree.end[parents], 0)
    pages = np.where(ends > nodes + 1, tree.end[nodes] // config.page_size - starts // config.page_size, 0)
    pages = pages.astype(np.int64)
    held = np.cumsum(pages[::-1])[::-1]
    # Ancestors stay in memory for their remaining descendants; those that stay to the job's end anyway do not count.
    steps = np.where(ends < count, pages, 0)
    closed = np.zeros(len(nodes) + 1, np.int64)
    np.add.at(closed, np.searchsorted(nodes, ends), steps)
    above = np.cumsum(steps) - np.cumsum(closed)[:-1]
    held += np.where(parents < 0, 0, above[np.searchsorted(nodes, parents)])
    few = np.flatnonzero(held[above_them:] <= config.num_pages // _MAX_HELD_FRACTION)
    return begin + int(few[0]) if len(few) else count


def _first_of_last(order: Int32s, value: Int32s, samples: npt.NDArray[np.integer[Any]], most: int) -> int:
    """First index in `order` from which on the samples have at most `most` tokens to generate."""
    left = most
    for part in reversed([*blocks(len(order))]):
        last = order[part][::-1]
        sums = np.cumsum(value[last].astype(np.int64) * samples[last])
        if sums[-1] > left:
            return int(part.stop) - int(np.searchsorted(sums, left, side="right"))
        left -= int(sums[-1])
    return 0


def _rank_from(best: Int32s, begin: int) -> Int32s:
    """[M] ranks: depth first before node `begin`, by descending value from there on."""
    rank = np.arange(len(best), dtype=np.int32)
    rank[begin + np.argsort(-best[begin:], kind="stable")] = np.arange(begin, len(best), dtype=np.int32)
    return rank
