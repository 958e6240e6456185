"""`DecodeTable`: where a step's decode rows stand. A row is laid out when it joins, and advanced by one after that."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchgen.kernels.types import AttentionBatch, GroupPages
from batchgen.plan.types import DecodeRows, PrefixGroup

__all__ = ["DecodeTable"]

Int64 = npt.NDArray[np.int64]

_SPARE: int = 8
"""Pages of room beyond the longest row's, so that the table is seldom made wider."""
_NOBODY: int = -1


class DecodeTable:
    """Positions and page tables of the decode rows of consecutive steps, each at a slot of its own.

    A step costs Python for the rows that join, that begin a page, and whose groups end elsewhere; nothing for others.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._numbers = np.zeros(0, np.int64)  # [R] of the step before
        self._slots = np.zeros(0, np.int64)  # [R]
        self._own = np.zeros(0, np.int64)  # [R] the first of each row's own pages
        self._start = np.zeros(0, np.int64)  # [R] the first position of these
        self._lens = np.zeros(0, np.int64)  # [R] positions from there on
        self._tails = np.zeros(0, np.int64)  # [R] the page of each row's position
        self._first = self._last = -2  # positions of the first and the last row
        self._plan_groups: list[PrefixGroup] | None = None
        self._groups: list[GroupPages] = []
        self._number = np.zeros(0, np.int64)  # [slots] whose pages are laid out here; -1: nobody's
        self._position = np.zeros(0, np.int64)  # [slots] of the step before
        self._own_page = np.zeros(0, np.int64)  # [slots]
        self._pages = np.zeros((0, 1), np.int64)  # [slots, W] own pages
        self.laid_out = 0
        """Rows laid out so far."""

    def fill(
        self, attention: AttentionBatch, rows: DecodeRows, groups: list[PrefixGroup], slots: Int64
    ) -> tuple[Int64, Int64]:
        """Write the rows' part of a step's attention.

        Args:
            attention: the step's, without its decode rows.
            rows: [R > 0] the step's decode rows.
            groups: over them; the plan's own list, which is the same object while no row joins or leaves.
            slots: [R] each row's, the same in all steps, and nobody else's meanwhile.

        Returns:
            positions [R] that are fed, and the slots [R] that their keys and values go to.
        """
        size, positions = self._page_size, rows.positions
        anew = self._changed(rows, groups, slots)
        begins = positions % size == 0
        goes_on = anew is None and positions[0] == self._first + 1 and positions[-1] == self._last + 1
        if goes_on:
            self._lens = self._lens + 1  # what was handed out stays as it is
        else:
            moved = positions - self._position[slots]
            away = (moved != 1) & (moved != 0)  # a step that has failed is run again
            anew = away if anew is None else away | anew
            for i in anew.nonzero()[0].tolist():
                self._lay_out(int(slots[i]), rows.pages[i], int(positions[i]) // size + 1, int(self._own[i]))
            self._lens = positions + 1 - self._start
            begins &= ~anew
        self._first, self._last = positions[0], positions[-1]
        begun = begins.nonzero()[0]
        if len(begun):
            page = positions[begun] // size
            place = page - self._own[begun]
            self._widen(int(place.max()) + 1)
            new = [rows.pages[i][p] for i, p in zip(begun.tolist(), page.tolist(), strict=True)]
            self._pages[slots[begun], place] = new
            self._tails[begun] = new
        if not goes_on:
            self._tails = self._pages[slots, positions // size - self._own]
        self._position[slots] = positions
        longest = int(self._lens.max())
        attention.groups = self._groups
        attention.decode_pages = self._pages[slots, : -(-longest // size)]
        attention.decode_lens = self._lens
        attention.decode_own_start = self._start
        attention.max_decode_len = longest
        return positions, self._tails * size + positions % size

    def clear(self) -> None:
        """A step without decode rows: whoever comes back has other pages."""
        self._number[self._slots] = _NOBODY
        self._numbers = self._slots = np.zeros(0, np.int64)

    def _changed(self, rows: DecodeRows, groups: list[PrefixGroup], slots: Int64) -> npt.NDArray[np.bool_] | None:
        """[R] rows that are to be laid out, for what they or their groups are; None: all are as they were."""
        if groups is self._plan_groups and rows.numbers is self._numbers:
            return None
        self._reach(int(slots.max()) + 1)
        anew: npt.NDArray[np.bool_] = self._number[slots] != rows.numbers
        self._number[self._slots] = _NOBODY
        self._number[slots] = rows.numbers
        self._own = self._group(len(rows), groups)
        self._start = self._own * self._page_size
        self._tails = np.zeros(len(rows), np.int64)
        anew |= self._own_page[slots] != self._own
        self._own_page[slots] = self._own
        self._numbers, self._slots = rows.numbers, slots
        return anew

    def _group(self, rows: int, groups: list[PrefixGroup]) -> Int64:
        """[R] the first of each row's own pages: where the last of its groups ends."""
        own = np.zeros(rows, np.int64)
        if groups is not self._plan_groups:
            self._plan_groups = groups
            self._groups = [
                GroupPages(np.array(g.rows, np.int64), np.array(g.pages, np.int64), g.start_page * self._page_size)
                for g in groups
            ]
        for group, laid in zip(groups, self._groups, strict=True):
            own[laid.rows] = np.maximum(own[laid.rows], group.end_page)
        return own

    def _lay_out(self, slot: int, pages: list[int], used: int, own: int) -> None:
        self._widen(used - own)
        self._pages[slot, : used - own] = pages[own:used]
        self._pages[slot, used - own :] = 0
        self.laid_out += 1

    def _widen(self, width: int) -> None:
        more = width - self._pages.shape[1]
        if more > 0:
            self._pages = np.pad(self._pages, ((0, 0), (0, more + _SPARE)))

    def _reach(self, slots: int) -> None:
        more = slots - len(self._number)
        if more > 0:
            more = max(more, len(self._number))
            self._number = np.pad(self._number, (0, more), constant_values=_NOBODY)
            self._position = np.pad(self._position, (0, more))
            self._own_page = np.pad(self._own_page, (0, more))
            self._pages = np.pad(self._pages, ((0, more), (0, 0)))
