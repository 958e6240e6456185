"""Mixtures of experts of library models, computed by our kernels where a run has kernels.

The library looks up by name, in a registry, what computes a layer's experts. Ours is registered as `batchgen`. It
takes the layers that it has been held against: their weights lie in one of the library's two ways, and what their gate
makes of numbers is what ours makes of them. Every other layer, and every step without kernels, is left to what the
library would have taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchgen.kernels import torch_ops
from batchgen.kernels.activation import ACTIVATIONS
from batchgen.kernels.moe import Experts, Gating
from batchgen.kernels.ops import Ops

__all__ = ["EXPERTS_NAME", "ExpertsSlot", "use_our_experts"]

EXPERTS_NAME: Final = "batchgen"
_ATTRIBUTE: Final = "batchgen_experts"
_LIMITS: Final = ("limit", "swiglu_limit")
"""Under which names library models keep the limit of their gates."""

Forward = Callable[..., Tensor]


class ExpertsSlot:
    """Where the experts of one model find the step's operations."""

    __slots__ = ("layers", "left", "ops")

    def __init__(self) -> None:
        self.ops: Ops = torch_ops
        self.layers: list[_Layer] = []
        """What our kernels can compute."""
        self.left: list[str] = []
        """Layers that stay the library's, whatever the operations."""

    @contextmanager
    def during(self, ops: Ops) -> Iterator[None]:
        """Show a step's operations to the experts while its forward runs."""
        self.ops = ops
        try:
            yield
        finally:
            self.ops = torch_ops

    def leave_to_library(self) -> None:
        """Compute nothing from now on."""
        for layer in self.layers:
            layer.experts = None
        self.layers = []


@dataclass(slots=True, eq=False)
class _Layer:
    """What is known of one layer's experts."""

    slot: ExpertsSlot
    library: Forward
    """What the library would have taken."""
    experts: Experts | None
    """None where ours cannot compute them."""


def use_our_experts(model: Any) -> ExpertsSlot:
    """Put our experts into a library model whose weights are there.

    Returns:
        The slot that shows a step's operations to them. Without layers that ours can compute, the model is as before.
    """
    slot = ExpertsSlot()
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # a library without the registry
        return slot
    named = {name: module for name, module in model.named_modules() if _is_registered(module)}
    modules = list(named.values())
    layers = [_Layer(slot, _library_forward(module, ALL_EXPERTS_FUNCTIONS), _experts(module)) for module in modules]
    slot.left = [name for name, layer in zip(named, layers, strict=True) if layer.experts is None]
    if len(slot.left) == len(layers):
        return slot
    for module, layer in zip(modules, layers, strict=True):
        setattr(module, _ATTRIBUTE, layer)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _forward)
    model.set_experts_implementation(EXPERTS_NAME)
    slot.layers = [layer for layer in layers if layer.experts is not None]
    return slot


def _forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The library's signature. hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H]."""
    layer: _Layer = getattr(module, _ATTRIBUTE)
    ops = layer.slot.ops
    if layer.experts is None or ops is torch_ops:
        return layer.library(module, hidden_states, top_k_index, top_k_weights)
    return ops.moe_experts(hidden_states, top_k_index, top_k_weights, layer.experts)


def _is_registered(module: nn.Module) -> bool:
    """Whether the library looks up what computes the module."""
    return hasattr(type(module).forward, "__wrapped__") and hasattr(module, "has_gate") and hasattr(module, "config")


def _library_forward(module: Any, registry: Any) -> Forward:
    name = module.config._experts_implementation
    found: Forward = registry[name] if name in registry else type(module).forward.__wrapped__
    return found


def _experts(module: Any) -> Experts | None:
    """The module's weights as our kernels take them; None where they are of another kind."""
    usual = module.has_gate and not getattr(module, "has_post_expert_norm", False)
    if not usual or getattr(module, "_is_expert_parallel", False):
        return None
    names = ["gate_up_proj", "down_proj"] + (["gate_up_proj_bias", "down_proj_bias"] if module.has_bias else [])
    tensors = [getattr(module, name, None) for name in names]
    if not all(isinstance(tensor, Tensor) and tensor.dtype in _DTYPES for tensor in tensors):
        return None
    gate_up, down, *biases = (tensor.detach() for tensor in tensors if tensor is not None)
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    count, hidden, inner = down.shape
    if gate_up.shape != (count, 2 * inner, hidden) or any(not bias.is_contiguous() for bias in biases):
        return None
    gating = _gating(module)
    if gating is None:
        return None
    up_bias, down_bias = biases or (None, None)
    return Experts(gate_up, down, up_bias, down_bias, gating)


_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def _gating(module: Any) -> Gating | None:
    """Which of our gates makes the same of numbers as the module's own does."""
    limits = [getattr(module, name, None) for name in _LIMITS]
    numbers = [None, *(float(limit) for limit in limits if isinstance(limit, int | float))]
    gate_up = torch.linspace(-25, 25, 4096)[torch.randperm(4096, generator=torch.Generator().manual_seed(0))]
    gate_up = gate_up.view(32, 128)  # float32, on the CPU
    try:
        expected = module._apply_gate(gate_up)
    except Exception:  # it may need more than numbers
        return None
    # By activation, one name for each.
    names = {function: name for name, function in reversed(ACTIVATIONS.items())}.values()
    for interleaved, limit, shift, name in product((False, True), numbers, (0.0, 1.0), names):
        ours = Gating(name, interleaved, limit, shift)
        made = ours(gate_up)
        if made.shape == expected.shape and torch.allclose(made, expected, rtol=1e-5, atol=1e-5):
            return ours
    return None
