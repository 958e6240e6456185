"""The linear layer y = x W^T + b, with the weight in the fastest layout of the device (see `layouts`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.kernels.layouts import Compiled, Layout, Plain, Product, Products, choose_layout, layouts

__all__ = ["Linear", "Product", "Products", "describe_products", "forms", "repacks"]


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

    def __call__(self, x: Tensor) -> Tensor:
        """The product, [..., O]."""
        return self._layout(x)


def repacks(dtype: torch.dtype, device: torch.device, products: Products) -> bool:
    """Whether `Linear` copies a weight of `dtype` into another layout and drops the original."""
    return device.type == "cpu" and choose_layout(dtype, products).name != "plain"


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
