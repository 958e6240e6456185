"""The nodes not yet begun, as ranges of ids, and which of them is next."""

from __future__ import annotations

import heapq
from array import array

import numpy as np
import numpy.typing as npt

__all__ = ["Frontier"]


class Frontier:
    """Disjoint id ranges, each of subtrees that are siblings; the one whose first node ranks first is next.

    Args:
        parent: [M] by node, -1 for a root.
        subtree_end: [M] one past the last node below.
        refs: [M] by node, 0 where nothing is left below.
        rank: [M] places in the order of beginning; None for depth first.
    """

    def __init__(
        self,
        parent: memoryview[int],
        subtree_end: memoryview[int],
        refs: array[int],
        rank: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self._parent = parent
        self._subtree_end = subtree_end
        self._refs = refs
        self._rank = range(len(parent)) if rank is None else rank.data
        self._heap: list[tuple[int, int, int]] = []
        self.give_back(0, len(parent))

    def __bool__(self) -> bool:
        """Whether a range is left; there may be nothing to begin in it."""
        return bool(self._heap)

    def take(self) -> tuple[int, int] | None:
        """Remove and return the first range; its first node has unended samples below."""
        while self._heap:
            _, low, high = heapq.heappop(self._heap)
            if self._refs[low]:
                return low, high
            while low < high and not self._refs[low]:
                low = self._subtree_end[low]
            if low < high:
                heapq.heappush(self._heap, (self._rank[low], low, high))
        return None

    def give_back(self, low: int, high: int) -> None:
        """Put a range (back): nodes that lie one after the other, of whatever depth."""
        while low < high:
            parent = self._parent[low]
            end = high if parent < 0 else min(high, self._subtree_end[parent])
            heapq.heappush(self._heap, (self._rank[low], low, end))
            low = end
