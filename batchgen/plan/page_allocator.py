"""Page allocator with reference counts."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PageAllocator:
    """Allocator of pages 1..num_pages-1 with exact reference counts; page 0 is scratch and never allocated.

    Of the free pages the first are allocated first: pages in use stay close together, and pages that are allocated in
    one step, and so read one after the other in the next ones, are neighbours however long the run is.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs at least two pages of one position, got {num_pages} pages of {page_size}")
        self.page_size = page_size
        self.capacity = num_pages - 1
        """Number of pages that can be in use at once."""
        self.used_count = 0
        """Number of pages in use."""
        self.peak = 0
        """Peak number of pages in use at once."""
        self._freed: list[int] = []
        """Heap of the pages that were in use and are free."""
        self._ref_counts = [0]
        """By page, up to the last one that was ever in use."""

    @property
    def free_count(self) -> int:
        """Number of free pages."""
        return self.capacity - self.used_count

    def ref_count(self, page: int) -> int:
        """Reference count of `page`."""
        return self._ref_counts[page] if page < len(self._ref_counts) else 0

    def alloc(self, count: int) -> list[int]:
        """Allocate `count` pages with one reference each. The caller has checked `free_count`."""
        assert 0 <= count <= self.free_count, f"{count} pages requested, {self.free_count} free"
        again = min(count, len(self._freed))
        pages = [heapq.heappop(self._freed) for _ in range(again)]
        for page in pages:
            self._ref_counts[page] = 1
        if again < count:
            first = len(self._ref_counts)
            self._ref_counts += [1] * (count - again)
            pages += range(first, len(self._ref_counts))
        self.used_count += count
        if self.used_count > self.peak:
            self.peak = self.used_count
        return pages

    def share(self, page: int) -> None:
        """Add a reference to a page in use."""
        assert self.ref_count(page) > 0, f"page {page} is not in use"
        self._ref_counts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page; a page without references is free."""
        ref_count = self._ref_counts
        for page in pages:
            left = ref_count[page] - 1 if page < len(ref_count) else -1
            assert left >= 0, f"page {page} freed twice"
            ref_count[page] = left
            if left == 0:
                heapq.heappush(self._freed, page)
                self.used_count -= 1
