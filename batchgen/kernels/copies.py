"""The head of a page of keys and values to another page, for rows that go on from the middle of it."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from batchgen.kernels.types import KVPool

__all__ = ["copy_pages"]

_TOGETHER: Final = 64
"""Pages copied at once: they go through memory of their own."""


def copy_pages(pool: KVPool, copies: Tensor) -> None:
    """Copy positions of pages to other pages, in every layer.

    Whole pages are copied here: what a target holds behind the positions asked for is nobody's yet.

    Args:
        pool: of any device.
        copies: [n, 3] int64 on the pool's device: source page, target page, positions from the page's first on. Made
            in order: a page may be a target after it was a source, and not before.
    """
    for at in range(0, len(copies), _TOGETHER):
        sources, targets = copies[at : at + _TOGETHER, 0], copies[at : at + _TOGETHER, 1]
        for cache in (*pool.keys, *pool.values):
            cache[targets] = cache[sources]
