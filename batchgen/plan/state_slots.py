"""The kind of cache group of recurrent layers: a state of fixed size for each holder, in a slot of the group's pool.

A node holds the state at its end until no further user can begin there. A sequence, and a node that is being computed,
hold the state of the positions that are computed. A user begins with the node's state: its first step reads that slot
and writes the user's own, so a state is computed once, and no step changes one that another row of the step reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from batchgen.plan.cache_groups import HeldGroup, HeldPages, Hold

_NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class StateGroup(HeldGroup):
    """Recurrent layers. A page of the pool is a slot: the states of all of them. Slot 0 is that before any token."""

    kind: ClassVar[str] = "recurrent"
    exact: ClassVar[bool] = True

    def least_pages(self, page_size: int, longest_span: int = 0) -> int:
        """See `CacheGroup.least_pages`: with so many, every job finishes.

        A node, one below it and a sequence, and what the last step has read of them.
        """
        return 6

    def planned(self, page_size: int) -> HeldPages:
        """See `HeldGroup.planned`."""
        return StateSlots(self, page_size)


class StateSlots(HeldPages):
    """Slots of the states."""

    def __init__(self, group: StateGroup, page_size: int) -> None:
        super().__init__(group, page_size)
        self.read: list[int] = []
        """Slots that this step reads for the last time, for one of their readers."""

    def needs(self, users: int, growing: int = 0) -> int:
        """See `HeldPages.needs`: a state has the same size after any number of tokens."""
        return users

    def hold(self, table: list[int], above: Hold | None, begin: int) -> Hold:
        """See `HeldPages.hold`."""
        return StateHold(self, above)

    def reopen(self, table: list[int], above: Hold | None, begin: int) -> Hold:
        """See `HeldPages.reopen`."""
        return StateHold(self, above)

    def end_step(self) -> None:
        """See `HeldPages.end_step`."""
        self.allocator.free(self.read)
        self.read.clear()


class StateHold(Hold):
    """The slot of a holder, and the node's from which it begins, until a step has read that."""

    __slots__ = ("_slot", "_slots", "_source")

    def __init__(self, slots: StateSlots, above: Hold | None) -> None:
        self._slots = slots
        self._source = 0 if above is None or above.state is None else above.state[1]
        if self._source:
            slots.allocator.share(self._source)
        (self._slot,) = slots.allocator.alloc(1)

    @property
    def state(self) -> tuple[int, int]:
        """See `Hold.state`."""
        return self._source, self._slot

    def computed(self) -> None:
        """See `Hold.computed`."""
        if self._source not in (0, self._slot):
            self._slots.read.append(self._source)
        self._source = self._slot

    def room(self) -> int:
        """See `Hold.room`."""
        return _NO_LIMIT

    def extend(self, end: int) -> None:
        """See `Hold.extend`."""

    def slide(self, position: int) -> None:
        """See `Hold.slide`."""

    def shrink(self, high: int) -> None:
        """See `Hold.shrink`."""

    def release(self) -> None:
        """See `Hold.release`."""
        if self._slot:
            self._slots.allocator.free({self._slot, self._source} - {0})
            self._slot = self._source = 0
