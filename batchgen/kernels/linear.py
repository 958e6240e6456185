"""Linear layers and embeddings, with the weight in the fastest layout of the device (see `layouts`)."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.cpu.matmul import pack_int8, unpack_rows
from batchgen.kernels.layouts import (
    WHOLE,
    Compiled,
    Grouped,
    Layout,
    Move,
    Plain,
    Product,
    Products,
    choose_layout,
    layouts,
)
from batchgen.kernels.quantization import GroupedWeight

__all__ = ["Embedding", "Linear", "Product", "Products", "describe_products", "forms", "repacks"]


class Linear:
    """A linear layer, x [..., I] -> [..., O], of `weight` [O, I] and `bias` [O].

    On a CPU the weight is repacked: the caller should drop its reference, or both copies stay in memory. The result has
    `x`'s dtype, which must be the weight's; sums are float32.

    Args:
        weight: W.
        bias: b.
        products: which products may be used on a CPU.
        product: the product to use, on the weight in its ordinary layout, such as the batch-invariant
            `gpu.matmul.linear`.
    """

    __slots__ = ("_layout", "in_features", "out_features")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        products: Products = "measured",
        product: Product | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._layout: Layout
        if product is not None:
            self._layout = Plain(weight, bias, product)
        elif weight.device.type == "cpu":
            self._layout = choose_layout(weight.dtype, products).make(weight, bias)
        else:
            self._layout = Plain(weight, bias)

    @classmethod
    def from_groups(cls, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """A layer of a weight in int8 on a CPU, for inputs of `dtype`; `int8_refusal` must be None."""
        made = cls.__new__(cls)
        made.out_features, made.in_features = len(weight.numbers), weight.inner
        made._layout = Compiled(pack_int8(weight, dtype), bias, "int8")
        return made

    @classmethod
    def weight_only(cls, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """A layer of a weight in eight or four bits, by Triton, for inputs of `dtype`.

        The weight must be one that `quantized_matmul.is_supported`.
        """
        # Triton is imported where it computes.
        from batchgen.kernels.gpu.quantized_matmul import linear

        made = cls.__new__(cls)
        made.out_features, made.in_features = len(weight.numbers), weight.inner
        made._layout = Grouped(weight, bias, dtype, linear)
        return made

    @property
    def bias(self) -> Tensor | None:
        """[O], in the weight's dtype."""
        return self._layout.bias

    @property
    def packed(self) -> bool:
        """Whether the weight is stored in another layout than the ordinary one."""
        return not isinstance(self._layout, Plain)

    @property
    def compiled(self) -> Compiled | None:
        """The weight in the layout of the compiled kernels; None if another product is used."""
        return self._layout if isinstance(self._layout, Compiled) else None

    def dense_weight(self) -> Tensor:
        """The weight [O, I] in the ordinary layout; a copy if it is packed."""
        return self._layout.dense()

    def with_product(self, product: Product) -> Linear:
        """The same layer, computed with `product`."""
        return Linear(self.dense_weight(), self.bias, product=product)

    def in_int8(self) -> Linear:
        """The same layer with its weight quantised to int8; `int8_refusal` must be None."""
        return Linear(self.dense_weight(), self.bias, products="int8")

    def moved(self, move: Move) -> Linear:
        """The same layer in other memory; its weight is in the ordinary layout or in groups of small numbers."""
        assert isinstance(self._layout, Plain | Grouped)
        made = copy(self)
        made._layout = self._layout.moved(move)
        return made

    def __call__(self, x: Tensor) -> Tensor:
        """The product, [..., O]."""
        return self._layout(x)


class Embedding:
    """Vectors of tokens, the rows of `weight` [V, H].

    Args:
        weight: the rows.
        head: a layer of the same weight. If it stores exactly these numbers in panels, rows are read from there: the
            caller should drop its reference to `weight`, so that the numbers are in memory once.
    """

    __slots__ = ("_panels", "data", "dtype", "width")

    def __init__(self, weight: Tensor, head: Linear | None = None) -> None:
        compiled = None if head is None else head.compiled
        self._panels = None if compiled is None or compiled.packed.layout != "whole" else compiled.packed
        self.data = weight if self._panels is None else self._panels.data
        """The rows, [V, H], or in panels."""
        self.dtype, self.width = weight.dtype, weight.shape[1]

    @property
    def packed(self) -> bool:
        """Whether the rows are in panels."""
        return self._panels is not None

    def __call__(self, ids: Tensor) -> Tensor:
        """[*] int64 -> [*, H]."""
        return F.embedding(ids, self.data) if self._panels is None else unpack_rows(self._panels, ids)


def repacks(dtype: torch.dtype, device: torch.device, products: Products) -> bool:
    """Whether `Linear` copies a weight of `dtype` into another layout and drops the original."""
    return device.type == "cpu" and choose_layout(dtype, products).name != "plain"


def shares_rows(dtype: torch.dtype, device: torch.device, products: Products) -> bool:
    """Whether an `Embedding` of `dtype` reads its rows from the head that it is tied to."""
    return device.type != "cpu" or choose_layout(dtype, products).name in ("plain", *WHOLE)


def describe_products(dtype: torch.dtype, device: torch.device, products: Products) -> str | None:
    """Name of the product that `Linear` uses and the reason; None for PyTorch's ordinary product."""
    taken = choose_layout(dtype, products) if device.type == "cpu" else None
    return None if taken is None or taken.name == "plain" else taken.description


def forms(weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every available way to compute x W^T for `weight` [O, I]: name -> function x [T, I] -> [T, O].

    For benchmarks of the machine, whatever `Linear` chooses.
    """
    if weight.device.type != "cpu":
        return {"plain": Plain(weight, None)}
    return {name: make(weight, None) for name, make in layouts(weight.dtype, "measured").items()}
