"""Exact prefix tree of all prompts, path-compressed (a radix tree), as numpy columns.

A node is a segment of positions that all prompts below it share; it ends where paths branch or a prompt ends. Prompts
with different keys (adapter, media) share nothing, so the tree is a forest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.plan.sort import sort_prompts

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prefix tree as columns over nodes [M] and requests [N]. Nodes are numbered depth first, parents before children.

    The subtree of node i is the id range `[i, subtree_end[i])`; its requests are `order[first_row[i]:last_row[i] + 1]`.
    """

    parent: Int32s
    """[M] parent of each node, -1 for a root."""
    start: Int32s
    """[M] first position of the segment; equals the parent's `end`."""
    end: Int32s
    """[M] one past the last position of the segment."""
    request: Int32s
    """[M] a request below the node, whose ids give the segment's tokens."""
    first_row: Int32s
    """[M] first index in `order` of the requests below."""
    last_row: Int32s
    """[M] last index in `order` of the requests below, inclusive."""
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


def build_tree(tokens: Int32s, offsets: Int64s, keys: Int64s | None = None) -> PrefixTree:
    """Build the prefix tree of all prompts.

    Args:
        tokens: [total] int32, ids >= 0 of all prompts (may be a memory map).
        offsets: [N + 1] int64; prompt i is `tokens[offsets[i]:offsets[i + 1]]`.
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


def tree_of_sorted(offsets: Int64s, order: Int64s, shared: Int32s) -> PrefixTree:
    """Build the tree from the result of `sort_prompts`: the order and the shared lengths determine it."""
    lengths = np.diff(offsets)[order].astype(np.int32)
    fresh = np.flatnonzero(shared < lengths).astype(np.int32)
    nodes = _nodes(shared[fresh], lengths[fresh])
    after = np.append(fresh[1:], np.int32(len(order)))
    first_row = fresh[nodes.first]
    node_of_row = np.repeat(nodes.leaf, after - fresh)
    start = np.where(nodes.parent >= 0, nodes.end[nodes.parent], np.int32(0)) if len(fresh) else nodes.end
    return PrefixTree(
        parent=nodes.parent,
        start=start,
        end=nodes.end,
        request=order[first_row].astype(np.int32),
        first_row=first_row,
        last_row=after[nodes.last] - np.int32(1),
        subtree_end=nodes.leaf[nodes.last] + np.int32(1),
        order=order.astype(np.int32),
        node_of_request=_by_request(order, node_of_row),
        shared_len=_by_request(order, shared),
        prompt_tokens=int(lengths.sum(dtype=np.int64)),
    )


def _by_request(order: Int64s, by_row: npt.NDArray[Any]) -> Int32s:
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
    last: Int32s
    """[M] last prompt below, inclusive."""
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
    left = _nearest_less(bounds)
    right = (count - _nearest_less(bounds[::-1]))[::-1]
    inside = np.flatnonzero(shared > 0)
    first, depth = left[inside], shared[inside]
    own = lengths[first] == depth
    keys, run = np.unique(first[~own].astype(np.int64) << 32 | depth[~own], return_inverse=True)
    run_first, run_end = (keys >> 32).astype(np.int32), (keys & 0xFFFFFFFF).astype(np.int32)
    leaf = (np.arange(count) + np.cumsum(np.bincount(run_first, minlength=count))).astype(np.int32)
    run_node = np.arange(len(keys), dtype=np.int32) + run_first
    node_of_bound = np.full(count + 1, -1, np.int32)
    node_of_bound[inside[own]] = leaf[first[own]]
    node_of_bound[inside[~own]] = run_node[run]
    total = count + len(keys)
    begin, end, last = (np.empty(total, np.int32) for _ in range(3))
    begin[leaf], end[leaf], last[leaf] = np.arange(count), lengths, np.arange(count)
    begin[run_node], end[run_node] = run_first, run_end
    last[node_of_bound[inside]] = right[inside] - 1
    # A node's parent is the run around the deeper of the two boundaries at its sides.
    behind = last + 1
    parent = node_of_bound[np.where(bounds[begin] >= bounds[behind], begin, behind)]
    return _Nodes(parent, end, begin, last, leaf)


def _nearest_less(values: Int32s) -> Int32s:
    """[N] nearest index before each positive value that holds a smaller one; -1 for the other values.

    `values[0]` is 0. Uses the minima of blocks of 2, 4, 8, ...: ascends until the previous block holds a smaller value,
    then descends into that block.
    """
    found = np.full(len(values), -1, np.int32)
    least = [values]
    while len(least[-1]) > 1:
        pairs = least[-1][: len(least[-1]) & ~1]
        least.append(np.minimum(pairs[::2], pairs[1::2]))
    places = np.flatnonzero(values > 0).astype(np.int32)
    blocks, wanted = places, values[places]
    hits = []
    for level in least:
        hit = ((blocks & 1) == 1) & (level[blocks - 1] < wanted)
        hits.append((places[hit], blocks[hit] - 1, wanted[hit]))
        places, blocks, wanted = places[~hit], blocks[~hit] >> 1, wanted[~hit]
    assert not len(places)
    places, blocks, wanted = hits[-1]
    for level, more in zip(least[-2::-1], hits[-2::-1], strict=True):
        blocks = 2 * blocks + (level[2 * blocks + 1] < wanted)
        places, blocks, wanted = (np.concatenate(both) for both in zip((places, blocks, wanted), more, strict=True))
    found[places] = blocks
    return found
