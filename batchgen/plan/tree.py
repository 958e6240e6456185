"""The exact prefix tree of all prompts, path-compressed, as numpy columns.

Every branching and every prompt's end is the end of a node; a node is a segment of positions that all prompts below it
share. Prompts of different keys (adapter, media) share nothing, so the tree is a forest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.plan.sort import sort_prompts

__all__ = ["PrefixTree", "build_tree", "tree_of_sorted"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Columns over nodes [M] and requests [N]. Nodes are numbered depth first: a parent before its children.

    A node's subtree is the id range `[i, subtree_end[i])` and covers the places `first_row[i]..last_row[i]` of `order`.
    """

    parent: Int32s
    """[M] -1 for a root."""
    start: Int32s
    """[M] first position of the segment; equals the parent's `end`."""
    end: Int32s
    """[M] one past the last position of the segment."""
    request: Int32s
    """[M] a request below the node, whose ids give the segment."""
    first_row: Int32s
    """[M] first place in `order` of the requests below."""
    last_row: Int32s
    """[M] last place in `order` of the requests below, inclusive."""
    subtree_end: Int32s
    """[M] one past the last node below."""
    order: Int32s
    """[N] requests sorted by (key, ids): depth-first order."""
    node_of_request: Int32s
    """[N] node at whose end the prompt ends."""
    shared_len: Int32s
    """[N] by request: prompt tokens shared with the previous request in `order`, P for a repeated prompt."""
    prompt_tokens: int
    """Tokens of all prompts."""

    def __len__(self) -> int:
        """Nodes."""
        return len(self.parent)

    @property
    def distinct_tokens(self) -> int:
        """Nodes of the trie with one token per edge: what must be computed at least."""
        return int(self.end.sum(dtype=np.int64) - self.start.sum(dtype=np.int64))

    def cached_tokens(self, request: int, sample_index: int = 0) -> int:
        """Prompt tokens of a sample that another sample's computation covers.

        Over sample 0 of all requests, P less this sums to `distinct_tokens`; further samples cost no prompt token.
        """
        if sample_index:
            return int(self.end[self.node_of_request[request]])
        return int(self.shared_len[request])


def build_tree(tokens: Int32s, offsets: Int64s, keys: Int64s | None = None) -> PrefixTree:
    """Build the prefix tree of all prompts.

    Args:
        tokens: [total] int32 ids >= 0 of all prompts (may be a memory map).
        offsets: [N + 1] int64; prompt i is `tokens[offsets[i]:offsets[i + 1]]`.
        keys: [N] int64; prompts of different keys share nothing.

    Raises:
        ValueError: a prompt is empty, or `keys` has another length than the prompts.
    """
    lengths = np.diff(offsets)
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError(f"prompt {int(lengths.argmin())} is empty; every prompt needs at least one token")
    if keys is not None and len(keys) != len(lengths):
        raise ValueError(f"{len(keys)} keys for {len(lengths)} prompts")
    return tree_of_sorted(offsets, *sort_prompts(tokens, offsets, keys))


def tree_of_sorted(offsets: Int64s, order: Int64s, shared: Int32s) -> PrefixTree:
    """The tree of prompts that `sort_prompts` sorted; what neighbours share says all of it."""
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
    """Columns over the nodes [M] of sorted distinct prompts [D], depth first."""

    parent: Int32s
    end: Int32s
    first: Int32s
    """[M] first prompt below."""
    last: Int32s
    """[M] last prompt below, inclusive."""
    leaf: Int32s
    """[D] the node at which each prompt ends; behind all others that begin with the same prompt."""


def _nodes(shared: Int32s, lengths: Int32s) -> _Nodes:
    """Nodes of the sorted distinct prompts, from the lengths they share with their predecessors.

    The boundary in front of prompt i, which its two sides agree on up to `shared[i]`, lies in the widest run of prompts
    that agree so far: from the nearest boundary before it that shares less to the nearest one behind. Each such run is
    a node, a prompt's own where its first prompt is no longer than that.
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
    # A node's parent is the run around the deeper one of the boundaries at its two sides.
    behind = last + 1
    parent = node_of_bound[np.where(bounds[begin] >= bounds[behind], begin, behind)]
    return _Nodes(parent, end, begin, last, leaf)


def _nearest_less(values: Int32s) -> Int32s:
    """[N] the nearest place in front of each positive value that holds a lesser one, -1 for other values.

    `values[0]` is 0. By least values of blocks of 2, 4, 8, ..: up until the block in front holds a lesser one, then
    down into that block.
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
