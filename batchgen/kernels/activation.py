"""Gated activations: one GEMM's output holds gate and up side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "gated"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
"""By the name that `hidden_act` has in a configuration."""


def gated(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * up for `gate_up` [T, 2I], gate first. Returns a new [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I], [T, I]
    return activation(gate).mul_(up)  # [T, I]
