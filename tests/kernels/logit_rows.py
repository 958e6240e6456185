"""Logits for tests of kernels that read rows: as models produce them, with ties, and with unusual strides."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KINDS", "drawn", "logits_of", "strided", "tied"]

KINDS = ("normal", "ties", "bfloat16", "masked", "equal", "peaked")


def logits_of(kind: str, rows: int, vocab: int) -> Tensor:
    """Random logits of one of the `KINDS`, the same for the same size."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 2 * torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "bfloat16":
        logits = logits.bfloat16().float()
    elif kind == "masked":
        logits[torch.rand(rows, vocab, generator=generator) < 0.7] = -torch.inf
        logits[:, vocab // 2] = 0.5
    elif kind == "equal":
        logits.fill_(-3.25)
    elif kind == "peaked":
        logits *= 8
    return logits


def drawn(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0, size: float = 4.0) -> Tensor:
    """Random logits, some of them masked if there are enough."""
    generator = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(rows, vocab, generator=generator)
    if vocab > 4:
        logits[torch.rand(rows, vocab, generator=generator) < 0.1] = -torch.inf
        logits[:, vocab // 2] = 1.0
    return logits.to(dtype)


def tied(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Logits with few different values, among them both zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-torch.inf, -1.5, -0.0, 0.0, 2.0, 2.0])
    return values[torch.randint(0, len(values), (rows, vocab), generator=generator)].to(dtype)


def strided(logits: Tensor, kind: str) -> Tensor:
    """The same logits with other strides: padded rows, transposed, every second row, or contiguous."""
    rows, vocab = logits.shape
    if kind == "padded":
        wide = torch.full((rows, vocab + 5), torch.nan, dtype=logits.dtype)
        wide[:, :vocab] = logits
        return wide[:, :vocab]
    if kind == "transposed":
        return logits.t().contiguous().t()
    if kind == "every second":
        twice = torch.full((2 * rows, vocab), torch.nan, dtype=logits.dtype)
        twice[::2] = logits
        return twice[::2]
    return logits.contiguous()
