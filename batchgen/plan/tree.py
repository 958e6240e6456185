"""The exact prefix tree of all prompts, path-compressed, as numpy columns.

Every branching and every prompt's end is the end of a node; a node is a segment of positions that all prompts below it
share. Prompts of different keys (adapter, media) share nothing, so the tree is a forest.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.plan.sort import sort_prompts

__all__ = ["PrefixTree", "build_tree"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_STACK_BLOCK = 1 << 16


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
    order, shared = sort_prompts(tokens, offsets, keys)
    lengths = lengths[order].astype(np.int32)
    fresh = np.flatnonzero(shared < lengths)
    parent, end, first, last, leaf = _nodes(shared[fresh], lengths[fresh])
    # Depth first: by first row, then from the root down.
    places = np.lexsort((end, first))
    rank = np.empty(len(places), np.int32)
    rank[places] = np.arange(len(places), dtype=np.int32)
    parent, end, first, last = parent[places], end[places], first[places], last[places]
    parent = np.where(parent >= 0, rank[parent], np.int32(-1))
    start = np.where(parent >= 0, end[parent], np.int32(0)) if len(end) else end
    first_row = fresh[first].astype(np.int32)
    last_row = np.append(fresh[1:] - 1, len(order) - 1)[last].astype(np.int32)
    node_of_row = np.repeat(rank[leaf], np.diff(np.append(fresh, len(order))))
    return PrefixTree(
        parent=parent,
        start=start,
        end=end,
        request=order[first_row].astype(np.int32),
        first_row=first_row,
        last_row=last_row,
        subtree_end=np.searchsorted(first, last, side="right").astype(np.int32),
        order=order.astype(np.int32),
        node_of_request=_by_request(order, node_of_row),
        shared_len=_by_request(order, shared),
        prompt_tokens=int(lengths.sum(dtype=np.int64)),
    )


def _by_request(order: Int64s, by_row: npt.NDArray[Any]) -> Int32s:
    result = np.empty(len(order), np.int32)
    result[order] = by_row
    return result


def _nodes(shared: Int32s, lengths: Int32s) -> tuple[Int32s, Int32s, Int32s, Int32s, Int32s]:
    """Nodes of the sorted distinct prompts, from the lengths they share with their predecessors.

    The stack holds the path to the last prompt's end. Returns parent, end, first and last prompt by node in order of
    creation, and the node of each prompt.
    """
    parent, end, first, last, leaf = array("i"), array("i"), array("i"), array("i"), array("i")
    path, depths = [-1], [0]
    row = -1
    for begin in range(0, len(shared), _STACK_BLOCK):
        block = slice(begin, begin + _STACK_BLOCK)
        for row, (common, length) in enumerate(
            zip(shared[block].tolist(), lengths[block].tolist(), strict=True), begin
        ):
            child = -1
            while depths[-1] > common:
                child = path.pop()
                depths.pop()
                last[child] = row - 1
            if depths[-1] < common:
                parent.append(path[-1])
                end.append(common)
                first.append(first[child])
                last.append(-1)
                parent[child] = len(parent) - 1
                path.append(len(parent) - 1)
                depths.append(common)
            parent.append(path[-1])
            end.append(length)
            first.append(row)
            last.append(-1)
            leaf.append(len(parent) - 1)
            path.append(len(parent) - 1)
            depths.append(length)
    for node in path[1:]:
        last[node] = row
    return _column(parent), _column(end), _column(first), _column(last), _column(leaf)


def _column(values: array[int]) -> Int32s:
    return np.frombuffer(values, dtype=np.int32) if values else np.zeros(0, np.int32)
