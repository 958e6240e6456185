"""Root-mean-square normalisation, y = x / sqrt(mean(x^2) + eps) * w."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of `x` [..., D] by `weight` [D]; float32 inside, one rounding to `x.dtype`."""
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` [T, H] to `x` [T, H] in place, rounded to `x.dtype`, and return the norm of the rounded sum."""
    return torch.rms_norm(x.add_(delta), (x.shape[-1],), weight, eps)
