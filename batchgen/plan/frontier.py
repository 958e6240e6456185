"""The nodes not yet begun, as ranges of ids in depth-first order."""

from __future__ import annotations

from array import array

__all__ = ["Frontier"]


class Frontier:
    """A stack of disjoint id ranges, the first in depth-first order on top. A subtree is a range."""

    def __init__(self, nodes: int, subtree_end: memoryview[int], refs: array[int]) -> None:
        self._ranges = [(0, nodes)]
        self._subtree_end = subtree_end
        self._refs = refs

    def take(self) -> tuple[int, int] | None:
        """Remove and return the first range; its first node has unended samples below."""
        while self._ranges:
            low, high = self._ranges.pop()
            while low < high and not self._refs[low]:
                low = self._subtree_end[low]
            if low < high:
                return low, high
        return None

    def give_back(self, low: int, high: int) -> None:
        """Put a range (back) on top."""
        if low < high:
            self._ranges.append((low, high))
