"""Biases and masks on logits, in place, before the filters of `sampling`. Penalties are in `counts`.

All are lists of (row, token) pairs, so a row costs as much as the tokens it lists.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add `values[i]` to `logits[rows[i], ids[i]]`, in place; biases of repeated pairs add up.

    Args:
        logits: [R, V] float32.
        rows: [m] int64.
        ids: [m] int64.
        values: [m] float32.
    """
    logits.index_put_((rows, ids), values, accumulate=True)


def keep_only(logits: Tensor, whole: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Set the rows `whole` to -inf except the pairs (rows, ids), in place.

    Args:
        logits: [R, V] float32.
        whole: [w] int64, each row once.
        rows: [m] int64, all of them in `whole`.
        ids: [m] int64.
    """
    kept = logits[rows, ids]
    logits.index_fill_(0, whole, -torch.inf)
    logits.index_put_((rows, ids), kept)


def drew_masked(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Which of `rows` drew a masked token, which happens only if all tokens are masked: [w] bool.

    Args:
        logits: [R, V], masked.
        rows: [w] int64.
        tokens: [R] int64, the sampled tokens.
    """
    return logits[rows, tokens[rows]] == -torch.inf
