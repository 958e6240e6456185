"""Cache groups: what each kind of layer keeps of a token or of a sequence, and the bytes that it costs.

Full layers keep every position, window layers only those that a token to come can still see: `first_visible` is the
rule. A page table names the pages of the full layers. The window layers of a model are planned as one group with
another pool, in which some of these pages have a page (`window_pages.WindowPages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

CacheKind = Literal["full", "window", "latent", "recurrent"]
"""`full`: keys and values of every position, in pages; `window`: of the last positions only; `latent`: one compressed
vector per position, in pages; `recurrent`: a state of fixed size per sequence."""

_PLANNED: Final[tuple[CacheKind, ...]] = ("full", "window")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same kind of cache.

    Raises:
        ValueError: caches of this kind cannot be planned, or a window is missing or out of place.
    """

    kind: CacheKind
    layers: tuple[int, ...]
    """Layers of the model, from 0"""
    page_bytes: int
    """Bytes of one page, all layers of the group together"""
    window: int | None = None
    """Positions that a token sees, itself included; None: all"""

    def __post_init__(self) -> None:
        if self.kind not in _PLANNED:
            planned = ", ".join(_PLANNED)
            raise ValueError(f"layers {list(self.layers)} keep a {self.kind} cache; only these are planned: {planned}")
        if (self.window is not None) != (self.kind == "window") or (self.window is not None and self.window < 1):
            raise ValueError(f"layers {list(self.layers)} keep a {self.kind} cache with window {self.window}")


ONE_BYTE_PAGES: Final = (CacheGroup("full", (), 1),)
"""For plans in which bytes do not matter."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of each kind of group."""

    full: int
    window: int = 0


def first_visible(position: int, window: int) -> int:
    """First position that a token at `position` or later sees: keys and values before it are not needed any more."""
    return max(0, position - window + 1)


def window_pages(window: int, page_size: int) -> int:
    """Most pages that hold the positions which one token sees."""
    return (window + page_size - 2) // page_size + 1


def least_window_pages(window: int, page_size: int) -> int:
    """Fewest pages of the window layers, the scratch page included, with which every job finishes.

    A prompt's last window and a sequence that begins or continues there, each with the page that it fills.
    """
    return 2 * (window_pages(window, page_size) + 2) + 2


def window_of(groups: Sequence[CacheGroup]) -> int | None:
    """The widest window of the groups; None if all layers are full."""
    return max((group.window for group in groups if group.window is not None), default=None)


def bytes_by_kind(groups: Sequence[CacheGroup], pages: PageCounts) -> dict[str, int]:
    """Bytes of `pages` by kind of group, without kinds that the model does not have."""
    found: dict[str, int] = {}
    for group in sorted(groups, key=lambda group: group.kind):
        count = pages.full if group.kind == "full" else pages.window
        found[group.kind] = found.get(group.kind, 0) + count * group.page_bytes
    return found


def cache_bytes(groups: Sequence[CacheGroup], pages: PageCounts) -> int:
    """Bytes of `pages`, summed over the groups."""
    return sum(bytes_by_kind(groups, pages).values())


def pages_within(groups: Sequence[CacheGroup], budget: int) -> int:
    """Most pages whose bytes in every group do not exceed `budget` together."""
    return budget // max(1, cache_bytes(groups, PageCounts(1, 1)))
