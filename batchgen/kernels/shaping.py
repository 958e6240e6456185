"""What stands between a model's logits and the filters, beside penalties (see `counts`): biases and masks. In place.

Everything is told as lists of (row, token) pairs, so a row costs what it names.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_bias", "drew_masked", "keep_only"]


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add `values[i]` to `logits[rows[i], ids[i]]`, in place; biases of a pair named twice add up.

    Args:
        logits: [R, V] float32.
        rows: [m] int64.
        ids: [m] int64.
        values: [m] float32.
    """
    logits.index_put_((rows, ids), values, accumulate=True)


def keep_only(logits: Tensor, whole: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Set the rows `whole` to -inf but for the pairs named, in place.

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
    """Which of `rows` drew a token that is masked, which happens only where all of them are: [w] bool.

    Args:
        logits: [R, V], masked.
        rows: [w] int64.
        tokens: [R] int64 that were drawn.
    """
    return logits[rows, tokens[rows]] == -torch.inf
