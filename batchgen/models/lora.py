"""Adapters' weights on the device, as each of the two model paths uses them.

The native path has its sibling projections fused, so an adapter's changes of q, k and v become one pair: the A
matrices below one another, B block by block. On the transformers path a wrapper stands around each changed module,
stacked or not, and looks for the step's segments in a slot that belongs to that one model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from batchgen.errors import ModelError
from batchgen.kernels import torch_ops
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraStep
from batchgen.kernels.ops import Ops
from batchgen.models.lora_config import AdaptedLayer, Adapter, LinearSize, fit_adapter
from batchgen.models.weights import WeightReader

__all__ = ["LoraSlot", "fit_library_adapters", "fused_pair", "wrap_adapted"]


def read_pair(reader: WeightReader, module: str, layer: AdaptedLayer) -> tuple[Tensor, Tensor]:
    """A [r, I] and scale * B [O, r], float32 on the CPU."""
    down, up = torch.empty(layer.down.shape), torch.empty(layer.up.shape)
    reader.read_into(f"{module}.down", down)
    reader.read_into(f"{module}.up", up)
    return down, up * layer.scale


def adapter_reader(adapter: Adapter) -> WeightReader:
    """A reader of an adapter's matrices, under the names that `read_pair` uses."""
    tensors = {f"{module}.down": layer.down for module, layer in adapter.layers.items()}
    return WeightReader(tensors | {f"{module}.up": layer.up for module, layer in adapter.layers.items()})


def fused_pair(
    adapter: Adapter, reader: WeightReader, parts: Sequence[tuple[str, int]], dtype: torch.dtype, device: torch.device
) -> LoraPair | None:
    """An adapter's change of projections fused along their outputs, or None where it changes none of them.

    Args:
        adapter: the adapter.
        reader: of its matrices.
        parts: (module, outputs) in the order in which they are fused.
        dtype: of the result.
        device: of the result.
    """
    total, at = sum(rows for _, rows in parts), 0
    downs: list[Tensor] = []
    ups: list[Tensor] = []
    for module, rows in parts:
        layer = adapter.layers.get(module)
        if layer is not None:
            down, up = read_pair(reader, module, layer)
            placed = torch.zeros(total, up.shape[1])
            placed[at : at + rows] = up
            downs.append(down)
            ups.append(placed)
        at += rows
    if not downs:
        return None
    return LoraPair(torch.cat(downs).to(device, dtype), torch.cat(ups, 1).to(device, dtype))


class LoraSlot:
    """Where the wrapped modules of one model find the step's segments."""

    __slots__ = ("ops", "reached", "step", "tokens")

    def __init__(self) -> None:
        self.step: LoraStep | None = None
        self.tokens = 0
        """Flat tokens of the step, T."""
        self.ops: Ops = torch_ops
        self.reached: set[str] | None = None
        """Modules that took part, while somebody wants to know."""

    @contextmanager
    def during(self, step: LoraStep | None, tokens: int, ops: Ops) -> Iterator[None]:
        """Show a step's segments and operations to the modules while its forward runs."""
        self.step, self.tokens, self.ops = step, tokens, ops
        try:
            yield
        finally:
            self.step = None


class _Adapted(nn.Module):
    """Stands around a linear layer. Whatever else a forward asks of the layer, the layer answers."""

    def __init__(self, name: str, base: nn.Module, slot: LoraSlot, pairs: LoraPairs) -> None:
        super().__init__()
        self.base = base
        self._name, self._slot, self._pairs = name, slot, pairs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]; the leading sizes hold the step's tokens in order."""
        out: Tensor = self.base(x)
        slot = self._slot
        if slot.step is None:
            return out
        flat = x.reshape(-1, x.shape[-1])  # [T, I]
        if len(flat) != slot.tokens:
            raise ModelError(
                f"An adapter (--lora) changes {self._name}, which sees {len(flat)} of a step's {slot.tokens} tokens: "
                "which of them go through the adapter cannot be told. Merge the adapter into the model."
            )
        if slot.reached is not None:
            slot.reached.add(self._name)
        slot.ops.add_lora(out.view(-1, out.shape[-1]), flat, slot.step, self._pairs)
        return out


def fit_library_adapters(model: Any, adapters: Sequence[Adapter]) -> None:
    """Hold adapters against a library model, which may stand on the meta device.

    Raises:
        ModelError: as `fit_adapter`.
    """
    if not adapters:
        return
    from transformers.pytorch_utils import Conv1D  # importing the library takes seconds

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linears: dict[str, LinearSize] = {}
    fixed: dict[str, str] = {}
    for name, module in model.named_modules():
        if module is head or module is embedding:
            fixed[name] = "which batchgen does not adapt; train the adapter without it"
        elif ".experts." in name:
            fixed[name] = "an expert, which batchgen does not adapt; merge the adapter into the model"
        elif type(module) is nn.Linear:
            linears[name] = (module.in_features, module.out_features)
        elif type(module) is Conv1D:
            linears[name] = (int(module.weight.shape[0]), int(module.weight.shape[1]))
    for adapter in adapters:
        fit_adapter(adapter, linears, fixed)


def wrap_adapted(model: nn.Module, adapters: Sequence[Adapter], dtype: torch.dtype, device: torch.device) -> LoraSlot:
    """Wrap every module that an adapter changes, in place; the adapters have been held against the model.

    Returns:
        The slot that shows a step's segments to the wrappers.
    """
    slot = LoraSlot()
    pairs: dict[str, list[LoraPair | None]] = {}
    for index, adapter in enumerate(adapters):
        with adapter_reader(adapter) as reader:
            for module, layer in adapter.layers.items():
                pair = fused_pair(adapter, reader, [(module, layer.up.shape[0])], dtype, device)
                pairs.setdefault(module, [None] * len(adapters))[index] = pair
    for module, found in pairs.items():
        parent, _, name = module.rpartition(".")
        owner = model.get_submodule(parent)
        owner._modules[name] = _Adapted(module, model.get_submodule(module), slot, LoraPairs(found))
    return slot
