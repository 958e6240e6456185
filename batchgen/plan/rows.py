"""Decode rows and sample rows of a step, stored as numpy columns.

The columns of a plan never change. Consecutive plans share the `sequence_ids` array object until a row is added or
removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Feed the last token of `sequence`, at `position`, and attend to positions 0..position."""

    sequence: int
    position: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Sample the next token of `sequence` from the logits of flat token `token` of the step.

    Flat tokens are the positions of the prefill chunks in order, then the decode rows.
    """

    sequence: int
    token: int


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows(Sequence[DecodeRow]):
    """Decode rows of a step, in order."""

    sequence_ids: Int64
    """[R] sequence ids."""
    positions: Int64
    """[R] position of each row's token."""
    pages: list[list[int]]
    """[R] page tables, owned by the scheduler: read-only."""
    states: Int64 | None = None
    """[2, R] slots of the state that each row reads, and of the one that it writes; None: the model has no states."""

    @staticmethod
    def of(rows: Iterable[DecodeRow]) -> DecodeRows:
        """Convert rows to columns."""
        rows = list(rows)
        ids = np.array([row.sequence for row in rows], np.int64)
        return DecodeRows(ids, np.array([row.position for row in rows], np.int64), [row.pages for row in rows])

    def __len__(self) -> int:
        return len(self.pages)

    @overload
    def __getitem__(self, index: int) -> DecodeRow: ...

    @overload
    def __getitem__(self, index: slice) -> DecodeRows: ...

    def __getitem__(self, index: int | slice) -> DecodeRow | DecodeRows:
        if isinstance(index, slice):
            states = None if self.states is None else self.states[:, index]
            return DecodeRows(self.sequence_ids[index], self.positions[index], self.pages[index], states)
        return DecodeRow(int(self.sequence_ids[index]), int(self.positions[index]), self.pages[index])

    def __iter__(self) -> Iterator[DecodeRow]:
        return map(DecodeRow, self.sequence_ids.tolist(), self.positions.tolist(), self.pages)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows(Sequence[SampleRow]):
    """Sample rows of a step, in order; each sequence occurs at most once."""

    sequence_ids: Int64
    """[R] sequence ids."""
    tokens: Int64
    """[R] flat tokens to sample from."""

    @staticmethod
    def of(rows: Iterable[SampleRow]) -> SampleRows:
        """Convert rows to columns."""
        pairs = np.array([(row.sequence, row.token) for row in rows], np.int64).reshape(-1, 2)
        return SampleRows(pairs[:, 0], pairs[:, 1])

    def __len__(self) -> int:
        return len(self.sequence_ids)

    @overload
    def __getitem__(self, index: int) -> SampleRow: ...

    @overload
    def __getitem__(self, index: slice) -> SampleRows: ...

    def __getitem__(self, index: int | slice) -> SampleRow | SampleRows:
        if isinstance(index, slice):
            return SampleRows(self.sequence_ids[index], self.tokens[index])
        return SampleRow(int(self.sequence_ids[index]), int(self.tokens[index]))

    def __iter__(self) -> Iterator[SampleRow]:
        return map(SampleRow, self.sequence_ids.tolist(), self.tokens.tolist())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]
