"""The kind of cache group that keeps a window: which pages of the page tables have one of its pages, and who needs it.

A node or a sequence *holds* the group's pages of a range of its page table: from the first position that a token to
come can see (`WindowGroup.first_visible`) to the last one that is stored. A page whose last holder lets go is free. So
a prefix that several rows share keeps pages only while a row is within a window of it, or has yet to begin at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from batchgen.plan.cache_groups import HeldGroup, HeldPages, Hold

Position = TypeVar("Position", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class WindowGroup(HeldGroup):
    """Layers that keep only the last positions, in their own pages, which are planned with those of the tables."""

    window: int
    """Most positions that a token sees, itself included"""

    kind: ClassVar[str] = "window"

    def first_visible(self, position: Position) -> Position:
        """First position that a token at `position` or later sees; may be negative. Those before it are not needed."""
        return position - (self.window - 1)

    def most_pages(self, page_size: int) -> int:
        """Most pages that hold the positions which one token sees."""
        return (self.window + page_size - 2) // page_size + 1

    def least_pages(self, page_size: int, longest_span: int = 0) -> int:
        """See `CacheGroup.least_pages`: with so many, every job finishes.

        A prompt's last window and a sequence that begins or continues there, each with the page that it fills.
        """
        return 2 * (replace(self, window=self.window + longest_span).most_pages(page_size) + 2) + 2

    def planned(self, page_size: int) -> HeldPages:
        """See `HeldGroup.planned`."""
        return WindowPages(self, page_size)


class WindowPages(HeldPages):
    """Pages of a group that keeps a window."""

    def __init__(self, group: WindowGroup, page_size: int) -> None:
        super().__init__(group, page_size)
        self.group = group
        self.page_size = page_size
        self.by_page: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        """The group's page, by page of the tables. Out of date where no page is held."""
        self._held: dict[int, int] = {}

    def needs(self, users: int, growing: int = 0) -> int:
        """See `HeldPages.needs`: each user fills a page."""
        return users + growing

    def hold(self, table: list[int], above: Hold | None, begin: int) -> Hold:
        """See `HeldPages.hold`: what a user computes in a node's own chunk attends to all that this chunk holds."""
        return WindowHold(self, table) if above is None else WindowHold(self, table, _low(above), begin)

    def reopen(self, table: list[int], above: Hold | None, begin: int) -> Hold:
        """See `HeldPages.reopen`."""
        low = self.first_page(begin)
        return WindowHold(self, table, low if above is None else min(low, _low(above)), begin)

    def copied(self, source: int, target: int) -> tuple[int, int]:
        """See `HeldPages.copied`."""
        return self._held[source], self._held[target]

    def leaving(self, positions: npt.NDArray[np.int64]) -> list[int]:
        """See `HeldPages.leaving`: rows that have just ceased to see a page of the group."""
        first, before = self.group.first_visible(positions), self.group.first_visible(positions - 1)
        rows: list[int] = ((first > 0) & (first // self.page_size > before // self.page_size)).nonzero()[0].tolist()
        return rows

    def first_page(self, position: int) -> int:
        """Index of the first page that a token at `position` or later sees."""
        return max(0, self.group.first_visible(position)) // self.page_size

    def take(self, page: int) -> None:
        """Add a holder of a page, which is allocated if need be."""
        if page in self._held:
            self.allocator.share(self._held[page])
            return
        (self._held[page],) = self.allocator.alloc(1)
        if page >= len(self.by_page):
            self.by_page = np.pad(self.by_page, (0, max(len(self.by_page), page + 1 - len(self.by_page))))
        self.by_page[page] = self._held[page]

    def drop(self, page: int) -> None:
        """Remove a holder of a page."""
        held = self._held[page]
        self.allocator.free([held])
        if not self.allocator.ref_count(held):
            del self._held[page]


class WindowHold(Hold):
    """Indices [low, high) of a page table whose pages of a group are held, at first those of positions before `end`."""

    __slots__ = ("high", "low", "pages", "table")

    def __init__(self, pages: WindowPages, table: list[int], low: int = 0, end: int = 0) -> None:
        self.pages, self.table, self.low, self.high = pages, table, low, low
        self.extend(end)

    def room(self) -> int:
        """See `Hold.room`."""
        return (self.high + self.pages.free_count) * self.pages.page_size

    def extend(self, end: int) -> None:
        """See `Hold.extend`."""
        high = -(-end // self.pages.page_size)
        for index in range(self.high, high):
            self.pages.take(self.table[index])
        self.high = max(self.high, high)

    def slide(self, position: int) -> None:
        """See `Hold.slide`."""
        low = min(self.pages.first_page(position), self.high)
        for index in range(self.low, low):
            self.pages.drop(self.table[index])
        self.low = max(self.low, low)

    def shrink(self, high: int) -> None:
        """See `Hold.shrink`."""
        high = max(high, self.low)
        for index in range(high, self.high):
            self.pages.drop(self.table[index])
        self.high = min(self.high, high)

    def release(self) -> None:
        """See `Hold.release`."""
        self.shrink(self.low)


def _low(hold: Hold) -> int:
    assert isinstance(hold, WindowHold)
    return hold.low
