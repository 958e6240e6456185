"""Merging of partial attention results by their log-sum-exp: empty parts, many levels, sinks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from batchgen.kernels.merge import PartLists
from tests.gpu.compare import judge, poisoned
from tests.gpu.lab import Lab
from tests.gpu.registry import Labelled, parity
from tests.gpu.under_test import kernel, reference


@parity(
    "merge_parts",
    [
        {"rows": 256, "heads": 32, "dim": 128, "sinks": 0},
        {"rows": 1025, "heads": 16, "dim": 64, "sinks": 1},
        {"rows": 3, "heads": 7, "dim": 80, "sinks": 0},
    ],
    [{"rows": 3, "heads": 3, "dim": 16, "sinks": 1}],
)
def merge_parts(lab: Lab, dtype: torch.dtype, *, rows: int, heads: int, dim: int, sinks: int) -> Iterator[Labelled]:
    """A part in `dtype`, as of a library, with one in float32; for some tokens one part or both are empty."""
    first = lab.randn(rows, heads, dim, dtype=dtype)
    second = lab.randn(rows, heads, dim)
    lse = _lse(lab, 2, rows, heads)
    sink = lab.randn(heads) if sinks else None
    args = (first, lse[0], second, lse[1])
    with poisoned():
        got, got_lse = kernel("merge_parts")(*args, dtype=dtype, sinks=sink)
    plain, plain_lse = reference("merge_parts")(*args, dtype=dtype, sinks=sink)
    truth, truth_lse = _merged(torch.stack((first.double(), second.double())), lse.double(), sink)
    yield "values", judge(got, plain, truth, dtype)
    yield "lse", judge(got_lse, plain_lse, truth_lse, torch.float32)


@parity(
    "merge_lists",
    [
        {"rows": 256, "heads": 32, "dim": 128, "most": 6, "sinks": 0},
        {"rows": 33, "heads": 16, "dim": 64, "most": 40, "sinks": 1},
    ],
    [{"rows": 3, "heads": 3, "dim": 16, "most": 3, "sinks": 1}],
)
def merge_lists(
    lab: Lab, dtype: torch.dtype, *, rows: int, heads: int, dim: int, most: int, sinks: int
) -> Iterator[Labelled]:
    """Lists of 0 to `most` parts in random order, written to every token but the last."""
    counts = lab.randint(0, most + 1, rows).int()
    counts[0] = most
    starts = (counts.cumsum(0) - counts).int()
    total = int(counts.sum())
    part_out, part_lse = lab.randn(total, heads, dim), _lse(lab, 1, total, heads)[0]
    parts = lab.rand(total).argsort().int()
    tokens = lab.rand(rows).argsort().int()
    tokens[tokens == rows - 1] = -1
    sink = lab.randn(heads) if sinks else None
    results = []
    for operation in (kernel("merge_lists"), reference("merge_lists")):
        out = torch.full((rows, heads, dim), 7.0, dtype=dtype, device=lab.device)
        lse = torch.full((rows, heads), 7.0, device=lab.device)
        operation(part_out, part_lse, PartLists(parts, tokens, starts, counts), out, lse, sink)
        results.append((out, lse))
    truth = torch.full((rows, heads, dim), 7.0, dtype=torch.float64, device=lab.device)
    truth_lse = torch.full((rows, heads), 7.0, dtype=torch.float64, device=lab.device)
    for token, start, count in zip(tokens.tolist(), starts.tolist(), counts.tolist(), strict=True):
        if token >= 0:
            chosen = parts[start : start + count].long()
            truth[token], truth_lse[token] = _merged(part_out[chosen].double(), part_lse[chosen].double(), sink)
    (got, got_lse), (plain, plain_lse) = results
    yield "values", judge(got, plain, truth, dtype)
    yield "lse", judge(got_lse, plain_lse, truth_lse, torch.float32)


def _lse(lab: Lab, parts: int, rows: int, heads: int) -> Tensor:
    """[parts, rows, heads] float32, with large and small differences, a fifth of them -inf."""
    lse = lab.randn(parts, rows, heads) * 8 * lab.rand(rows, 1)
    return lse.masked_fill_(lab.rand(parts, rows, heads) < 0.2, -torch.inf)


def _merged(values: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge [n, ..., N, D] values and [n, ..., N] log-sum-exps over the first dimension, in float64."""
    total = lse.logsumexp(0) if len(lse) else lse.new_full(lse.shape[1:], -torch.inf)
    joined = total if sinks is None else torch.logaddexp(total, sinks.double().expand_as(total))
    weights = torch.where(lse == -torch.inf, 0.0, (lse - joined).exp())
    return (weights[..., None] * values).sum(0), total
