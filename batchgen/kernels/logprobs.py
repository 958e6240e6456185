"""Log-probabilities of tokens from raw logits, and token masks. No second [R, V] tensor is allocated.

Logits may be of any floating-point dtype; results are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.top import largest

_CHUNK = 1 << 18
"""Logits processed at once."""


@dataclass(frozen=True, slots=True)
class GatheredLogprobs:
    """Log-probabilities of R rows, from `gather_logprobs`."""

    normalizers: Tensor
    """[R] float32 log-sum-exp of each row"""
    targets: Tensor
    """[R] float32 logprob of each row's target"""
    top_ids: Tensor
    """[R, k] int64, most likely first, ties by lowest id"""
    top: Tensor
    """[R, k] float32, logprobs of `top_ids`"""


def vocab_size(logits: Tensor) -> int:
    """Number of tokens of the vocabulary of logits [R, V], V."""
    return logits.shape[1]


def logits_at(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """`logits[rows, ids]` of [R, V]; the indexes are int64 of shapes that broadcast."""
    return logits[rows, ids]


def set_logits(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Set `logits[rows[i], ids[i]]` of [R, V] to `values[i]` [m], in place; equal pairs have equal values."""
    logits.index_put_((rows, ids), values)


def replace_rows(logits: Tensor, rows: Tensor, function: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """Replace the distinct `rows` [r] of [R, V] by what a function makes of a copy [r, V] of them, in place.

    Returns the largest logit of each new row, [r]; None if the function returned None, so that the rows stay.
    """
    result = function(logits[rows])
    if result is None:
        return None
    logits.index_copy_(0, rows, result)
    return result.amax(dim=-1)


def log_normalizers(logits: Tensor) -> Tensor:
    """Log-sum-exp of each row: [R] float32 of [R, V] of any float dtype, a few rows at a time."""
    step = max(1, _CHUNK // max(1, logits.shape[1]))
    if logits.shape[0] <= step:
        return torch.logsumexp(logits.float(), dim=-1)
    return torch.cat([torch.logsumexp(part.float(), dim=-1) for part in torch.split(logits, step)])


def argmax_lse(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Argmax of each row with its logit and log-sum-exp.

    Args:
        logits: [R, V].

    Returns:
        ids [R] int64 of the largest, the lowest of equal ones; their logits [R] float32; `log_normalizers` [R] float32;
        and [R] bool, rows that cannot be sampled: a not-a-number or +inf among the logits, or all of them -inf. Such
        rows yield some id in range, and a log-sum-exp of not-a-number, +inf or -inf.
    """
    largest_logits = logits.amax(dim=-1).float()
    return logits.argmax(dim=-1), largest_logits, log_normalizers(logits), ~torch.isfinite(largest_logits)


def token_logprobs(logits: Tensor, tokens: Tensor, normalizers: Tensor | None = None) -> Tensor:
    """Log-softmax of `logits` at one token per row.

    Args:
        logits: [R, V].
        tokens: [R] int64.
        normalizers: [R] float32, `log_normalizers(logits)` if known.

    Returns:
        [R] float32.
    """
    if normalizers is None:
        normalizers = log_normalizers(logits)
    return logits.gather(-1, tokens[:, None]).squeeze(-1).float() - normalizers


def top_logprobs(logits: Tensor, k: int, normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row, most likely first, ties by lowest id.

    Args:
        logits: [R, V].
        k: 1 to V.
        normalizers: as in `token_logprobs`.

    Returns:
        ids [R, k] int64 and their log-probabilities [R, k] float32.
    """
    if normalizers is None:
        normalizers = log_normalizers(logits)
    values, ids = largest(logits, k)
    return ids, values.float() - normalizers[:, None]


def gather_logprobs(logits: Tensor, targets: Tensor, k: int, normalizers: Tensor | None = None) -> GatheredLogprobs:
    """Logprobs of prompt positions: of one target token per row, and of the k most likely tokens.

    Args:
        logits: [R, V].
        targets: [R] int64.
        k: 0 to V.
        normalizers: as in `token_logprobs`.
    """
    if normalizers is None:
        normalizers = log_normalizers(logits)
    if k:
        ids, top = top_logprobs(logits, k, normalizers)
    else:
        ids, top = targets.new_empty(len(logits), 0), normalizers.new_empty(len(logits), 0)
    return GatheredLogprobs(normalizers, token_logprobs(logits, targets, normalizers), ids, top)


def mask_tokens(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Set `logits[rows[i], ids[i]]` to -inf, in place, so that these tokens cannot be sampled.

    Args:
        logits: [R, V].
        rows: [m] int64.
        ids: [m] int64.
    """
    logits.index_put_((rows, ids), logits.new_tensor(-torch.inf))
