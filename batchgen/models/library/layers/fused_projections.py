"""Fused projections inside an unmodified transformers model.

Sibling projections of one input (q, k, v; gate, up) become slices of one stacked product: the first call computes all
of them, the others return their slice. Every other plain linear layer gets the fastest weight layout. Forwards are not
changed, and each output element is the same dot product as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from batchgen.kernels.linear import Embedding, Linear, Products

_GROUPS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Stack:
    """Product of several stacked projections, with its result until every projection has read its slice."""

    def __init__(self, linear: Linear, parts: int, dtype: torch.dtype) -> None:
        self.linear, self._dtype = linear, dtype
        self._parts = parts
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._read_parts: set[int] = set()

    def part(self, index: int, x: Tensor, start: int, end: int) -> Tensor:
        """Columns [start, end) of the product with `x`."""
        if self._input is not x or index in self._read_parts or self._output is None:
            self._input, self._output = x, self.linear(x.to(self._dtype))
            self._read_parts.clear()
        out = self._output[..., start:end]
        self._read_parts.add(index)
        if len(self._read_parts) == self._parts:
            self._input = self._output = None
            self._read_parts.clear()
        return out


class _FastLinear(nn.Module):
    """Replacement of an `nn.Linear` with another weight layout."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._linear, self._dtype = linear, dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        """[O, I] unpacked weight, for forwards that read it."""
        return self._linear.dense_weight()

    @property
    def bias(self) -> Tensor | None:
        """[O] bias; None without one."""
        return self._linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self._linear(x.to(self._dtype))


class _StackedPart(nn.Module):
    """Replacement of an `nn.Linear` by rows [start, end) of a stacked product."""

    def __init__(self, stack: _Stack, index: int, start: int, end: int) -> None:
        super().__init__()
        self._stack = stack
        self._index, self._start, self._end = index, start, end
        self.in_features, self.out_features = stack.linear.in_features, end - start

    @property
    def weight(self) -> Tensor:
        """[O, I] unpacked weight, for forwards that read it."""
        return self._stack.linear.dense_weight()[self._start : self._end]

    @property
    def bias(self) -> Tensor | None:
        """[O] bias; None without one."""
        bias = self._stack.linear.bias
        return None if bias is None else bias[self._start : self._end]

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self._stack.part(self._index, x, self._start, self._end)


class _SharedRows(nn.Embedding):
    """Base of an embedding's class that reads the rows from the head that the embedding is tied to."""

    rows: Embedding

    def forward(self, input: Tensor) -> Tensor:
        """[*] int64 -> [*, E]."""
        return self.rows(input)


def stack_projections(
    model: nn.Module,
    products: Products = "measured",
    siblings: Sequence[tuple[str, ...]] = _GROUPS,
    *,
    rounds: bool = False,
) -> int:
    """Stack the sibling projections of `model` in place and change the layout of its other linear layers.

    Only exact `nn.Linear`s without hooks are replaced. A layer's old weights are freed before the next layer is
    stacked, and an embedding that is tied to a layer reads its rows from there where it can.

    `siblings`: names of projections of one input; `rounds`: whether inputs may have another dtype than weights, and are
    rounded to that.

    Returns:
        Number of stacked groups.
    """
    stacked = 0
    embeddings = {id(module.weight): module for module in model.modules() if isinstance(module, nn.Embedding)}
    # Without the layers themselves, whose old weights the list would keep.
    for parent in [module for module in model.modules() if module._modules]:
        for names in siblings:
            group = [parent._modules.get(name) for name in names]
            if _stackable(group):
                _stack_group(parent, names, products)
                stacked += 1
        for name, child in list(parent.named_children()):
            if _is_plain_linear(child):
                _replace_linear(parent, name, products, embeddings.get(id(child.weight)), rounds=rounds)
    return stacked


def _is_plain_linear(module: nn.Module | None) -> bool:
    # A subclass may compute something else; a hook may expect to see the layer.
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def _stackable(group: list[nn.Module | None]) -> bool:
    if not all(_is_plain_linear(module) for module in group):
        return False
    first, *others = (m for m in group if isinstance(m, nn.Linear))
    return all(
        other.in_features == first.in_features
        and (other.bias is None) == (first.bias is None)
        and other.weight.dtype == first.weight.dtype
        and other.weight.device == first.weight.device
        for other in others
    )


def _stack_group(parent: nn.Module, names: tuple[str, ...], products: Products) -> None:
    modules = [parent.get_submodule(name) for name in names]
    weights = [m.weight.detach() for m in modules if isinstance(m.weight, Tensor)]
    biases = [m.bias.detach() for m in modules if isinstance(m.bias, Tensor)]
    bias = torch.cat(biases) if biases else None
    stack = _Stack(Linear(torch.cat(weights), bias, products=products), len(names), weights[0].dtype)
    start = 0
    for index, (name, weight) in enumerate(zip(names, weights, strict=True)):
        parent._modules[name] = _StackedPart(stack, index, start, start + weight.shape[0])
        start += weight.shape[0]


def _replace_linear(
    parent: nn.Module, name: str, products: Products, tied: nn.Embedding | None, *, rounds: bool
) -> None:
    module = parent._modules[name]
    assert isinstance(module, nn.Linear)
    bias = None if module.bias is None else module.bias.detach()
    linear = Linear(module.weight.detach(), bias, products=products)
    if linear.packed or rounds:  # an unpacked one is as fast as nn.Linear
        parent._modules[name] = _FastLinear(linear, module.weight.dtype)
        rows = None if tied is None else Embedding(tied.weight.detach(), linear)
        if tied is not None and rows is not None and rows.packed:
            _share_rows(tied, rows)


def _share_rows(module: nn.Embedding, rows: Embedding) -> None:
    """Let an embedding read its rows from `rows`; its class computes the rest as before."""
    known = type(module)
    bases = (_SharedRows,) if known is nn.Embedding else (known, _SharedRows)
    module.__class__ = type(known.__name__, bases, {})
    vars(module)["rows"] = rows
    # Classes read the weight's dtype; its values are nowhere, which the comparison of logits would show.
    nowhere = torch.full((), torch.nan, dtype=rows.dtype).expand(module.weight.shape)
    module.weight = nn.Parameter(nowhere, requires_grad=False)
