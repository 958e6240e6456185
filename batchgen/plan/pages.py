"""Which pages of the KV pool are free, and how many hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["PageAllocator"]


class PageAllocator:
    """Pages 1..num_pages-1 with exact reference counts; page 0 is scratch and never handed out.

    Freed pages are handed out again first, so that a small working set stays in cache.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs two pages of one position at least, got {num_pages} of {page_size}")
        self.page_size = page_size
        self.capacity = num_pages - 1
        """Pages that can be in use at once."""
        self.peak = 0
        """Most pages ever in use at once."""
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages

    @property
    def free_count(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Pages held by someone."""
        return self.capacity - len(self._free)

    def holders(self, page: int) -> int:
        """How many hold `page`."""
        return self._holders[page]

    def alloc(self, count: int) -> list[int]:
        """Hand out `count` pages, each with one holder. The caller has checked `free_count`."""
        if count == 0:
            return []
        assert 0 < count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        pages = self._free[-count:]
        pages.reverse()
        del self._free[-count:]
        for page in pages:
            self._holders[page] = 1
        self.peak = max(self.peak, self.capacity - len(self._free))
        return pages

    def share(self, page: int) -> None:
        """Add a holder to a page in use."""
        assert self._holders[page] > 0, f"page {page} is not in use"
        self._holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Take one holder from each page; a page without holders is free."""
        holders = self._holders
        for page in pages:
            left = holders[page] - 1
            assert left >= 0, f"page {page} freed twice"
            holders[page] = left
            if left == 0:
                self._free.append(page)
