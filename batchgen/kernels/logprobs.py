"""Log-probabilities of tokens, from raw logits in float32, and masks. No second [R, V] array is made."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.top import largest

__all__ = ["log_normalizers", "mask_tokens", "token_logprobs", "top_logprobs"]

_CHUNK = 1 << 18
"""Logits looked at at once."""


def log_normalizers(logits: Tensor) -> Tensor:
    """log(sum(exp(logits))) of each row: [R] float32 of [R, V] of any float dtype, a few rows at a time."""
    step = max(1, _CHUNK // max(1, logits.shape[1]))
    if logits.shape[0] <= step:
        return torch.logsumexp(logits.float(), dim=-1)
    return torch.cat([torch.logsumexp(part.float(), dim=-1) for part in torch.split(logits, step)])


def token_logprobs(logits: Tensor, tokens: Tensor, normalizers: Tensor | None = None) -> Tensor:
    """Log-softmax of `logits` at one token per row.

    Args:
        logits: [R, V].
        tokens: [R] int64.
        normalizers: [R] float32, `log_normalizers(logits)` where it is known already.

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


def mask_tokens(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Set `logits[rows[i], ids[i]]` to -inf, in place, so that these tokens cannot be drawn.

    Args:
        logits: [R, V] float32.
        rows: [m] int64.
        ids: [m] int64.
    """
    logits.index_put_((rows, ids), logits.new_tensor(-torch.inf))
