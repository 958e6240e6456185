"""Exact prefix tree of all prompts, path-compressed (a radix tree), as numpy columns.

A node is a segment of positions that all prompts below it share; it ends where paths branch or a prompt ends. Prompts
with different keys (adapter, media) share nothing, so the tree is a forest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.plan.sort import Offsets, sort_prompts

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

BLOCK = 1 << 16
"""Number of nodes or requests of which temporary columns are made at once."""


def blocks(count: int) -> Iterator[slice]:
    """Slices of `BLOCK` or fewer that cover `count` nodes or requests."""
    return (slice(begin, min(begin + BLOCK, count)) for begin in range(0, count, BLOCK))


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prefix tree as columns over nodes [M] and requests [N]. Nodes are numbered depth first, parents before children.

    The subtree of node i is the id range `[i, subtree_end[i])`; its requests are `order[first_row[i]:last_row[i] + 1]`.
    """

    parent: Int32s
    """[M] parent of each node, -1 for a root."""
    end: Int32s
    """[M] one past the last position of the segment."""
    first_row: Int32s
    """[M] first index in `order` of the requests below."""
    subtree_end: Int32s
    """[M] one past the last node below."""
    order: Int32s
    """[N] requests sorted by (key, ids): depth-first order."""
    node_of_request: Int32s
    """[N] node at whose end each request's prompt ends."""
    shared_len: Int32s
    """[N] number of prompt tokens that each request shares with the previous one in `order`; P for a repeated
    prompt."""
    prompt_tokens: int
    """Number of tokens in all prompts."""

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self.parent)

    @property
    def start(self) -> Int32s:
        """[M] first position of the segment: the parent's `end`. Made at each call, as the next one."""
        return np.where(self.parent >= 0, self.end[self.parent], np.int32(0))

    @property
    def last_row(self) -> Int32s:
        """[M] last index in `order` of the requests below, inclusive."""
        return self.row_after(slice(None)) - np.int32(1)

    def row_after(self, nodes: slice) -> Int32s:
        """One past the last index in `order` of the requests below each of some nodes."""
        after = self.subtree_end[nodes]
        inside = self.first_row.take(after, mode="clip")
        return np.where(after < len(self), inside, np.int32(len(self.order)))

    def start_of(self, node: int) -> int:
        """First position of a node's segment."""
        parent = self.parent[node]
        return 0 if parent < 0 else int(self.end[parent])

    def requests_below(self, node: int) -> Int32s:
        """The requests below a node, in depth-first order."""
        after = self.subtree_end[node]
        return self.order[self.first_row[node] : self.first_row[after] if after < len(self) else None]

    @property
    def distinct_tokens(self) -> int:
        """Number of distinct prompt prefixes, i.e. the minimum number of tokens to compute."""
        return int(self.end.sum(dtype=np.int64) - self.start.sum(dtype=np.int64))

    def cached_tokens(self, request: int, sample_index: int = 0) -> int:
        """Number of prompt tokens of a sample that are computed for another sample.

        The other prompt tokens, summed over sample 0 of all requests, are the `distinct_tokens`; further samples
        compute no prompt token.
        """
        if sample_index:
            return int(self.end[self.node_of_request[request]])
        return int(self.shared_len[request])


def build_tree(tokens: Int32s, offsets: Offsets, keys: Int64s | None = None) -> PrefixTree:
    """Build the prefix tree of all prompts.

    Args:
        tokens: [total] int32, ids >= 0 of all prompts (may be a memory map).
        offsets: [N + 1] int32 or int64; prompt i is `tokens[offsets[i]:offsets[i + 1]]`.
        keys: [N] int64; prompts with different keys share nothing.

    Raises:
        ValueError: a prompt is empty, or `keys` does not have one element per prompt.
    """
    lengths = np.diff(offsets)
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError(f"prompt {int(lengths.argmin())} is empty; every prompt needs at least one token")
    if keys is not None and len(keys) != len(lengths):
        raise ValueError(f"{len(keys)} keys for {len(lengths)} prompts")
    return tree_of_sorted(offsets, *sort_prompts(tokens, offsets, keys))


def tree_of_sorted(offsets: Offsets, order: Int32s, shared: Int32s) -> PrefixTree:
    """Build the tree from the result of `sort_prompts`: the order and the shared lengths determine it."""
    lengths = np.diff(offsets).astype(np.int32, copy=False)[order]
    prompt_tokens = int(lengths.sum(dtype=np.int64))
    distinct = shared < lengths
    fresh = np.flatnonzero(distinct).astype(np.int32)
    lengths = lengths[distinct]
    nodes = _nodes(shared[distinct], lengths)
    del lengths, distinct
    node_of_row = np.repeat(nodes.leaf, np.diff(fresh, append=np.int32(len(order))))
    return PrefixTree(
        parent=nodes.parent,
        end=nodes.end,
        first_row=fresh[nodes.first],
        subtree_end=nodes.subtree_end,
        order=order,
        node_of_request=_by_request(order, node_of_row),
        shared_len=_by_request(order, shared),
        prompt_tokens=prompt_tokens,
    )


def _by_request(order: Int32s, by_row: Int32s) -> Int32s:
    result = np.empty(len(order), np.int32)
    result[order] = by_row
    return result


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Columns over the nodes [M] of the sorted distinct prompts [D], depth first."""

    parent: Int32s
    end: Int32s
    first: Int32s
    """[M] first prompt below."""
    subtree_end: Int32s
    leaf: Int32s
    """[D] node at which each prompt ends; numbered after all other nodes whose first prompt is the same."""


def _nodes(shared: Int32s, lengths: Int32s) -> _Nodes:
    """Compute the nodes of the sorted distinct prompts from the lengths that they share with their predecessors.

    The boundary before prompt i, whose sides agree on `shared[i]` tokens, lies in a widest run of prompts that agree on
    these: from the nearest boundary before it that shares less to the nearest such one after it. Each run is a node; it
    is the node of its first prompt if that has no more tokens.
    """
    count = len(lengths)
    bounds = np.append(shared, np.int32(0))
    inside = np.flatnonzero(shared > 0).astype(np.int32)
    first = _nearest_less(bounds, inside)
    depth = shared[inside]
    own = lengths[first] == depth
    own_first, first, depth = first[own], first[~own], depth[~own]
    runs, run = _runs(first, depth)
    del first, depth
    run_first, run_end = (runs >> 32).astype(np.int32), (runs & 0xFFFFFFFF).astype(np.int32)
    leaf = np.cumsum(np.bincount(run_first, minlength=count), dtype=np.int32)
    leaf += np.arange(count, dtype=np.int32)
    run_node = np.arange(len(run_first), dtype=np.int32) + run_first
    node_of_bound = np.full(count + 1, -1, np.int32)
    node_of_bound[inside[own]] = leaf[own_first]
    node_of_bound[inside[~own]] = run_node[run]
    del run, own, own_first
    total = count + len(run_first)
    begin, end, last = (np.empty(total, np.int32) for _ in range(3))
    begin[leaf], end[leaf], last[leaf] = (numbers := np.arange(count, dtype=np.int32)), lengths, numbers
    begin[run_node], end[run_node] = run_first, run_end
    del numbers, run_node, run_first, run_end
    right = np.int32(count) - _nearest_less(bounds[::-1], np.int32(count) - inside[::-1])[::-1]
    last[node_of_bound[inside]] = right - np.int32(1)
    del right, inside
    # A node's parent is the run around the deeper of the two boundaries at its sides.
    behind = last + np.int32(1)
    parent = node_of_bound[np.where(bounds[begin] >= bounds[behind], begin, behind)]
    del behind, bounds, node_of_bound
    return _Nodes(parent, end, begin, leaf[last] + np.int32(1), leaf)


def _runs(first: Int32s, depth: Int32s) -> tuple[Int64s, Int32s]:
    """The distinct runs, each as a number of its first prompt and its depth, ascending; [R] index of each given one."""
    keys = first.astype(np.int64)
    keys <<= 32
    keys |= depth
    keys.sort()
    runs = keys[np.diff(keys, prepend=-1) != 0]
    del keys
    index = np.empty(len(first), np.int32)
    for part in blocks(len(first)):
        index[part] = np.searchsorted(runs, first[part].astype(np.int64) << 32 | depth[part])
    return runs, index


def _nearest_less(values: Int32s, places: Int32s) -> Int32s:
    """[P] nearest index before each of the `places`, in ascending order, that holds a smaller value.

    `values[0]` is 0, and the values at the places are positive. Uses the minima of blocks of 2, 4, 8, ...: ascends
    until the previous block holds a smaller value, then descends into that block.
    """
    nearest = np.empty(len(places), np.int32)
    least = [values]
    while len(least[-1]) > 1:
        pairs = least[-1][: len(least[-1]) & ~1]
        least.append(np.minimum(pairs[::2], pairs[1::2]))
    for part in blocks(len(places)):
        nearest[part] = _in_blocks(least, places[part])
    return nearest


def _in_blocks(least: list[Int32s], places: Int32s) -> Int32s:
    """`_nearest_less`, given the minima of the blocks of each level."""
    numbers, blocks, wanted = np.arange(len(places)), places, least[0][places]
    hits = []
    for level in least:
        hit = ((blocks & 1) == 1) & (level[blocks - 1] < wanted)
        hits.append((numbers[hit], blocks[hit] - 1, wanted[hit]))
        numbers, blocks, wanted = numbers[~hit], blocks[~hit] >> 1, wanted[~hit]
    assert not len(numbers)
    numbers, blocks, wanted = hits[-1]
    for level, more in zip(least[-2::-1], hits[-2::-1], strict=True):
        blocks = 2 * blocks + (level[2 * blocks + 1] < wanted)
        numbers, blocks, wanted = (np.concatenate(both) for both in zip((numbers, blocks, wanted), more, strict=True))
    nearest = np.empty(len(places), np.int32)
    nearest[numbers] = blocks
    return nearest


def user_counts(tree: PrefixTree, samples: npt.NDArray[np.int32]) -> tuple[array[int], array[int]]:
    """[M] samples at each node's end plus children with samples below; [M] samples at each node's end."""
    before = np.zeros(len(samples) + 1, np.int32)
    np.cumsum(samples[tree.order] > 0, dtype=np.int32, out=before[1:])
    ends, refs = (array("i", bytes(4)) * len(tree) for _ in range(2))
    samples_at, users = np.frombuffer(ends, np.int32), np.frombuffer(refs, np.int32)
    np.add.at(samples_at, tree.node_of_request, samples)
    users[:] = samples_at
    for part in blocks(len(tree)):
        live = before[tree.row_after(part)] > before[tree.first_row[part]]
        parent = tree.parent[part][live]
        np.add.at(users, parent[parent >= 0], 1)
    return refs, ends
