"""Cache groups: layers that keep the same positions, in one pool, and the bytes that these cost.

A model has a list of groups. `CacheGroup` itself is the kind `full`: every position is kept, in the pages that page
tables name. Another kind is a subclass in its own file, which says what it keeps (`window_pages.WindowGroup`).
How a layer stores a position (keys and values, or a latent) is part of the pool, and of `page_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same positions; this kind keeps all."""

    layers: tuple[int, ...]
    """Layers of the model, from 0"""
    page_bytes: int
    """Bytes of one page, all layers of the group together"""

    kind: ClassVar[str] = "full"
    """Key in reports"""

    def pool_pages(self, pages: int) -> int:
        """Pages of its pool where page tables have `pages`, the scratch page included in both."""
        return pages

    def least_pages(self, page_size: int, longest_span: int = 0) -> int:
        """Fewest pages of its pool, the scratch page included.

        `longest_span`: positions that are computed at once, as their tokens see one another.
        """
        return 2


ONE_BYTE_PAGES: Final = (CacheGroup((), 1),)
"""For plans in which bytes do not matter."""


def bytes_by_kind(groups: Sequence[CacheGroup], pages: Sequence[int]) -> dict[str, int]:
    """Bytes by kind of group; `pages`: number of pages of each group."""
    sizes = dict.fromkeys((group.kind for group in groups), 0)
    for group, count in zip(groups, pages, strict=True):
        sizes[group.kind] += count * group.page_bytes
    return sizes
