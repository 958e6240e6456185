"""What is kept of prompt tokens while they are computed: by prefix-tree node, so that shared ones are kept once.

A prompt's positions are computed once, in chunks that follow its path of nodes, and perhaps again after an eviction.
`PromptCapture` says which positions of a step are wanted by some unfinished request and were not kept before, holds the
arrays, hands each request the rows of its own path, and frees a node's arrays at its last wanting request's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.plan.tree import PrefixTree
from batchgen.plan.types import StepPlan

__all__ = ["NodeRows", "Piece", "PromptCapture", "batches"]

Ints = npt.NDArray[np.integer]

_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions [start, end) of one node that a step computes and that are to be kept."""

    node: int
    start: int
    end: int
    flat: int
    """Flat token of position `start` in the step; the others follow it."""

    def __len__(self) -> int:
        """Positions."""
        return self.end - self.start


@dataclass(slots=True)
class NodeRows:
    """What is kept of one node: positions [low, high), those below `done` so far."""

    node: int
    low: int
    high: int
    done: int
    arrays: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    """By name; whoever captures decides on names, types and shapes. Arrays by position have high - low rows."""

    def rows(self, name: str, width: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """[high - low, *width] the array of that name, made where it is not there yet."""
        array = self.arrays.get(name)
        if array is None:
            array = self.arrays[name] = np.empty((self.high - self.low, *width), dtype)
        return array

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class PromptCapture:
    """Keeps arrays over prompt positions for the requests that want them.

    Args:
        tree: the prefix tree of all requests.
        first: [N] first position that each request wants.
        last: [N] one past the last; requests with `last <= first` want nothing.
    """

    def __init__(self, tree: PrefixTree, first: Ints, last: Ints) -> None:
        self._start, self._end, self._parent = tree.start.data, tree.end.data, tree.parent.data
        self._leaf = tree.node_of_request.data
        self._first = first
        self._last = last
        self._wanting = np.flatnonzero(last > first)
        self._low, self._high, self._users = self._by_node(tree)
        self._kept: dict[int, NodeRows] = {}
        self.positions = 0
        """Positions handed out by `pieces` so far: each once."""

    def __bool__(self) -> bool:
        """Whether any request wanted anything."""
        return len(self._wanting) > 0

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        return sum(rows.nbytes for rows in self._kept.values())

    def wants(self, request: int) -> bool:
        """Whether the request wants anything."""
        return bool(self._last[request] > self._first[request])

    def users(self, node: int) -> int:
        """Unfinished requests at or below the node that want something (not necessarily of the node)."""
        return self._users[node]

    def low(self, node: int) -> int:
        """First position, of the whole prompt, that is wanted at or below the node."""
        return self._low[node]

    def pieces(self, plan: StepPlan) -> list[Piece]:
        """Wanted positions that the step computes and no earlier step did, in the order of its flat tokens.

        The caller is to store what it wants of them under `node(piece.node)`.
        """
        found: list[Piece] = []
        if not self:
            return found
        flat = 0
        for chunk in plan.prefills:
            for node in self._overlapped(chunk.request, chunk.start, chunk.end):
                if not self._users[node]:
                    continue
                rows = self._kept.get(node) or self._open(node)
                end = min(rows.high, chunk.end)
                if end > rows.done:
                    assert chunk.start <= rows.done, "positions are computed in order"
                    found.append(Piece(node, rows.done, end, flat + rows.done - chunk.start))
                    self.positions += end - rows.done
                    rows.done = end
            flat += chunk.end - chunk.start
        return found

    def undo(self, pieces: list[Piece]) -> None:
        """The latest `pieces` were not computed after all: a later call is to find them again."""
        for piece in reversed(pieces):
            self.positions -= len(piece)
            if self._users[piece.node]:
                self._kept[piece.node].done = piece.start

    def node(self, node: int) -> NodeRows:
        """What is kept of a node that a piece named and that is still wanted."""
        return self._kept[node]

    def put(self, piece: Piece, name: str, values: npt.NDArray[np.generic]) -> None:
        """Keep `values` [len(piece), ...] for the piece's positions in the node's array `name`."""
        rows = self._kept[piece.node]
        target = rows.rows(name, values.shape[1:], values.dtype)
        target[piece.start - rows.low : piece.end - rows.low] = values

    def path(self, request: int) -> list[tuple[NodeRows, slice]]:
        """The nodes that hold the request's wanted positions, root first, each with the rows that are its own."""
        first, last = int(self._first[request]), int(self._last[request])
        found: list[tuple[NodeRows, slice]] = []
        if last <= first:
            return found
        for node in self._overlapped(request, first, last):
            rows = self._kept[node]
            low, high = max(first, rows.low), min(last, rows.high)
            assert high <= rows.done, "a finished prompt was computed"
            found.append((rows, slice(low - rows.low, high - rows.low)))
        return found

    def gather(self, request: int, name: str) -> npt.NDArray[np.generic]:
        """[last - first, ...] the request's rows of the arrays `name`, copied."""
        return np.concatenate([rows.arrays[name][part] for rows, part in self.path(request)])

    def release(self, request: int) -> None:
        """The request is finished: what nobody else below wants is freed. Once per request that wants something."""
        node = self._leaf[request]
        while node >= 0:
            self._users[node] -= 1
            assert self._users[node] >= 0
            if not self._users[node]:
                self._kept.pop(node, None)
            node = self._parent[node]

    def _open(self, node: int) -> NodeRows:
        low = max(self._start[node], self._low[node])
        high = max(low, min(self._end[node], self._high[node]))
        rows = self._kept[node] = NodeRows(node, low, high, low)
        return rows

    def _overlapped(self, request: int, start: int, end: int) -> list[int]:
        """Nodes on the request's path that hold positions of [start, end), root first."""
        node = self._leaf[request]
        path: list[int] = []
        while node >= 0 and self._end[node] > start:
            if self._start[node] < end:
                path.append(node)
            node = self._parent[node]
        path.reverse()
        return path

    def _by_node(self, tree: PrefixTree) -> tuple[list[int], list[int], list[int]]:
        """Per node, over the wanting requests at or below it: least first, greatest last, their number."""
        count = len(tree)
        if not len(self._wanting):
            return [], [], []
        low = np.full(count, _NEVER, np.int64)
        high = np.zeros(count, np.int64)
        ends = tree.node_of_request[self._wanting]
        np.minimum.at(low, ends, self._first[self._wanting])
        np.maximum.at(high, ends, self._last[self._wanting])
        lows, highs = low.tolist(), high.tolist()
        users = np.bincount(ends, minlength=count).tolist()
        parents = tree.parent.tolist()
        for node in range(count - 1, -1, -1):
            above = parents[node]
            if above >= 0 and users[node]:
                lows[above] = min(lows[above], lows[node])
                highs[above] = max(highs[above], highs[node])
                users[above] += users[node]
        return lows, highs, users


def batches(pieces: list[Piece], size: int) -> Iterator[list[Piece]]:
    """All positions of the pieces, in order, in lists of at most `size` positions each."""
    batch: list[Piece] = []
    free = size
    for piece in pieces:
        start = piece.start
        while start < piece.end:
            end = min(piece.end, start + free)
            batch.append(Piece(piece.node, start, end, piece.flat + start - piece.start))
            free -= end - start
            start = end
            if not free:
                yield batch
                batch, free = [], size
    if batch:
        yield batch
