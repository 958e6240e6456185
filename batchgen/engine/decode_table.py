"""`DecodeTable`: where a step's decode rows stand. Laid out when rows join or leave, advanced by one in between."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchgen.kernels.types import AttentionBatch, GroupPages
from batchgen.plan.types import DecodeRow, PrefixGroup

__all__ = ["DecodeTable"]

Int64 = npt.NDArray[np.int64]

_SPARE: int = 8
"""Pages of room beyond the longest row's, so that the table is seldom made wider."""


class DecodeTable:
    """Positions and page tables of the decode rows of consecutive steps.

    While the same rows decode, a step costs a page number for each row that begins a page, and nothing per row beside.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._numbers: list[int] = []
        self._plan_groups: list[PrefixGroup] | None = None
        self._groups: list[GroupPages] = []
        self._positions = np.zeros(0, np.int64)  # [R]
        self._own_page = np.zeros(0, np.int64)  # [R] the first of each row's own pages
        self._pages = np.zeros((0, 0), np.int64)  # [R, W]
        self._tails = np.zeros(0, np.int64)  # [R] the page of each row's position

    def fill(self, attention: AttentionBatch, rows: list[DecodeRow], groups: list[PrefixGroup]) -> tuple[Int64, Int64]:
        """Write the rows' part of a step's attention.

        Args:
            attention: the step's, without its decode rows.
            rows: [R > 0] the step's decode rows.
            groups: over them; the plan's own list, which is the same object while no row joins or leaves.

        Returns:
            positions [R] that are fed, and the slots [R] that their keys and values go to.
        """
        numbers = [row.sequence for row in rows]
        if groups is not self._plan_groups or numbers != self._numbers or not self._advance(rows):
            self._lay_out(rows, groups)
            self._numbers, self._plan_groups = numbers, groups
        size = self._page_size
        start = self._own_page * size
        lens = self._positions + 1 - start
        attention.groups = self._groups
        attention.decode_pages = self._pages[:, : -(-int(lens.max()) // size)].copy()
        attention.decode_lens = lens
        attention.decode_own_start = start
        attention.max_decode_len = int(lens.max())
        return self._positions.copy(), self._tails * size + self._positions % size

    def _advance(self, rows: list[DecodeRow]) -> bool:
        """Each row stands one further than in the step before; False where that is not so."""
        if rows[0].position != self._positions[0] + 1 or rows[-1].position != self._positions[-1] + 1:
            return False
        self._positions += 1
        begun = np.flatnonzero(self._positions % self._page_size == 0)
        if len(begun):
            page = self._positions[begun] // self._page_size
            place = page - self._own_page[begun]
            self._widen(int(place.max()) + 1)
            self._tails[begun] = [rows[i].pages[p] for i, p in zip(begun.tolist(), page.tolist(), strict=True)]
            self._pages[begun, place] = self._tails[begun]
        return True

    def _widen(self, width: int) -> None:
        more = width - self._pages.shape[1]
        if more > 0:
            self._pages = np.pad(self._pages, ((0, 0), (0, more + _SPARE)))

    def _lay_out(self, rows: list[DecodeRow], groups: list[PrefixGroup]) -> None:
        """Each row's own pages begin where the last of its groups ends."""
        size = self._page_size
        own_page = [0] * len(rows)
        for group in groups:
            for i in group.rows:
                own_page[i] = max(own_page[i], group.end_page)
        used = [row.position // size + 1 for row in rows]
        self._pages = np.zeros((len(rows), max(u - o for u, o in zip(used, own_page, strict=True)) + _SPARE), np.int64)
        for i, row in enumerate(rows):
            self._pages[i, : used[i] - own_page[i]] = row.pages[own_page[i] : used[i]]
        self._positions = np.array([row.position for row in rows], np.int64)
        self._own_page = np.array(own_page, np.int64)
        self._tails = self._pages[np.arange(len(rows)), self._positions // size - self._own_page]
        self._groups = [
            GroupPages(np.array(g.rows, np.int64), np.array(g.pages, np.int64), g.start_page * size) for g in groups
        ]
