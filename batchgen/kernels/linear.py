"""y = x W^T + b with the weight in the layout that the device multiplies fastest: `layouts` says which."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.kernels.layouts import Compiled, Layout, Plain, Product, Products, layouts, take_layout

__all__ = ["Linear", "Product", "Products", "describe_products", "forms", "repacks"]


class Linear:
    """x [..., I] -> [..., O] for `weight` [O, I] and `bias` [O].

    Takes the weight over: on a CPU it is repacked, and the caller should drop its own reference, or both stay in
    memory. The result has `x`'s dtype, which must be the weight's; sums are float32.

    Args:
        weight: W.
        bias: b.
        products: what may multiply on a CPU.
        product: what computes it, on the weight as it is; `gpu.matmul.linear` is one whose rows never know of each
            other.
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
            self._layout = take_layout(weight.dtype, products).make(weight, bias)
        else:
            self._layout = Plain(weight, bias)

    @property
    def bias(self) -> Tensor | None:
        """[O], in the weight's dtype."""
        return self._layout.bias

    @property
    def packed(self) -> bool:
        """Whether the weight stands in another layout than the ordinary."""
        return not isinstance(self._layout, Plain)

    @property
    def compiled(self) -> Compiled | None:
        """The weight as the compiled kernels take it; None where something else multiplies."""
        return self._layout if isinstance(self._layout, Compiled) else None

    def dense_weight(self) -> Tensor:
        """The weight [O, I] in the ordinary layout: a copy where it is packed."""
        return self._layout.dense()

    def with_product(self, product: Product) -> Linear:
        """The same layer, computed by `product`."""
        return Linear(self.dense_weight(), self.bias, product=product)

    def in_int8(self) -> Linear:
        """The same layer with its weight quantised, where `int8_refusal` has nothing against it."""
        return Linear(self.dense_weight(), self.bias, products="int8")

    def __call__(self, x: Tensor) -> Tensor:
        """The product, [..., O]."""
        return self._layout(x)


def repacks(dtype: torch.dtype, device: torch.device, products: Products) -> bool:
    """Whether `Linear` copies a weight of `dtype` into another layout, and keeps nothing of the one it is given."""
    return device.type == "cpu" and take_layout(dtype, products).name != "plain"


def describe_products(dtype: torch.dtype, device: torch.device, products: Products) -> str | None:
    """What `Linear` multiplies weights by, and why; None where it is PyTorch's ordinary product."""
    taken = take_layout(dtype, products) if device.type == "cpu" else None
    return None if taken is None or taken.name == "plain" else taken.describes


def forms(weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every way that this machine has to compute x W^T for `weight` [O, I]: name -> x [T, I] -> [T, O].

    Which one is the fastest at which sizes says what the machine can do, whatever `Linear` takes.
    """
    if weight.device.type != "cpu":
        return {"plain": Plain(weight, None)}
    return {name: make(weight, None) for name, make in layouts(weight.dtype, "measured").items()}
