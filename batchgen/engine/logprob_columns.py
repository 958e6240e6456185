"""`LogprobColumns`: what running samples have learned of their tokens' logprobs, as columns.

A step's values go to all samples together; a sample gets its own as lists when it leaves. They stand in blocks of
tokens that samples take one after another, so that memory follows the tokens there are, not the longest sample.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batchgen.engine.readout import StepLogprobs
from batchgen.engine.row_table import Rows
from batchgen.engine.sequence import SampleLogprobs, Sequence

__all__ = ["LogprobColumns"]

Int64 = npt.NDArray[np.int64]
Column = npt.NDArray[Any]

_BLOCK: Final = 64
"""Tokens of a block."""


class LogprobColumns:
    """Samples are named by their slots in the `RowTable`, from their first token to `leave`."""

    def __init__(self) -> None:
        self._length: Int64 = np.zeros(1, np.int64)
        """By slot: tokens."""
        self._blocks: Int64 = np.zeros((1, 1), np.int64)
        """[slots, n] in order; as many count as the length needs."""
        self._free: list[int] = []
        self._drawn: Column = np.zeros(0, np.float32)
        """[blocks * _BLOCK], as the others."""
        self._top_ids: Column = np.zeros((0, 0), np.int32)
        self._top: Column = np.zeros((0, 0), np.float32)
        self._asked: Column = np.zeros((0, 0), np.float32)

    def take(self, rows: Rows, found: StepLogprobs) -> None:
        """Take a step's; what was drawn for samples that have ended is nobody's."""
        slots = rows.slots[found.places]
        live = rows.table.number[slots] == rows.numbers[found.places]
        if not live.all():
            slots, found = slots[live], found.of(live)
        if not len(slots):
            return
        self._widen(int(slots.max()) + 1, found)
        length = self._length[slots]
        inside = length % _BLOCK
        begins = inside == 0
        if begins.any():
            self._grant(slots[begins], length[begins] // _BLOCK)
        at = self._blocks[slots, length // _BLOCK] * _BLOCK + inside
        self._drawn[at] = found.drawn
        if found.top.shape[1]:
            self._top_ids[at, : found.top.shape[1]] = found.top_ids
            self._top[at, : found.top.shape[1]] = found.top
        if found.asked.shape[1]:
            self._asked[at, : found.asked.shape[1]] = found.asked
        self._length[slots] = length + 1

    def last(self, slot: int) -> float:
        """The logprob of the latest token of a sample, which has one."""
        place = int(self._length[slot]) - 1
        return float(self._drawn[self._blocks[slot, place // _BLOCK] * _BLOCK + place % _BLOCK])

    def leave(self, slot: int, sequence: Sequence) -> None:
        """A sample leaves with what was read of its tokens; what was drawn after them is dropped."""
        if slot >= len(self._length) or not self._length[slot]:
            return
        params, length = sequence.request.params, int(self._length[slot])
        blocks = self._blocks[slot, : -(-length // _BLOCK)]
        at = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()[: len(sequence.output_ids)]
        sequence.take_logprobs(
            SampleLogprobs(
                self._drawn[at].tolist(),
                self._top_ids[at, : params.top_logprobs_num].ravel().tolist(),
                self._top[at, : params.top_logprobs_num].ravel().tolist(),
                self._asked[at, : len(params.token_ids_logprob)].ravel().tolist(),
            )
        )
        self._free += blocks.tolist()
        self._length[slot] = 0

    def _grant(self, slots: Int64, places: Int64) -> None:
        """A block more for each of some samples, as their number `places` [m]."""
        if len(self._free) < len(slots):
            have = len(self._drawn) // _BLOCK
            more = max(have, len(slots), 1)
            self._free += range(have + more - 1, have - 1, -1)
            for name in ("_drawn", "_top_ids", "_top", "_asked"):
                column = getattr(self, name)
                setattr(self, name, _grown(column, (have + more) * _BLOCK, *column.shape[1:]))
        if int(places.max()) >= self._blocks.shape[1]:
            self._blocks = _grown(self._blocks, len(self._blocks), 2 * int(places.max()))
        self._blocks[slots, places] = self._free[-len(slots) :]
        del self._free[-len(slots) :]

    def _widen(self, slots: int, found: StepLogprobs) -> None:
        """Room for so many slots, and for the widest of a step."""
        if slots > len(self._length):
            self._length = _grown(self._length, 2 * slots)
            self._blocks = _grown(self._blocks, 2 * slots, self._blocks.shape[1])
        if found.top.shape[1] > self._top.shape[1]:
            size = (len(self._drawn), found.top.shape[1])
            self._top_ids, self._top = _grown(self._top_ids, *size), _grown(self._top, *size)
        if found.asked.shape[1] > self._asked.shape[1]:
            self._asked = _grown(self._asked, len(self._drawn), found.asked.shape[1])


def _grown(array: Column, *shape: int) -> Column:
    """The array in the corner of a larger one of zeros."""
    larger = np.zeros(shape, array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger
