"""Cache groups: what each kind of layer keeps of a token or of a sequence, and the bytes that it costs.

A page id means one page in each group, so all groups are planned together in numbers of pages, and every
limit and counter in bytes comes from `cache_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

CacheKind = Literal["full", "window", "latent", "recurrent"]
"""`full`: keys and values of every position, in pages; `window`: of the last positions only; `latent`: one compressed
vector per position, in pages; `recurrent`: a state of fixed size per sequence."""

_PLANNED: Final[tuple[CacheKind, ...]] = ("full",)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same kind of cache.

    Raises:
        ValueError: caches of this kind cannot be planned.
    """

    kind: CacheKind
    layers: tuple[int, ...]
    """Layers of the model, from 0"""
    page_bytes: int
    """Bytes of one page, all layers of the group together"""

    def __post_init__(self) -> None:
        if self.kind not in _PLANNED:
            planned = ", ".join(_PLANNED)
            raise ValueError(f"layers {list(self.layers)} keep a {self.kind} cache; only these are planned: {planned}")


ONE_BYTE_PAGES: Final = (CacheGroup("full", (), 1),)
"""For plans in which bytes do not matter."""


def cache_bytes(groups: Sequence[CacheGroup], pages: int) -> int:
    """Bytes of `pages` pages in every group."""
    return pages * sum(group.page_bytes for group in groups)


def pages_within(groups: Sequence[CacheGroup], budget: int) -> int:
    """Most pages whose bytes in every group do not exceed `budget` together."""
    return budget // max(1, cache_bytes(groups, 1))
