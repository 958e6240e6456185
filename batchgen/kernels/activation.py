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


KINDS: Final = {
    "silu": 0, "swish": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "gelu_new": 2, "gelu_fast": 2, "quick_gelu": 3, "relu": 4,
}  # fmt: skip
"""`hidden_act` of a model's configuration -> number of its function: `Activation` of elementwise.h."""
_FUNCTIONS: Final[tuple[Callable[[Tensor], Tensor], ...]] = (F.silu, F.gelu, _gelu_tanh, _quick_gelu, F.relu)
ACTIVATIONS: Final = {name: _FUNCTIONS[kind] for name, kind in KINDS.items()}
"""Activation functions by the name of `hidden_act`."""


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, rounded after each, for `gate_up` [T, 2I], gate first. Returns a new [T, I].

    Raises:
        KeyError: `activation` is not one of `ACTIVATIONS`.
    """
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I], [T, I]
    return ACTIVATIONS[activation](gate).mul_(up)  # [T, I]
