"""`NodeBuffers`: per-token values of prompts, stored per prefix-tree node, so that shared tokens are stored once.

A prompt is computed in chunks along its path of nodes, and possibly again after an eviction. `NodeBuffers` finds the
positions of a step that an unfinished request needs and that are not stored yet, holds the arrays, returns the rows of
a request's path, and frees a node's arrays when the last request that needs them has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.plan.step_plan import StepPlan
from batchgen.plan.tree import PrefixTree

Ints = npt.NDArray[np.integer]

_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, end) of one node that a step computes and that must be stored."""

    node: int
    start: int
    end: int
    flat: int
    """Flat token of position `start` in the step; the other positions follow it."""

    def __len__(self) -> int:
        """Number of positions."""
        return self.end - self.start


@dataclass(slots=True)
class NodeRows:
    """Stored rows of one node: positions [low, high), of which those below `filled` are computed."""

    node: int
    low: int
    high: int
    filled: int
    arrays: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    """Arrays by name, which the caller chooses; arrays by position have high - low rows."""


class NodeBuffers:
    """Arrays over prompt positions for the requests that need them.

    Args:
        tree: the prefix tree of all requests.
        first: [N] first position that each request needs.
        last: [N] one past the last position; requests with `last <= first` need nothing.
    """

    def __init__(self, tree: PrefixTree, first: Ints, last: Ints) -> None:
        self._requests = np.flatnonzero(last > first)
        if not len(self._requests):  # most jobs: no column of theirs is kept
            first = last = np.zeros(0, np.int64)
        self._end, self._parent, self._leaf = tree.end.data, tree.parent.data, tree.node_of_request.data
        self._first, self._last = first, last
        self._low, self._high, self._num_users = self._by_node(tree)
        self._kept: dict[int, NodeRows] = {}
        self.positions = 0
        """Number of positions returned by `spans` so far, each once."""

    def __bool__(self) -> bool:
        """Whether any request needs positions."""
        return len(self._requests) > 0

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays."""
        return sum(array.nbytes for rows in self._kept.values() for array in rows.arrays.values())

    def needs(self, request: int) -> bool:
        """Whether the request needs positions."""
        return bool(self and self._last[request] > self._first[request])

    def num_users(self, node: int) -> int:
        """Number of unfinished requests at or below the node that need positions (not necessarily of this node)."""
        return self._num_users[node]

    def first_wanted(self, node: int) -> int:
        """First prompt position that a request at or below the node needs."""
        return self._low[node]

    def spans(self, plan: StepPlan) -> list[Span]:
        """Needed positions that the step computes for the first time, in the order of its flat tokens.

        The caller must store their values with `put`, or in `node(span.node)`.
        """
        spans: list[Span] = []
        if not self:
            return spans
        flat = 0
        for chunk in plan.prefills:
            for node in self._nodes_between(chunk.request, chunk.start, chunk.end):
                if not self._num_users[node]:
                    continue
                rows = self._kept.get(node) or self._allocate(node)
                end = min(rows.high, chunk.end)
                if end > rows.filled:
                    assert chunk.start <= rows.filled, "positions are computed in order"
                    spans.append(Span(node, rows.filled, end, flat + rows.filled - chunk.start))
                    self.positions += end - rows.filled
                    rows.filled = end
            flat += chunk.end - chunk.start
        return spans

    def undo(self, spans: list[Span]) -> None:
        """Undo the last call of `spans`, because its step has failed; a later call returns them again."""
        for span in reversed(spans):
            self.positions -= len(span)
            if self._num_users[span.node]:
                self._kept[span.node].filled = span.start

    def node(self, node: int) -> NodeRows:
        """The rows of a node that has spans and unfinished requests."""
        return self._kept[node]

    def put(self, span: Span, name: str, values: npt.NDArray[np.generic]) -> None:
        """Store `values` [len(span), ...] for the span's positions in the node's array `name`."""
        rows = self._kept[span.node]
        if name not in rows.arrays:
            rows.arrays[name] = np.empty((rows.high - rows.low, *values.shape[1:]), values.dtype)
        rows.arrays[name][span.start - rows.low : span.end - rows.low] = values

    def path(self, request: int) -> list[tuple[NodeRows, slice]]:
        """The nodes with the request's needed positions, root first, and the request's slice of their rows."""
        if not self.needs(request):
            return []
        path: list[tuple[NodeRows, slice]] = []
        first, last = int(self._first[request]), int(self._last[request])
        for node in self._nodes_between(request, first, last):
            rows = self._kept[node]
            low, high = max(first, rows.low), min(last, rows.high)
            assert high <= rows.filled, "a position of a finished prompt was not computed"
            path.append((rows, slice(low - rows.low, high - rows.low)))
        return path

    def gather(self, request: int, name: str) -> npt.NDArray[np.generic]:
        """[last - first, ...] copy of the request's rows of the arrays `name`."""
        return np.concatenate([rows.arrays[name][part] for rows, part in self.path(request)])

    def release(self, request: int) -> None:
        """Free the rows that only this request needed. Call it once per finished request."""
        node = self._leaf[request] if self.needs(request) else -1
        while node >= 0:
            self._num_users[node] -= 1
            assert self._num_users[node] >= 0
            if not self._num_users[node]:
                self._kept.pop(node, None)
            node = self._parent[node]

    def _allocate(self, node: int) -> NodeRows:
        low = max(self._start_of(node), self._low[node])
        high = max(low, min(self._end[node], self._high[node]))
        rows = self._kept[node] = NodeRows(node, low, high, low)
        return rows

    def _start_of(self, node: int) -> int:
        """First position of a node: its parent's end."""
        parent = self._parent[node]
        return 0 if parent < 0 else self._end[parent]

    def _nodes_between(self, request: int, start: int, end: int) -> list[int]:
        """Nodes on the request's path with positions in [start, end), root first."""
        node = self._leaf[request]
        path: list[int] = []
        while node >= 0 and self._end[node] > start:
            if self._start_of(node) < end:
                path.append(node)
            node = self._parent[node]
        path.reverse()
        return path

    def _by_node(self, tree: PrefixTree) -> tuple[list[int], list[int], list[int]]:
        """By node, over the requests at or below it that need positions: least first, greatest last, their number."""
        count = len(tree)
        if not len(self._requests):
            return [], [], []
        low, high = np.full(count, _NEVER, np.int64), np.zeros(count, np.int64)
        ends = tree.node_of_request[self._requests]
        np.minimum.at(low, ends, self._first[self._requests])
        np.maximum.at(high, ends, self._last[self._requests])
        lows, highs = low.tolist(), high.tolist()
        num_users = np.bincount(ends, minlength=count).tolist()
        parents = tree.parent.tolist()
        for node in range(count - 1, -1, -1):
            above = parents[node]
            if above >= 0 and num_users[node]:
                lows[above] = min(lows[above], lows[node])
                highs[above] = max(highs[above], highs[node])
                num_users[above] += num_users[node]
        return lows, highs, num_users


def split_spans(spans: list[Span], size: int) -> Iterator[list[Span]]:
    """Split spans into lists of at most `size` positions each, in order."""
    batch: list[Span] = []
    free = size
    for span in spans:
        start = span.start
        while start < span.end:
            end = min(span.end, start + free)
            batch.append(Span(span.node, start, end, span.flat + start - span.start))
            free -= end - start
            start = end
            if not free:
                yield batch
                batch, free = [], size
    if batch:
        yield batch
