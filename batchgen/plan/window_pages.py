"""The kind of cache group that keeps a window: which pages of the page tables have one of its pages, and who needs it.

A node or a sequence *holds* the group's pages of a range of its page table: from the first position that a token to
come can see (`WindowGroup.first_visible`) to the last one that is stored. A page whose last holder lets go is free. So
a prefix that several rows share keeps pages only while a row is within a window of it, or has yet to begin at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from batchgen.plan.cache_groups import CacheGroup
from batchgen.plan.page_allocator import PageAllocator

Position = TypeVar("Position", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class WindowGroup(CacheGroup):
    """Layers that keep only the last positions, in their own pages, which are planned with those of the tables."""

    window: int
    """Most positions that a token sees, itself included"""
    num_pages: int = 0
    """Pages of the pool, the scratch page included; 0: it has no size yet"""

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

    def pool_pages(self, pages: int) -> int:
        """See `CacheGroup.pool_pages`."""
        return self.num_pages


def held_groups(groups: Sequence[CacheGroup]) -> list[WindowGroup]:
    """The groups that have their own pages."""
    return [group for group in groups if isinstance(group, WindowGroup)]


class WindowPages:
    """Pages of a group while a job is planned.

    Args:
        group: with its number of pages.
        page_size: positions per page, S.
    """

    def __init__(self, group: WindowGroup, page_size: int) -> None:
        self.group = group
        self.allocator = PageAllocator(group.num_pages, page_size)
        self.page_size = page_size
        self.by_page: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        """The group's page, by page of the tables. Out of date where no page is held."""
        self._held: dict[int, int] = {}

    @property
    def free_count(self) -> int:
        """Number of free pages."""
        return self.allocator.free_count

    def page(self, page: int) -> int:
        """The group's page of a page for which one is held."""
        return self._held[page]

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


class Hold:
    """Indices [low, high) of a page table whose pages of a group are held, at first those of positions before `end`."""

    __slots__ = ("high", "low", "pages", "table")

    def __init__(self, pages: WindowPages, table: list[int], low: int = 0, end: int = 0) -> None:
        self.pages, self.table, self.low, self.high = pages, table, low, low
        self.extend(end)

    def room(self) -> int:
        """Position up to which `extend` can hold pages now."""
        return (self.high + self.pages.free_count) * self.pages.page_size

    def extend(self, end: int) -> None:
        """Hold the pages of positions before `end`, too."""
        high = -(-end // self.pages.page_size)
        for index in range(self.high, high):
            self.pages.take(self.table[index])
        self.high = max(self.high, high)

    def slide(self, position: int) -> None:
        """Let go of the pages that no token at `position` or later sees."""
        low = min(self.pages.first_page(position), self.high)
        for index in range(self.low, low):
            self.pages.drop(self.table[index])
        self.low = max(self.low, low)

    def shrink(self, high: int) -> None:
        """Let go of the pages from index `high` on."""
        high = max(high, self.low)
        for index in range(high, self.high):
            self.pages.drop(self.table[index])
        self.high = min(self.high, high)

    def release(self) -> None:
        """Let go of all pages."""
        self.shrink(self.low)
