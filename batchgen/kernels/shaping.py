"""Biases and masks on logits, in place, before the filters of `sampling`. Penalties are in `counts`.

Biases and some masks are lists of (row, token) pairs, so a row costs as much as the tokens it lists. Others are packed,
with one bit per token, in the format of grammar matchers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 18
"""Logits processed at once."""


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


def bitmask_width(vocab_size: int) -> int:
    """Number of int32 words that hold a bit for each of `vocab_size` tokens."""
    return -(-vocab_size // 32)


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
    """Set every logit whose bit is 0 to -inf, in place. Bit `t % 32` of word `t // 32` belongs to token t.

    Args:
        logits: [R, V] floating point.
        bitmask: [M, ceil(V / 32)] int32 on the same device; bits past V are ignored.
        rows: [M] int64, the row of `logits` that each mask belongs to; None: all rows, in order.
    """
    vocab = logits.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    step = max(1, _CHUNK // max(1, vocab))
    for begin in range(0, bitmask.shape[0], step):
        part = bitmask[begin : begin + step]  # [m, W]
        barred = ((part[:, :, None] >> bits) & 1).flatten(1)[:, :vocab] == 0  # [m, V]
        if rows is None:
            logits[begin : begin + step].masked_fill_(barred, -torch.inf)
        else:
            index = rows[begin : begin + step]
            logits[index] = logits[index].masked_fill_(barred, -torch.inf)
