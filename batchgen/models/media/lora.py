"""What LoRA adapters change of the modules that read images or audio: their parameters with an adapter merged in."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from batchgen.models.checkpoint.stored_tensors import library_names
from batchgen.models.checkpoint.text_part import unscoped
from batchgen.models.checkpoint.weights import WeightReader
from batchgen.models.lora.adapters import adapter_reader, read_tensor
from batchgen.models.lora.config import Adapter

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SPEAKS = re.compile(r"(^|\.)(talker|token2wav|code2wav)\.")
"""Names of modules that make sounds of a text, which no text depends on."""


@torch.no_grad()
def adapted_parameters(adapter: Adapter, model: Any) -> dict[str, Tensor]:
    """The parameters of a model that an adapter changes, by name, in the model's dtype and on its device.

    Args:
        adapter: the part of an adapter that changes towers, see `Adapter.towers`.
        model: the library's model, whose names the adapter has, or those that an older library gave to them.

    Raises:
        ModelError: the adapter changes something that the model lacks, that has another size, or that is not a linear
            layer or a convolution; the message names it.
    """
    adapter = adapter.part({module: module for module in adapter.modules if not _SPEAKS.search(module)})
    for module in (*adapter.tokens, *adapter.experts):
        raise _refused(adapter, module, "which is not a linear layer or a convolution that reads images or audio")
    names = [f"{module}.weight" for module in adapter.layers]
    names += [f"{module}.{name}" for module, parameters in adapter.saved.items() for name in parameters]
    places = _places(names, model)
    found: dict[str, Tensor] = {}
    with adapter_reader(adapter) as reader:
        for module, parameters in adapter.saved.items():
            for name, info in parameters.items():
                place = _place(adapter, places, model, f"{module}.{name}")
                own = model.get_parameter(place)
                if tuple(info.shape) != tuple(own.shape):
                    shapes = f"{list(info.shape)} in the adapter and {list(own.shape)} in the model"
                    raise _refused(adapter, f"{module}.{name}", f"which has shape {shapes}")
                found[place] = read_tensor(reader, f"{module}.saved.{name}", info).to(own)
        for module in adapter.layers:
            place = _place(adapter, places, model, f"{module}.weight")
            owner = model.get_submodule(place.rpartition(".")[0])
            # torch's own attention reads the weight of its last layer itself, so that peft has no effect on that.
            if type(owner) is not NonDynamicallyQuantizableLinear:
                found[place] = _merged(adapter, reader, module, owner)
    return found


def _places(names: list[str], model: Any) -> dict[str, str]:
    """Name of a parameter in an adapter -> its name in the model; others that the model lacks or has converted."""
    own = {unscoped(name): name for name, _ in model.named_parameters()}
    found = ((name, "" if converted else target) for name, target, converted in library_names(model, names))
    return {name: own.get(unscoped(target), target) for name, target in found}


def _place(adapter: Adapter, places: dict[str, str], model: Any, name: str) -> str:
    place = places[name]
    if place not in dict(model.named_parameters()):
        problem = "which is not a parameter of the modules that read images or audio; check its base model"
        raise adapter.error(f"it changes {name}, {problem}")
    return place


def _merged(adapter: Adapter, reader: WeightReader, module: str, owner: Any) -> Tensor:
    """The weight of a module with an adapter's change: [O, I], or [O, I, ...] of a convolution."""
    is_linear, is_convolution = type(owner) is nn.Linear, type(owner) in _CONVOLUTIONS and owner.groups == 1
    if not (is_linear or is_convolution):
        raise _refused(adapter, module, f"a {type(owner).__name__}, which is neither a linear layer nor a convolution")
    layer, weight = adapter.layers[module], owner.weight.detach()
    if layer.bias is not None:
        raise _refused(adapter, module, "with a bias (lora_bias)")
    if layer.down.shape[1:] != tuple(weight.shape[1:]) or layer.up.shape[0] != len(weight):
        shapes = f"{list(layer.down.shape)} and {list(layer.up.shape)}"
        raise adapter.error(f"its matrices {shapes} do not fit {module} of the model; check its base model")
    down, up = (read_tensor(reader, f"{module}.{name}", getattr(layer, name)).flatten(1) for name in ("down", "up"))
    changed = weight.float().cpu().flatten(1) + layer.scale * up @ down
    if layer.magnitude is not None:
        changed *= (read_tensor(reader, f"{module}.magnitude", layer.magnitude) / changed.norm(dim=1))[:, None]
    found: Tensor = changed.view_as(weight).to(weight)
    return found


def _refused(adapter: Adapter, module: str, problem: str) -> Exception:
    return adapter.error(f"it changes {module}, {problem}; merge the adapter into the model")
