"""What stands between a model's logits and the filters: penalties, biases, masks. In place and sparse.

Everything is told as lists of (row, token) pairs, so a row costs what it names, and no [R, V] array of counts is made.

    repetition   logit / r where it is positive, logit * r elsewhere, for every pair
    frequency    logit - f * count
    presence     logit - p where count > 0

in this order. The repetition rule is that of Keskar et al. 2019 as Hugging Face and vLLM apply it, the other two are
those of the OpenAI API.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_bias", "drew_masked", "keep_only", "penalise"]

_FLOAT32 = torch.finfo(torch.float32)


def penalise(
    logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Apply the three penalties to the tokens that rows have seen, in place.

    Args:
        logits: [R, V] float32. No result is +inf, however small the repetition penalty.
        rows: [m] int64.
        ids: [m] int64; no pair (row, id) stands twice.
        counts: [m] float32, how often the row generated the token; 0 where only its prompt holds it.
        repetition: [R] float32 above 0; 1 changes nothing.
        frequency: [R] float32.
        presence: [R] float32.
    """
    values = logits[rows, ids]
    factor = repetition.clamp(min=_FLOAT32.tiny)[rows]
    values = torch.where(values > 0, (values / factor).clamp_(max=_FLOAT32.max), values * factor)
    values -= counts * frequency[rows]
    values -= (counts > 0) * presence[rows]
    logits.index_put_((rows, ids), values)


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
