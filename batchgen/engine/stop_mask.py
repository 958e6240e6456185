"""The min_new_tokens mask: ids that would stop a row cannot be drawn until its minimum is out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.sequence import Sequence
from batchgen.kernels.device import Device

__all__ = ["Hidden", "StopMask"]


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a step's mask hid, so that it can give way."""

    rows: Tensor
    """[m] int64"""
    ids: Tensor
    """[m] int64"""
    logits: Tensor
    """[m] as they were"""

    def lift(self, logits: Tensor, empty: Tensor) -> None:
        """Take the mask from the rows of `logits` [R, V] that are `empty` [R] bool, in place."""
        masked = logits[self.rows, self.ids]
        logits.index_put_((self.rows, self.ids), torch.where(empty[self.rows], self.logits, masked))


class StopMask:
    """The masks of one set of rows, step after step: how long each lasts is on the device, with the rows' lengths."""

    def __init__(self, short: list[Sequence], rows: Tensor, ids: Tensor, until: Tensor) -> None:
        self._short = short
        self._rows = rows
        self._ids = ids
        self._until = until

    @staticmethod
    def of(rows: list[tuple[int, Sequence]], device: Device) -> StopMask | None:
        """The mask of those rows that are short of their minimum; None where none is.

        Args:
            rows: rows with a minimum, and their places.
            device: where the pairs of row and id go, in one transfer.
        """
        short = [(place, row) for place, row in rows if row.masks_stops]
        if not short:
            return None
        counts = [len(row.masked_ids) for _, row in short]
        places = np.array([place for place, _ in short], np.int64).repeat(counts)
        until = np.array([row.request.params.min_new_tokens for _, row in short], np.int64).repeat(counts)
        ids = np.array([token for _, row in short for token in row.masked_ids], np.int64)
        return StopMask([row for _, row in short], *device.upload(places, ids, until))

    def hide(self, logits: Tensor, positions: Tensor) -> Hidden | None:
        """Mask the stops of the rows that are short of their minimum, in place; None once none is.

        Args:
            logits: [R, V].
            positions: [R] int64 tokens that each row has drawn, which may be more than the host has seen.
        """
        if self._short and not self._short[-1].masks_stops:
            self._short = [row for row in self._short if row.masks_stops]
        if not self._short:
            return None
        found = Hidden(self._rows, self._ids, logits[self._rows, self._ids])
        masked = found.logits.masked_fill(positions[self._rows] < self._until, -torch.inf)
        logits.index_put_((self._rows, self._ids), masked)
        return found
