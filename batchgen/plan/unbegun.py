"""The samples that have not begun: which is next at the end of each prefix tree node, and which never begin."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from batchgen.plan.block_manager import BlockManager
from batchgen.plan.order import BeginOrder


class UnbegunSamples:
    """Hands out the samples at the end of a node one by one: in the tree's order, and each request's in order.

    `BlockManager.unstarted` has their number by node, and is kept up to date.
    """

    def __init__(self, order: BeginOrder, samples: npt.NDArray[np.int32], block_manager: BlockManager) -> None:
        """`samples`: [N] samples per request."""
        self._order = order.tree.order.data
        self._samples = samples.data
        self._node_of_request = order.tree.node_of_request.data
        self._block_manager = block_manager
        self._next: dict[int, tuple[int, int]] = {}
        """Node with some samples begun -> index in the tree's order and sample index of the next sample."""
        self._cancelled: set[int] = set()

    def requests(self, node_id: int, count: int) -> list[int]:
        """Requests of the next `count` samples at a node's end; at least `count` have not begun."""
        row, sample = self._place(node_id)
        requests: list[int] = []
        while len(requests) < count:
            request = self._order[row]
            if request not in self._cancelled:
                requests += [request] * min(self._samples[request] - sample, count - len(requests))
            row, sample = row + 1, 0
        return requests

    def path_below(self, node_id: int) -> list[int]:
        """The nodes from `node_id` down to the first one with samples at its end that have not begun."""
        refs, subtree_end, path = self._block_manager.refs, self._block_manager.subtree_end, [node_id]
        while not self._block_manager.unstarted[path[-1]]:
            child = path[-1] + 1
            while not refs[child]:
                child = subtree_end[child]
            path.append(child)
        return path

    def take(self, node_id: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(request, index in the tree's order, sample index) of the next `count` samples at a node's end, which begin.

        At least `count` have not begun. Use it up.
        """
        row, sample = self._place(node_id)
        for _ in range(count):
            request = self._order[row]
            while sample == self._samples[request] or request in self._cancelled:
                row, sample = row + 1, 0
                request = self._order[row]
            yield request, row, sample
            sample += 1
        self._block_manager.unstarted[node_id] -= count
        if self._block_manager.unstarted[node_id]:
            self._next[node_id] = (row, sample)
        else:
            self._next.pop(node_id, None)

    def cancel(self, request: int, row: int, node_id: int) -> int:
        """Cancel the samples of `request`, at index `row` of the order, that have not begun; returns their number."""
        if request in self._cancelled or not self._block_manager.unstarted[node_id]:
            return 0
        self._cancelled.add(request)
        next_row, next_sample = self._place(node_id)
        begun = 0 if row > next_row else next_sample if row == next_row else self._samples[request]
        count = self._samples[request] - begun
        if count:
            self._block_manager.unstarted[node_id] -= count
            self._block_manager.release(node_id, count)
        return count

    def untouched(self) -> Iterator[tuple[int, int]]:
        """(request, its number of samples) of each request of which no sample has begun, the last one first."""
        nodes = self._node_of_request
        for row in np.flatnonzero(np.asarray(self._samples)[np.asarray(self._order)])[::-1].tolist():
            request = self._order[row]
            if request in self._cancelled or not self._block_manager.unstarted[node := nodes[request]]:
                continue
            if (row, 0) >= self._place(node):
                yield request, self._samples[request]

    def is_cancelled(self, request: int) -> bool:
        """Whether samples of `request` were cancelled before they began."""
        return request in self._cancelled

    def _place(self, node_id: int) -> tuple[int, int]:
        return self._next.get(node_id, (self._block_manager.first_row[node_id], 0))
