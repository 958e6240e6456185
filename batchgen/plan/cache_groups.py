"""Cache groups: layers that keep the same positions, in one pool, and the bytes that these cost.

A model has a list of groups. `CacheGroup` itself is the kind `full`: every position is kept, in the pages that page
tables name. Another kind is a subclass of `HeldGroup` in its own file, which says what it keeps
(`window_pages.WindowGroup`, `state_slots.StateGroup`): nodes and sequences *hold* its pages. How a layer stores a
position (keys and values, or a latent) is part of the pool, and of `page_bytes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.plan.page_allocator import PageAllocator


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


@dataclass(frozen=True, slots=True)
class HeldGroup(CacheGroup, ABC):
    """Layers whose pages are planned apart from those of page tables: nodes and sequences hold what they need."""

    num_pages: int = field(default=0, kw_only=True)
    """Pages of the pool, the scratch page included; 0: it has no size yet"""

    exact: ClassVar[bool] = False
    """Whether a user of a node begins at its end: it cannot recompute positions before it"""

    def pool_pages(self, pages: int) -> int:
        """See `CacheGroup.pool_pages`."""
        return self.num_pages

    @abstractmethod
    def planned(self, page_size: int) -> HeldPages:
        """The group's pages while a job is planned."""


class HeldPages(ABC):
    """Pages of a `HeldGroup` while a job is planned."""

    by_page: npt.NDArray[np.int64] | None = None
    """The group's page, by page of the tables; None: its pages belong to no page of a table."""

    def __init__(self, group: HeldGroup, page_size: int) -> None:
        """`group`: with its number of pages; `page_size`: positions per page, S."""
        self.exact = group.exact
        self.allocator = PageAllocator(group.num_pages, page_size)

    @property
    def free_count(self) -> int:
        """Number of free pages."""
        return self.allocator.free_count

    @abstractmethod
    def needs(self, users: int, growing: int = 0) -> int:
        """Free pages for `users` further holders, and for `growing` rows that reach their next page."""

    @abstractmethod
    def hold(self, table: list[int], above: Hold | None, begin: int) -> Hold:
        """What a new user of a node holds, which holds `above`: it computes from position `begin` of its page table."""

    @abstractmethod
    def reopen(self, table: list[int], above: Hold | None, begin: int) -> Hold:
        """What a node holds that is computed once more from `begin`; `above`: of a parent that this step computes, or
        of any parent where the group is `exact`.
        """

    def copied(self, source: int, target: int) -> tuple[int, int]:
        """The pages to copy where a page of the tables is copied to another; not for states, which are in no page."""
        raise NotImplementedError

    def leaving(self, positions: npt.NDArray[np.int64]) -> list[int]:
        """Decode rows, of those that feed `positions` [R] next, whose holds slide as a step begins."""
        return []

    def end_step(self) -> None:  # noqa: B027 only states are read by a step for the last time
        """Let go of what only this step reads."""


class Hold(ABC):
    """What a node or a sequence holds of a group."""

    __slots__ = ()

    @abstractmethod
    def room(self) -> int:
        """Position up to which `extend` can go now."""

    @abstractmethod
    def extend(self, end: int) -> None:
        """Hold what positions before `end` need, too."""

    @abstractmethod
    def slide(self, position: int) -> None:
        """Let go of what no token at `position` or later needs."""

    @abstractmethod
    def shrink(self, high: int) -> None:
        """Let go of the pages from index `high` of the page table on."""

    @abstractmethod
    def release(self) -> None:
        """Let go of everything."""

    @property
    def state(self) -> tuple[int, int] | None:
        """Slots of the state that the next step reads and of the one that it writes; None: the group has no states."""
        return None

    def computed(self) -> None:  # noqa: B027 only states are read once and written
        """Record that this step writes the state: the next one reads it."""


class StateSpan(NamedTuple):
    """What a step does with a state, up to a position."""

    end: int
    """The state is that after the positions before."""
    source: int
    """Slot of the state from which it begins; 0: no position came before"""
    slot: int
    """Slot of the state after these positions"""


def state_spans(holds: Sequence[Hold], end: int, *, store: bool = True) -> tuple[StateSpan, ...]:
    """The span of a step that computes a holder up to `end`; `store`: it writes the state."""
    spans = tuple(StateSpan(end, *hold.state) for hold in holds if hold.state is not None)
    if store:
        for hold in holds:
            hold.computed()
    return spans


def held_groups(groups: Sequence[CacheGroup]) -> list[HeldGroup]:
    """The groups that have their own pages."""
    return [group for group in groups if isinstance(group, HeldGroup)]


ONE_BYTE_PAGES: Final = (CacheGroup((), 1),)
"""For plans in which bytes do not matter."""


def bytes_by_kind(groups: Sequence[CacheGroup], pages: Sequence[int]) -> dict[str, int]:
    """Bytes by kind of group; `pages`: number of pages of each group."""
    sizes = dict.fromkeys((group.kind for group in groups), 0)
    for group, count in zip(groups, pages, strict=True):
        sizes[group.kind] += count * group.page_bytes
    return sizes
