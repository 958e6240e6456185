"""`RowTable`: running samples as columns, so that a step reads and writes all of them at once.

A sample has a slot from its beginning to its end. A *plain* one needs nothing of the host token by token: its tokens go
into the table, whether they end it is found for all rows together, and its `Sequence` hears of them when it ends. The
others, who follow their text or a grammar, hear of each.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batchgen.engine.sequence import Sequence

__all__ = ["RowTable", "Rows"]

Int64 = npt.NDArray[np.int64]

_NOBODY: Final = -1
_SLOTS: Final = 64
_WIDTH: Final = 64
"""Tokens of a row that there is room for at first."""
_STOPS: Final = 16
"""Most ids that may end a plain row."""
_HOTTEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Rows:
    """R running samples, in an order."""

    table: RowTable
    numbers: Int64
    """[R] sequences"""
    slots: Int64
    """[R] where they stand, or stood when this was made: other sequences may have come there since"""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Sequence:
        sequence = self.table.sequences[int(self.slots[place])]
        assert sequence is not None
        return sequence

    def drew(self) -> None:
        """A token of each is on its way."""
        self.table.drawn[self.slots] += 1


@dataclass(frozen=True, slots=True)
class _Known:
    """R plain rows that had not ended at some version of the table, with what ends them."""

    rows: Rows
    version: int
    limit: Int64
    """[R]"""
    stops: Int64
    """[R, K]"""


class RowTable:
    """All samples of a job that have begun and not left. Columns are indexed by slot."""

    def __init__(self) -> None:
        self.sequences: list[Sequence | None] = [None] * _SLOTS
        self.number = np.full(_SLOTS, _NOBODY, np.int64)
        """-1: nobody's, or that of a sample which has ended"""
        self.request = np.zeros(_SLOTS, np.int64)
        self.drawn = np.zeros(_SLOTS, np.int64)
        """Tokens drawn, those included that the host has not heard of yet."""
        self.last = np.zeros(_SLOTS, np.int64)
        """The last token that the host has heard of."""
        self.temperature, self.top_p, self.min_p = np.zeros((3, _SLOTS), np.float32)
        self.top_k, self.seed, self.sample = np.zeros((3, _SLOTS), np.int64)
        self.special = np.zeros(_SLOTS, np.bool_)
        """Rows whose draws take more than the parameters above."""
        self.logprobs = np.zeros(_SLOTS, np.bool_)
        """Rows whose tokens' logprobs are computed."""
        self.top_logprobs, self.num_named = np.zeros((2, _SLOTS), np.int64)
        """How many of the likeliest tokens such a row wants, and how many ids it names."""
        self.named = np.zeros((_SLOTS, 0), np.int64)
        """These ids; beyond them anything in the vocabulary."""
        self._plain = np.zeros(_SLOTS, np.bool_)
        self._length = np.zeros(_SLOTS, np.int64)
        self._limit = np.zeros(_SLOTS, np.int64)
        self._tokens = np.zeros((_SLOTS, _WIDTH), np.int32)
        """Of plain rows."""
        self._stops = np.full((_SLOTS, 1), _NOBODY, np.int64)
        """Ids that end a plain row."""
        self._slot_of = np.zeros(_SLOTS, np.int64)
        self._free = list(range(_SLOTS - 1, -1, -1))
        self._rows = Rows(self, self.number[:0], self.number[:0])
        self._version = 0
        """Grows where a sample ends."""
        self._known: _Known | None = None

    def begin(self, number: int, sequence: Sequence, *, plain: bool) -> None:
        """A sample begins. `plain`: nobody but its `Sequence` wants to hear of its tokens one by one."""
        if not self._free:
            self._add_slots()
        while number >= len(self._slot_of):
            self._slot_of = np.concatenate([self._slot_of, np.zeros_like(self._slot_of)])
        slot = self._slot_of[number] = self._free.pop()
        sequence.place(self.drawn_by, slot)
        request, params = sequence.request, sequence.request.params
        stops = sequence.stops.stopping
        plain = plain and sequence.plain and len(stops) <= _STOPS
        self.sequences[slot] = sequence
        self.number[slot], self.request[slot] = number, request.index
        self.drawn[slot] = self.last[slot] = self._length[slot] = 0
        # Infinite as a float32 it would make a masked token's score (-inf / inf) no number, and all others equal.
        self.temperature[slot] = min(params.temperature, _HOTTEST)
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self.top_k[slot], self.seed[slot], self.sample[slot] = params.top_k, request.seed, sequence.sample_index
        self.special[slot], self._plain[slot] = sequence.special, plain
        self._limit[slot] = request.max_new_tokens
        self.logprobs[slot] = params.needs_logprobs
        self.top_logprobs[slot], self.num_named[slot] = params.top_logprobs_num, len(params.token_ids_logprob)
        if params.token_ids_logprob:
            more = max(0, len(params.token_ids_logprob) - self.named.shape[1])
            self.named = np.pad(self.named, ((0, 0), (0, more)))
            self.named[slot, : len(params.token_ids_logprob)] = params.token_ids_logprob
        if plain:
            if len(stops) > self._stops.shape[1]:
                more = len(stops) - self._stops.shape[1]
                self._stops = np.pad(self._stops, ((0, 0), (0, more)), constant_values=_NOBODY)
            self._stops[slot] = _NOBODY
            self._stops[slot, : len(stops)] = list(stops)

    def leave(self, number: int) -> None:
        """A sample is gone; its slot is the next one's."""
        slot = int(self._slot_of[number])
        self.number[slot] = _NOBODY
        self.sequences[slot] = None
        self._version += 1
        self._free.append(slot)

    def drawn_by(self, slot: int) -> int:
        """Tokens drawn by the sample at a slot."""
        return int(self.drawn[slot])

    def slot(self, number: int) -> int:
        """Where a sequence stands that has begun and not left."""
        return int(self._slot_of[number])

    def slots(self, numbers: Int64) -> Int64:
        """[R] the slots of sequences that have begun and not left."""
        found: Int64 = self._slot_of[numbers]
        return found

    def rows(self, numbers: Int64) -> Rows:
        """Sequences that have begun and not left; the same object for the same array."""
        if self._rows.numbers is not numbers:
            self._rows = Rows(self, numbers, self.slots(numbers))
        return self._rows

    def output_ids(self, number: int) -> npt.NDArray[Any]:
        """[C] the tokens of a sample that the host has heard of."""
        slot = int(self._slot_of[number])
        if self._plain[slot]:
            return self._tokens[slot, : self._length[slot]]
        sequence = self.sequences[slot]
        assert sequence is not None
        return np.asarray(sequence.output_ids, np.int64)

    def take(self, rows: Rows, tokens: Int64, apart: Collection[int]) -> tuple[list[int], int]:
        """Take a step's tokens.

        Args:
            rows: [R] for which they were drawn, some of which may have ended since.
            tokens: [R]
            apart: places whose tokens mean nothing; they come to an end otherwise.

        Returns:
            Places, in order, whose sequences are to be told: those of plain rows that end by this token (and have got
            the ones before it by now), of all other rows, and those of `apart`. And how many rows had ended already.
        """
        known, slots = self._known, rows.slots
        if known is not None and known.rows is rows and known.version == self._version and not apart:
            self.last[slots] = tokens
            return self._write(slots, tokens, known.limit, known.stops).tolist(), 0
        live = self.number[slots] == rows.numbers
        mine = live & self._plain[slots]
        if apart:
            mine[list(apart)] = False
        if mine.all():
            self._known = _Known(rows, self._version, self._limit[slots], self._stops[slots])
            return self.take(rows, tokens, ())
        heard, places = live.nonzero()[0], mine.nonzero()[0]
        self.last[slots[heard]] = tokens[heard]
        slots = slots[places]
        ends = self._write(slots, tokens[places], self._limit[slots], self._stops[slots])
        told = live & ~mine
        told[places[ends]] = True
        return told.nonzero()[0].tolist(), len(live) - len(heard)

    def _write(self, slots: Int64, tokens: Int64, limit: Int64, stops: Int64) -> Int64:
        """Keep the tokens [m] of plain rows, at `slots`; which of these rows they end, whose sequences get the others.

        `limit` [m] and `stops` [m, K] are the rows' own.
        """
        if not len(slots):
            return slots
        length = self._length[slots]
        self._widen(int(length.max()) + 1)
        self._tokens[slots, length] = tokens
        length += 1
        self._length[slots] = length
        ends: Int64 = ((length >= limit) | (stops == tokens[:, None]).any(axis=1)).nonzero()[0]
        for slot in slots[ends].tolist():
            sequence = self.sequences[slot]
            assert sequence is not None
            sequence.output_ids.extend(self._tokens[slot, : self._length[slot] - 1].tolist())
        return ends

    def close(self, number: int) -> None:
        """A sample has ended: what is still drawn for it is nobody's."""
        self.number[self._slot_of[number]] = _NOBODY
        self._version += 1

    def _widen(self, width: int) -> None:
        have = self._tokens.shape[1]
        if width > have:
            wider = np.zeros((len(self._tokens), max(width, 2 * have)), np.int32)  # untouched rows take no memory
            wider[:, :have] = self._tokens
            self._tokens = wider

    def _add_slots(self) -> None:
        count = len(self.sequences)
        self._free = list(range(2 * count - 1, count - 1, -1))
        self.sequences += [None] * count
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray) and name != "_slot_of":
                setattr(self, name, np.concatenate([values, np.zeros_like(values)]))
        self.number[count:] = _NOBODY
