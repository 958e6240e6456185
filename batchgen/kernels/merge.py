"""Merge of attention results over disjoint sets of keys, by their log-sum-exp in float32.

    lse = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse) out_i

A part without keys has a log-sum-exp of -inf and no weight, whatever its values. If all parts are such, the result is
zeros and -inf. A sink (a logit that carries no value) joins the denominator of `out`, but not `lse`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PartLists(NamedTuple):
    """The parts of each of M tokens, among E parts."""

    parts: Tensor
    """[E] int32 part numbers; those of a token are adjacent."""
    tokens: Tensor
    """[M] int32: index in the result of each token; -1 is skipped."""
    starts: Tensor
    """[M] int32: index in `parts` of each token's first part."""
    counts: Tensor
    """[M] int32: number of each token's parts; 0 yields zeros."""


def merge_parts(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge two parts of every token.

    Args:
        out_a: [T, N, D] of any floating dtype, the last dimension contiguous.
        lse_a: [T, N] float32, natural logarithm, of any strides.
        out_b: [T, N, D], perhaps of another dtype.
        lse_b: [T, N] float32, of any strides.
        dtype: of the result; None: that of `out_a`.
        sinks: [N] logits that join the denominators.

    Returns:
        out [T, N, D] in `dtype`; lse [T, N] float32, without sinks.
    """
    lse = torch.stack([lse_a, lse_b])  # [2, T, N]
    values = torch.stack([out_a.float(), out_b.float()])  # [2, T, N, D]
    out, total = _merge(values, lse, sinks)
    return out.to(out_a.dtype if dtype is None else dtype), total


def merge_lists(
    part_out: Tensor,
    part_lse: Tensor,
    lists: PartLists,
    out: Tensor,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Merge each token's list of parts and write the result to the token's place.

    Args:
        part_out: [E, N, D] float32.
        part_lse: [E, N] float32, natural logarithm.
        lists: the parts of each token.
        out: [T, N, D], contiguous; written at the lists' tokens only.
        lse: [T, N] float32, contiguous; written as `out`.
        sinks: [N] logits that join the denominators.
    """
    for token, start, count in zip(lists.tokens.tolist(), lists.starts.tolist(), lists.counts.tolist(), strict=True):
        if token < 0:
            continue
        chosen = lists.parts[start : start + count].long()
        merged, total = _merge(part_out[chosen], part_lse[chosen], sinks)
        out[token] = merged.to(out.dtype)
        if lse is not None:
            lse[token] = total


def _merge(values: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge values [n, ..., N, D] float32 and lse [n, ..., N] over the first dimension."""
    total = torch.logsumexp(lse, 0) if len(lse) else lse.new_full(lse.shape[1:], -torch.inf)
    denominator = total if sinks is None else torch.logaddexp(total, sinks.float().expand_as(total))
    some = lse != -torch.inf
    weights = torch.where(some, (lse - denominator).exp(), 0.0)
    return torch.where(some[..., None], values * weights[..., None], 0.0).sum(0), total
