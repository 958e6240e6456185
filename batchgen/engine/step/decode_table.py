"""`DecodeTable`: positions and page tables of decode rows, updated incrementally from step to step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchgen.kernels.types import AttentionBatch, GroupPages
from batchgen.plan.step_plan import DecodeRows, PrefixGroup

Int64 = npt.NDArray[np.int64]

_SPARE: int = 8
"""Spare pages beyond the longest row's, so that the table seldom grows."""
_EMPTY: int = -1


class DecodeTable:
    """Positions and page tables of the decode rows of consecutive steps, by slot.

    Only rows that join, that start a page or whose prefix groups change cost Python time in a step.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        """Tokens per page."""
        self._sequence_ids = np.zeros(0, np.int64)  # [R] sequences of the last step
        self._slots = np.zeros(0, np.int64)  # [R]
        self._first_own = np.zeros(0, np.int64)  # [R] first own page of each row
        self._own_start = np.zeros(0, np.int64)  # [R] first position of the own pages
        self._own_lens = np.zeros(0, np.int64)  # [R] number of positions in own pages
        self._tail_pages = np.zeros(0, np.int64)  # [R] page of each row's last position
        self._first_position = self._last_position = -2  # of the first and the last row
        self._named_pages: Int64 | None = None
        self._plan_groups: list[PrefixGroup] | None = None
        self._groups: list[GroupPages] = []
        self._sequence_id = np.zeros(0, np.int64)  # [slots] sequence whose pages are laid out; -1: none
        self._position = np.zeros(0, np.int64)  # [slots] position in the last step
        self._own_page = np.zeros(0, np.int64)  # [slots] first own page
        self._pages = np.zeros((0, 1), np.int64)  # [slots, W] own pages

    def fill(
        self,
        attention: AttentionBatch,
        rows: DecodeRows,
        groups: list[PrefixGroup],
        slots: Int64,
        group_pages: Int64 | None = None,
    ) -> tuple[Int64, Int64]:
        """Write decode rows [R > 0] into a step's attention batch; returns their positions and slot mapping, both [R].

        `groups`: over the rows; the plan reuses the list object while no row joins or leaves. `slots`: [R] slot of each
        row, the same in all steps and not shared. `group_pages`: as in `StepPlan`, of this table's group; pages behind
        a row's window stay in the table as they were: nothing reads them.
        """
        size, positions = self.page_size, rows.positions
        self._named_pages = group_pages
        stale = self._stale_rows(rows, groups, slots)
        opens_page = positions % size == 0
        advances = (
            stale is None and positions[0] == self._first_position + 1 and positions[-1] == self._last_position + 1
        )
        if advances:
            self._own_lens = self._own_lens + 1  # a new array: the last step may still use the old one
        else:
            shift = positions - self._position[slots]
            moved = (shift != 1) & (shift != 0)  # a step that has failed is run again
            stale = moved if stale is None else moved | stale
            for i in stale.nonzero()[0].tolist():
                self._lay_out_row(int(slots[i]), rows.pages[i], int(positions[i]) // size + 1, int(self._first_own[i]))
            self._own_lens = positions + 1 - self._own_start
            opens_page &= ~stale
        self._first_position, self._last_position = positions[0], positions[-1]
        opening = opens_page.nonzero()[0]
        if len(opening):
            page = positions[opening] // size
            place = page - self._first_own[opening]
            self._reserve_pages(int(place.max()) + 1)
            new = self._named([rows.pages[i][p] for i, p in zip(opening.tolist(), page.tolist(), strict=True)])
            self._pages[slots[opening], place] = new
            self._tail_pages[opening] = new
        if not advances:
            self._tail_pages = self._pages[slots, positions // size - self._first_own]
        self._position[slots] = positions
        longest = int(self._own_lens.max())
        attention.groups = self._groups
        attention.decode_pages = self._pages[slots, : -(-longest // size)]
        attention.decode_lens = self._own_lens
        attention.decode_own_start = self._own_start
        attention.max_decode_len = longest
        return positions, self._tail_pages * size + positions % size

    def clear(self) -> None:
        """Forget all rows, after a step without decode rows."""
        self._sequence_id[self._slots] = _EMPTY
        self._sequence_ids = self._slots = np.zeros(0, np.int64)

    def _stale_rows(self, rows: DecodeRows, groups: list[PrefixGroup], slots: Int64) -> npt.NDArray[np.bool_] | None:
        """[R] rows that must be laid out, because they or their groups changed; None: no change."""
        if groups is self._plan_groups and rows.sequence_ids is self._sequence_ids:
            return None
        self._reserve_slots(int(slots.max()) + 1)
        stale: npt.NDArray[np.bool_] = self._sequence_id[slots] != rows.sequence_ids
        self._sequence_id[self._slots] = _EMPTY
        self._sequence_id[slots] = rows.sequence_ids
        self._first_own = self._first_own_pages(len(rows), groups)
        self._own_start = self._first_own * self.page_size
        self._tail_pages = np.zeros(len(rows), np.int64)
        stale |= self._own_page[slots] != self._first_own
        self._own_page[slots] = self._first_own
        self._sequence_ids, self._slots = rows.sequence_ids, slots
        return stale

    def _first_own_pages(self, rows: int, groups: list[PrefixGroup]) -> Int64:
        """[R] first own page of each row, which is where its last prefix group ends."""
        own = np.zeros(rows, np.int64)
        if groups is not self._plan_groups:
            self._plan_groups = groups
            self._groups = [
                GroupPages(np.array(g.rows, np.int64), self._named(g.pages), g.start_page * self.page_size)
                for g in groups
            ]
        for group, laid in zip(groups, self._groups, strict=True):
            own[laid.rows] = np.maximum(own[laid.rows], group.end_page)
        return own

    def _lay_out_row(self, slot: int, pages: list[int], used: int, own: int) -> None:
        self._reserve_pages(used - own)
        self._pages[slot, : used - own] = self._named(pages[own:used])
        self._pages[slot, used - own :] = 0

    def _named(self, pages: list[int]) -> Int64:
        """The pages of this table's group, by pages of a plan."""
        named = np.array(pages, np.int64)
        return named if self._named_pages is None else self._named_pages[named]

    def _reserve_pages(self, width: int) -> None:
        more = width - self._pages.shape[1]
        if more > 0:
            self._pages = np.pad(self._pages, ((0, 0), (0, more + _SPARE)))

    def _reserve_slots(self, slots: int) -> None:
        more = slots - len(self._sequence_id)
        if more > 0:
            more = max(more, len(self._sequence_id))
            self._sequence_id = np.pad(self._sequence_id, (0, more), constant_values=_EMPTY)
            self._position = np.pad(self._position, (0, more))
            self._own_page = np.pad(self._own_page, (0, more))
            self._pages = np.pad(self._pages, ((0, more), (0, 0)))
