"""The min_new_tokens mask: ids that would stop a row cannot be drawn until its minimum is out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.engine.sequence import Sequence
from batchgen.kernels.ops import Ops

__all__ = ["HiddenStops", "hide_stops"]


@dataclass(frozen=True, slots=True)
class HiddenStops:
    """What a step's mask hid."""

    rows: Tensor
    """[m] int64"""
    ids: Tensor
    """[m] int64"""
    logits: Tensor
    """[m] float32, as they were"""

    def show(self, logits: Tensor, rows: list[int]) -> None:
        """Lift the mask from `rows`, in place."""
        lifted = torch.isin(self.rows, torch.tensor(rows, dtype=torch.int64, device=self.rows.device))
        logits.index_put_((self.rows[lifted], self.ids[lifted]), self.logits[lifted])


def hide_stops(logits: Tensor, rows: list[tuple[int, Sequence]], ops: Ops) -> HiddenStops | None:
    """Mask the stops of those rows that are short of their minimum, in place; None where none is.

    Args:
        logits: [R, V] float32.
        rows: rows with a minimum, and their places.
        ops: the kernels.
    """
    pairs = [(i, token) for i, row in rows if row.masks_stops for token in row.masked_ids]
    if not pairs:
        return None
    at = torch.tensor(pairs, dtype=torch.int64, device=logits.device)
    hidden = HiddenStops(at[:, 0], at[:, 1], logits[at[:, 0], at[:, 1]])
    ops.mask_tokens(logits, hidden.rows, hidden.ids)
    return hidden
