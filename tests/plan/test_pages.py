"""Page allocator: counts, references and misuse."""

from __future__ import annotations

import pytest

from batchgen.plan.page_allocator import PageAllocator


def test_counts_and_peak() -> None:
    pages = PageAllocator(5, 16)
    first = pages.alloc(3)
    assert first == [1, 2, 3]
    assert (pages.free_count, pages.used_count, pages.peak) == (1, 3, 3)
    pages.free(first[:2])
    assert (pages.free_count, pages.used_count, pages.peak) == (3, 1, 3)
    pages.alloc(3)
    assert pages.peak == 4


def test_the_first_free_pages_are_allocated_first() -> None:
    pages = PageAllocator(7, 16)
    first = pages.alloc(5)
    pages.free([first[3], first[0], first[2]])
    assert pages.alloc(4) == [1, 3, 4, 6]


def test_shared_page_is_freed_with_its_last_reference() -> None:
    pages = PageAllocator(3, 1)
    [page] = pages.alloc(1)
    pages.share(page)
    pages.free([page])
    assert (pages.ref_count(page), pages.free_count) == (1, 1)
    pages.free([page])
    assert pages.free_count == 2


def test_misuse_is_detected() -> None:
    pages = PageAllocator(3, 1)
    with pytest.raises(AssertionError, match="3 pages requested, 2 free"):
        pages.alloc(3)
    with pytest.raises(AssertionError, match="page 1 freed twice"):
        pages.free([1])
    with pytest.raises(AssertionError, match="page 2 is not in use"):
        pages.share(2)
    with pytest.raises(ValueError, match="two pages"):
        PageAllocator(1, 16)
