"""Mixture-of-experts layers of transformers models, computed by batchgen's kernels.

transformers looks up the function that computes a layer's experts in a registry. batchgen registers its own. It
computes the layers whose weights have one of the library's two layouts and whose gate gives the same values as one of
batchgen's. For other layers, and for steps without kernels, it calls the function that the library would have used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchgen.kernels.activation import ACTIVATIONS
from batchgen.kernels.moe import Experts, Gating
from batchgen.kernels.ops import TORCH_OPS, Ops

EXPERTS_NAME: Final = "batchgen"
_ATTRIBUTE: Final = "batchgen_experts"
_LIMITS: Final = ("limit", "swiglu_limit")
"""Attributes in which library models store the limit of their gates."""

Forward = Callable[..., Tensor]


class ExpertsSlot:
    """Operations of the current step, shared with all expert layers of one model."""

    __slots__ = ("layers", "library_layers", "ops")

    def __init__(self) -> None:
        self.ops: Ops = TORCH_OPS
        self.layers: list[_Layer] = []
        """Layers that batchgen's kernels can compute."""
        self.library_layers: list[str] = []
        """Names of the layers that the library always computes."""

    @contextmanager
    def step_context(self, ops: Ops) -> Iterator[None]:
        """Set the step's operations while its forward runs."""
        self.ops = ops
        try:
            yield
        finally:
            self.ops = TORCH_OPS

    def use_library(self) -> None:
        """Let the library compute all layers from now on."""
        for layer in self.layers:
            layer.experts = None
        self.layers = []


@dataclass(slots=True, eq=False)
class _Layer:
    """Expert layer of a model: its slot, the library's function and batchgen's weights."""

    slot: ExpertsSlot
    library: Forward
    """Function that the library would have used."""
    experts: Experts | None
    """Weights for batchgen's kernels; None if these cannot compute the layer."""


def install_experts(model: Any) -> ExpertsSlot:
    """Install batchgen's expert function in a library model whose weights are loaded.

    Returns:
        The slot that passes a step's operations to the layers. If no layer can be computed, the model is unchanged.
    """
    slot = ExpertsSlot()
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # a library without the registry
        return slot
    named = {name: module for name, module in model.named_modules() if is_experts(module)}
    modules = list(named.values())
    layers = [_Layer(slot, _library_forward(module, ALL_EXPERTS_FUNCTIONS), experts_of(module)) for module in modules]
    slot.library_layers = [name for name, layer in zip(named, layers, strict=True) if layer.experts is None]
    if len(slot.library_layers) == len(layers):
        return slot
    for module, layer in zip(modules, layers, strict=True):
        setattr(module, _ATTRIBUTE, layer)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _forward)
    model.set_experts_implementation(EXPERTS_NAME)
    slot.layers = [layer for layer in layers if layer.experts is not None]
    return slot


def _forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Expert function with the library's signature: [T, H], [T, k], [T, k] -> [T, H]."""
    layer: _Layer = getattr(module, _ATTRIBUTE)
    ops = layer.slot.ops
    if layer.experts is None or ops is TORCH_OPS:
        return layer.library(module, hidden_states, top_k_index, top_k_weights)
    return ops.moe_experts(hidden_states, top_k_index, top_k_weights, layer.experts)


def is_experts(module: nn.Module) -> bool:
    """Whether the library looks up the module's function in its registry."""
    return hasattr(type(module).forward, "__wrapped__") and hasattr(module, "has_gate") and hasattr(module, "config")


def _library_forward(module: Any, registry: Any) -> Forward:
    name = module.config._experts_implementation
    forward: Forward = registry[name] if name in registry else type(module).forward.__wrapped__
    return forward


def experts_of(module: Any) -> Experts | None:
    """The module's weights for batchgen's kernels; None if these cannot compute it."""
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
    """The gate of batchgen that gives the same values as the module's own; None if there is none."""
    limits = [getattr(module, name, None) for name in _LIMITS]
    numbers = [None, *(float(limit) for limit in limits if isinstance(limit, int | float))]
    gate_up = torch.linspace(-25, 25, 4096)[torch.randperm(4096, generator=torch.Generator().manual_seed(0))]
    gate_up = gate_up.view(32, 128)  # float32, on the CPU
    try:
        expected = module._apply_gate(gate_up)
    except Exception:  # it may need more arguments
        return None
    # One name per activation function.
    names = {function: name for name, function in reversed(ACTIVATIONS.items())}.values()
    for interleaved, limit, shift, name in product((False, True), numbers, (0.0, 1.0), names):
        gating = Gating(name, interleaved, limit, shift)
        result = gating(gate_up)
        if result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-5, atol=1e-5):
            return gating
    return None
