"""The k largest of each row, ties by lowest id: what `torch.topk` does not promise."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["largest"]

_FEWEST = 32
"""Spare candidates for ties: k + max(k, this) are looked at before a whole row is sorted."""


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the k largest entries of each row.

    Args:
        logits: [R, V], without not-a-numbers (rows that hold one give some ids in range).
        k: 1 to V.

    Returns:
        [R, k] values in falling order, ties by rising id, and [R, k] int64 ids.
    """
    vocab = logits.shape[1]
    looked_at = k + max(k, _FEWEST)
    if 2 * looked_at >= vocab:
        return _by_sorting(logits, k)
    values, ids = logits.topk(looked_at, dim=-1, sorted=False)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    # If the last one looked at is as large as the k-th, equals of the k-th may have been left out.
    unsure = (values[:, -1] >= values[:, k - 1]).nonzero().flatten()
    values, ids = values[:, :k], ids[:, :k]
    if unsure.numel():
        values[unsure], ids[unsure] = _by_sorting(logits[unsure], k)
    return values, ids


def _by_sorting(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]
