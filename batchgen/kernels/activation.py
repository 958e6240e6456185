"""Gated activations of an MLP whose projection outputs gate and up as one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(1.702 * x).mul_(x)


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
}
"""Activation functions by the name of `hidden_act` in a model's configuration."""


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, rounded after each, for `gate_up` [T, 2I], gate first. Returns a new [T, I].

    Raises:
        KeyError: `activation` is not one of `ACTIVATIONS`.
    """
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I], [T, I]
    return ACTIVATIONS[activation](gate).mul_(up)  # [T, I]
