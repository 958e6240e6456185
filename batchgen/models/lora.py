"""LoRA weights on the device, in the form that each of the two model paths uses.

The native path fuses sibling projections, so an adapter's changes of q, k and v become one pair: the A matrices are
concatenated, and B is block-diagonal. On the transformers path a wrapper around each adapted module reads the step's
segments from a slot shared by the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from batchgen.errors import ModelError
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraStep
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.models.lora_config import AdaptedLayer, Adapter, LinearSize, fit_adapter
from batchgen.models.weights import WeightReader


def read_pair(reader: WeightReader, module: str, layer: AdaptedLayer) -> tuple[Tensor, Tensor]:
    """Read A [r, I] and scale * B [O, r] of a module, as float32 on the CPU."""
    down, up = torch.empty(layer.down.shape), torch.empty(layer.up.shape)
    reader.read_into(f"{module}.down", down)
    reader.read_into(f"{module}.up", up)
    return down, up * layer.scale


def adapter_reader(adapter: Adapter) -> WeightReader:
    """Weight reader of an adapter, with the tensor names that `read_pair` uses."""
    tensors = {f"{module}.down": layer.down for module, layer in adapter.layers.items()}
    return WeightReader(tensors | {f"{module}.up": layer.up for module, layer in adapter.layers.items()})


def fused_pair(
    adapter: Adapter, reader: WeightReader, parts: Sequence[tuple[str, int]], dtype: torch.dtype, device: torch.device
) -> LoraPair | None:
    """LoRA pair of projections that are fused along their outputs; None if the adapter changes none of them.

    Args:
        adapter: the adapter.
        reader: reader of its matrices.
        parts: (module, outputs) of the fused projections, in order.
        dtype: dtype of the result.
        device: device of the result.
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
    """LoRA segments of the current step, shared with all wrapped modules of one model."""

    __slots__ = ("ops", "step", "tokens", "visited")

    def __init__(self) -> None:
        self.step: LoraStep | None = None
        self.tokens = 0
        """Number of flat tokens in the step, T."""
        self.ops: Ops = TORCH_OPS
        self.visited: set[str] | None = None
        """Names of the modules that have run; None: not recorded."""

    @contextmanager
    def step_context(self, step: LoraStep | None, tokens: int, ops: Ops) -> Iterator[None]:
        """Set the step's segments and operations while its forward runs."""
        self.step, self.tokens, self.ops = step, tokens, ops
        try:
            yield
        finally:
            self.step = None


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of one layer, and the slot that says which of them a step uses."""

    name: str
    """Name of the layer's module."""
    slot: LoraSlot
    pairs: LoraPairs

    def visit(self) -> LoraStep | None:
        """The current step's segments, None if no token has an adapter; records that the layer has run."""
        if self.slot.step is not None and self.slot.visited is not None:
            self.slot.visited.add(self.name)
        return self.slot.step


@runtime_checkable
class AppliesAdapters(Protocol):
    """A module that applies its layer's adapters, instead of a wrapper around it."""

    def adapt(self, adapters: LayerAdapters) -> None:
        """Apply these adapters from now on."""
        ...


class _LoraLinear(nn.Module):
    """Linear layer with LoRA adapters; other attributes are those of the wrapped layer."""

    def __init__(self, base: nn.Module, adapters: LayerAdapters) -> None:
        super().__init__()
        self.base = base
        self._adapters = adapters

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]; the leading dimensions hold the step's tokens in order."""
        out: Tensor = self.base(x)
        step, slot = self._adapters.visit(), self._adapters.slot
        if step is None:
            return out
        flat = x.reshape(-1, x.shape[-1])  # [T, I]
        if len(flat) != slot.tokens:
            raise ModelError(
                f"An adapter (--lora) changes {self._adapters.name}, which sees {len(flat)} of a step's {slot.tokens} "
                "tokens: batchgen cannot determine which of them use the adapter. Merge the adapter into the model."
            )
        slot.ops.add_lora(out.view(-1, out.shape[-1]), flat, step, self._adapters.pairs)
        return out


def fit_library_adapters(model: Any, adapters: Sequence[Adapter]) -> None:
    """Check that adapters fit a library model, which may be on the meta device.

    Raises:
        ModelError: see `fit_adapter`.
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
    """Wrap every module that an adapter changes, in place, unless it applies them; they must have been checked.

    Returns:
        The slot that passes a step's segments to the layers.
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
        base, adapted = model.get_submodule(module), LayerAdapters(module, slot, LoraPairs(found))
        if isinstance(base, AppliesAdapters):
            base.adapt(adapted)
        else:
            model.get_submodule(parent)._modules[name] = _LoraLinear(base, adapted)
    return slot
