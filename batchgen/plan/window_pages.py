"""Pages of the window layers: which pages of the full layers have one, and who still needs it.

Page tables name pages of the full layers. A node or a sequence *holds* the window layers' pages of a range of its page
table: from the first position that a token to come can see (`cache_groups.first_visible`) to the last one that is
stored. A page whose last holder lets go is free. So a prefix that several rows share keeps pages only while a row is
within a window of it, or has yet to begin at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from batchgen.plan.cache_groups import first_visible
from batchgen.plan.page_allocator import PageAllocator


@dataclass(slots=True, eq=False)
class Hold:
    """Indices [low, high) of a page table whose pages of the window layers are held."""

    low: int = 0
    high: int = 0


NOTHING_HELD: Final = Hold()
"""For models without a window, and for those that hold no pages yet. Never changed."""


class WindowPages:
    """Pages of the window layers.

    Args:
        window: positions that a token sees, itself included.
        num_pages: pages of the pool, the scratch page included.
        page_size: positions per page, S.
    """

    def __init__(self, window: int, num_pages: int, page_size: int) -> None:
        self.window = window
        self.allocator = PageAllocator(num_pages, page_size)
        self.by_page: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        """Page of the window layers, by page of the full layers. Out of date where no page is held."""
        self._held: dict[int, int] = {}
        self._page_size = page_size

    @property
    def free_count(self) -> int:
        """Number of free pages."""
        return self.allocator.free_count

    def page(self, page: int) -> int:
        """The window layers' page of a page for which one is held."""
        return self._held[page]

    def first_page(self, position: int) -> int:
        """Index of the first page that a token at `position` or later sees."""
        return first_visible(position, self.window) // self._page_size

    def hold(self, hold: Hold, table: list[int], low: int, end: int) -> None:
        """Begin to hold pages from index `low` to those of positions before `end`. A page is allocated if need be."""
        hold.low = hold.high = low
        self.extend(hold, table, end)

    def room(self, hold: Hold) -> int:
        """Position up to which `extend` can hold pages now."""
        return (hold.high + self.free_count) * self._page_size

    def extend(self, hold: Hold, table: list[int], end: int) -> None:
        """Hold the pages of positions before `end`, too."""
        high = -(-end // self._page_size)
        for index in range(hold.high, high):
            self._take(table[index])
        hold.high = max(hold.high, high)

    def slide(self, hold: Hold, table: list[int], position: int) -> None:
        """Let go of the pages that no token at `position` or later sees."""
        low = min(self.first_page(position), hold.high)
        for index in range(hold.low, low):
            self._drop(table[index])
        hold.low = max(hold.low, low)

    def shrink(self, hold: Hold, table: list[int], high: int) -> None:
        """Let go of the pages from index `high` on."""
        high = max(high, hold.low)
        for index in range(high, hold.high):
            self._drop(table[index])
        hold.high = min(hold.high, high)

    def release(self, hold: Hold, table: list[int]) -> None:
        """Let go of all pages."""
        self.shrink(hold, table, hold.low)

    def _take(self, page: int) -> None:
        if page in self._held:
            self.allocator.share(self._held[page])
            return
        (self._held[page],) = self.allocator.alloc(1)
        if page >= len(self.by_page):
            self.by_page = np.pad(self.by_page, (0, max(len(self.by_page), page + 1 - len(self.by_page))))
        self.by_page[page] = self._held[page]

    def _drop(self, page: int) -> None:
        held = self._held[page]
        self.allocator.free([held])
        if not self.allocator.ref_count(held):
            del self._held[page]
