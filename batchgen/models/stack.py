"""Fewer, larger matrix products inside an unmodified transformers model.

Sibling projections of one input (q, k, v; gate, up) become parts of one stacked product: the first part asked for
computes all, the others hand out their slices. Every other plain linear layer gets the device's fastest layout. No
forward is touched; each output element is the same dot product as before.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from batchgen.kernels.linear import Linear, Products

__all__ = ["stack_projections"]

_GROUPS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Stack:
    """One product for several parts, and its result while parts are still to be handed out."""

    def __init__(self, linear: Linear, parts: int) -> None:
        self.linear = linear
        self._parts = parts
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._served: set[int] = set()

    def part(self, index: int, x: Tensor, start: int, end: int) -> Tensor:
        """Columns [start, end) of the product with `x`."""
        if self._input is not x or index in self._served or self._output is None:
            self._input, self._output = x, self.linear(x)
            self._served.clear()
        out = self._output[..., start:end]
        self._served.add(index)
        if len(self._served) == self._parts:
            self._input = self._output = None
            self._served.clear()
        return out


class _FastLinear(nn.Module):
    """Stands where an `nn.Linear` stood."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        """[O, I], unpacked: for forwards that look at it."""
        return self._linear.dense_weight()

    @property
    def bias(self) -> Tensor | None:
        """[O]."""
        return self._linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self._linear(x)


class _StackedPart(nn.Module):
    """Rows [start, end) of a stack, standing where an `nn.Linear` stood."""

    def __init__(self, stack: _Stack, index: int, start: int, end: int) -> None:
        super().__init__()
        self._stack = stack
        self._index, self._start, self._end = index, start, end
        self.in_features, self.out_features = stack.linear.in_features, end - start

    @property
    def weight(self) -> Tensor:
        """[O, I], unpacked: for forwards that look at it."""
        return self._stack.linear.dense_weight()[self._start : self._end]

    @property
    def bias(self) -> Tensor | None:
        """[O]."""
        bias = self._stack.linear.bias
        return None if bias is None else bias[self._start : self._end]

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self._stack.part(self._index, x, self._start, self._end)


def stack_projections(model: nn.Module, products: Products = "measured") -> int:
    """Stack sibling projections of `model` in place and lay out its other linear layers.

    Only exact `nn.Linear`s without hooks are taken; anything else stays as it is. Each layer's old weights are freed
    before the next layer's are stacked.

    Returns:
        How many groups were stacked.
    """
    stacked = 0
    for parent in list(model.modules()):
        for names in _GROUPS:
            group = [parent._modules.get(name) for name in names]
            if _stackable(group):
                _replace(parent, names, products)
                stacked += 1
        for name, child in list(parent.named_children()):
            if _plain(child):
                _replace_one(parent, name, products)
    return stacked


def _plain(module: nn.Module | None) -> bool:
    # A subclass may compute something else; a hook may expect to see the layer.
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def _stackable(group: list[nn.Module | None]) -> bool:
    if not all(_plain(module) for module in group):
        return False
    first, *others = (m for m in group if isinstance(m, nn.Linear))
    return all(
        other.in_features == first.in_features
        and (other.bias is None) == (first.bias is None)
        and other.weight.dtype == first.weight.dtype
        and other.weight.device == first.weight.device
        for other in others
    )


def _replace(parent: nn.Module, names: tuple[str, ...], products: Products) -> None:
    modules = [parent.get_submodule(name) for name in names]
    weights = [m.weight.detach() for m in modules if isinstance(m.weight, Tensor)]
    biases = [m.bias.detach() for m in modules if isinstance(m.bias, Tensor)]
    bias = torch.cat(biases) if biases else None
    stack = _Stack(Linear(torch.cat(weights), bias, products=products), len(names))
    start = 0
    for index, (name, weight) in enumerate(zip(names, weights, strict=True)):
        parent._modules[name] = _StackedPart(stack, index, start, start + weight.shape[0])
        start += weight.shape[0]


def _replace_one(parent: nn.Module, name: str, products: Products) -> None:
    module = parent._modules[name]
    assert isinstance(module, nn.Linear)
    bias = None if module.bias is None else module.bias.detach()
    linear = Linear(module.weight.detach(), bias, products=products)
    if linear.packed:  # an unpacked one would do what nn.Linear does
        parent._modules[name] = _FastLinear(linear)
