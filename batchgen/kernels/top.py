"""Top-k of each row with ties by lowest id, which `torch.topk` does not guarantee."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_SPARE = 32
"""Least spare candidates for ties: k + max(k, this) candidates are examined before a whole row is sorted."""


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the k largest entries of each row.

    Args:
        logits: [R, V], without not-a-numbers (a row that has one yields some ids in range).
        k: 1 to V.

    Returns:
        [R, k] values in falling order, ties by rising id, and [R, k] int64 ids.
    """
    vocab = logits.shape[1]
    candidates = k + max(k, _LEAST_SPARE)
    if 2 * candidates >= vocab:
        return _by_sorting(logits, k)
    values, ids = logits.topk(candidates, dim=-1, sorted=False)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    # If the last candidate equals the k-th, other equals of the k-th may be missing.
    unsure = (values[:, -1] >= values[:, k - 1]).nonzero().flatten()
    values, ids = values[:, :k], ids[:, :k]
    if unsure.numel():
        values[unsure], ids[unsure] = _by_sorting(logits[unsure], k)
    return values, ids


def _by_sorting(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]
