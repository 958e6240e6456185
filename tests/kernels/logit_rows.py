"""Logits of the kinds on which sampling is tested."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("normal", "ties", "bfloat16", "masked", "equal", "peaked")
MORE_KINDS = (*KINDS, "zeros", "sorted", "clustered")
"""Kinds that matter to kernels that work on lanes and blocks, too."""


def logits_of(kind: str, rows: int, vocab: int) -> Tensor:
    """Random logits of one of the `MORE_KINDS`, the same for the same size."""
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
    elif kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    elif kind == "sorted":
        logits = logits.sort(descending=True).values
    elif kind == "clustered":
        logits[:, ::64] += 40  # one lane has all large ones
    return logits
