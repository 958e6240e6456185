"""Running batch: the sequences that decode, stored as numpy columns that persist between steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from batchgen.plan.cache_groups import StateSpan
from batchgen.plan.rows import DecodeRows

Int64 = npt.NDArray[np.int64]

_ID, _ROW, _POSITION, _LIMIT, _CAPACITY, _REQUEST, _NODE, _IN_PLACE, _SOURCE, _STATE = range(10)
_ROOM: Final = 64


class RunningRow(Protocol):
    """Fields of a sequence that `Running` uses."""

    id: int
    row: int
    position: int
    limit: int
    capacity: int
    request: int
    node_id: int
    in_place: bool
    pages: list[int]

    @property
    def state(self) -> StateSpan | None:
        """The state that its next decode row reads and writes; None: the model has none."""


Row = TypeVar("Row", bound=RunningRow)


class Running(Generic[Row]):
    """Sequences that decode, in tree order. Planning a step runs no Python code per row.

    A row's current position is in the column; its `position` attribute is updated when the row is removed.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._pages: list[list[int]] = []
        self._columns = np.empty((10, _ROOM), np.int64)
        self._sequence_ids: Int64 | None = None
        self._tables: list[list[int]] = []
        self.has_states = False
        """Whether rows have states."""

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __getitem__(self, place: int) -> Row:
        return self._rows[place]

    @property
    def tree_rows(self) -> Int64:
        """[R] index of each row's request in the tree's order, ascending."""
        return self._columns[_ROW, : len(self._rows)]

    @property
    def positions(self) -> Int64:
        """[R] position that each row feeds next."""
        return self._columns[_POSITION, : len(self._rows)]

    @property
    def sequence_ids(self) -> Int64:
        """[R] sequence id of each row."""
        return self._columns[_ID, : len(self._rows)]

    @property
    def capacities(self) -> Int64:
        """[R] number of positions that each row's pages hold."""
        return self._columns[_CAPACITY, : len(self._rows)]

    @property
    def requests(self) -> Int64:
        """[R] request of each row."""
        return self._columns[_REQUEST, : len(self._rows)]

    @property
    def nodes(self) -> Int64:
        """[R] node at whose end each row's prompt ends."""
        return self._columns[_NODE, : len(self._rows)]

    @property
    def in_place(self) -> Int64:
        """[R] 1 for rows that continue in their node's tail, else 0."""
        return self._columns[_IN_PLACE, : len(self._rows)]

    def add(self, row: Row) -> None:
        """Add a row."""
        count = len(self._rows)
        if count == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
        at = bisect_left(self._rows, (row.row, row.id), key=_tree_order)
        self._columns[:, at + 1 : count + 1] = self._columns[:, at:count]
        self._columns[:, at] = (
            row.id,
            row.row,
            row.position,
            row.limit,
            row.capacity,
            row.request,
            row.node_id,
            row.in_place,
            *(state[1:] if (state := row.state) is not None else (0, 0)),
        )
        self.has_states = state is not None
        self._rows.insert(at, row)
        self._pages.insert(at, row.pages)
        self._sequence_ids = None

    def remove(self, rows: Collection[Row]) -> None:
        """Remove rows."""
        if not rows:
            return
        places = sorted(self.index_of(row) for row in rows)
        kept = np.ones(len(self._rows), np.bool_)
        kept[places] = False
        for place in reversed(places):
            self._rows.pop(place).position = int(self._columns[_POSITION, place])
            del self._pages[place]
        self._columns[:, : len(self._rows)] = self._columns[:, : len(kept)][:, kept]
        self._sequence_ids = None

    def at_capacity(self) -> list[int]:
        """Indices of the rows that need another page for their position."""
        columns = self._columns[:, : len(self._rows)]
        places: list[int] = (columns[_POSITION] == columns[_CAPACITY]).nonzero()[0].tolist()
        return places

    def index_of(self, row: Row) -> int:
        """Index of a row."""
        return bisect_left(self._rows, (row.row, row.id), key=_tree_order)

    def grow(self, places: Seq[int], pages: Seq[int], page_size: int) -> None:
        """Append one page to each of the rows at `places`."""
        for place, page in zip(places, pages, strict=True):
            row = self._rows[place]
            row.pages.append(page)
            row.capacity += page_size
        self._columns[_CAPACITY, places] += page_size

    def advance(self) -> list[Row]:
        """Advance all rows by one position; returns those that have reached their limit."""
        columns = self._columns[:, : len(self._rows)]
        columns[_POSITION] += 1
        if self.has_states:
            columns[_SOURCE] = columns[_STATE]
        return [self._rows[i] for i in (columns[_POSITION] == columns[_LIMIT]).nonzero()[0].tolist()]

    def decode_rows(self) -> DecodeRows:
        """Snapshot of the rows for a plan."""
        columns = self._columns[:, : len(self._rows)]
        if self._sequence_ids is None:
            self._sequence_ids, self._tables = columns[_ID].copy(), self._pages.copy()
        states = columns[[_SOURCE, _STATE]] if self.has_states else None
        return DecodeRows(self._sequence_ids, columns[_POSITION].copy(), self._tables, states)


def _tree_order(row: RunningRow) -> tuple[int, int]:
    return (row.row, row.id)
