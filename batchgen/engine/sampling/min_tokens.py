"""The `min_new_tokens` mask: stop ids cannot be sampled until a row has its minimum number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.sequence import Sequence
from batchgen.kernels.device import Device

__all__ = ["MaskedLogits", "MinTokensMask"]


@dataclass(frozen=True, slots=True)
class MaskedLogits:
    """The logits that a mask has overwritten, so that it can be undone."""

    rows: Tensor
    """[m] int64 masked rows"""
    ids: Tensor
    """[m] int64 masked ids"""
    logits: Tensor
    """[m] original logits"""

    def undo(self, logits: Tensor, empty: Tensor) -> None:
        """Restore the original logits in the rows of `logits` [R, V] where `empty` [R] is true, in place."""
        masked = logits[self.rows, self.ids]
        logits.index_put_((self.rows, self.ids), torch.where(empty[self.rows], self.logits, masked))


class MinTokensMask:
    """The `min_new_tokens` masks of a fixed set of rows; the device compares lengths with the minimums."""

    def __init__(self, below_minimum: list[Sequence], rows: Tensor, ids: Tensor, until: Tensor) -> None:
        self._below_minimum = below_minimum
        self._rows = rows
        self._ids = ids
        self._until = until

    @staticmethod
    def of(rows: list[tuple[int, Sequence]], device: Device) -> MinTokensMask | None:
        """The mask of the rows that are below their minimum; None if there are none.

        Args:
            rows: row numbers and sequences with a minimum.
            device: receives the (row, id) pairs in one transfer.
        """
        below_minimum = [(place, row) for place, row in rows if row.below_min_tokens]
        if not below_minimum:
            return None
        counts = [len(row.masked_ids) for _, row in below_minimum]
        places = np.array([place for place, _ in below_minimum], np.int64).repeat(counts)
        until = np.array([row.request.params.min_new_tokens for _, row in below_minimum], np.int64).repeat(counts)
        ids = np.array([token for _, row in below_minimum for token in row.masked_ids], np.int64)
        return MinTokensMask([row for _, row in below_minimum], *device.upload(places, ids, until))

    def apply(self, logits: Tensor, positions: Tensor) -> MaskedLogits | None:
        """Mask the stop ids of rows that are below their minimum, in place; returns None once there are none.

        Args:
            logits: [R, V].
            positions: [R] int64 tokens sampled for each row, including those that are not on the host yet.
        """
        if self._below_minimum and not self._below_minimum[-1].below_min_tokens:
            self._below_minimum = [row for row in self._below_minimum if row.below_min_tokens]
        if not self._below_minimum:
            return None
        found = MaskedLogits(self._rows, self._ids, logits[self._rows, self._ids])
        masked = found.logits.masked_fill(positions[self._rows] < self._until, -torch.inf)
        logits.index_put_((self._rows, self._ids), masked)
        return found
