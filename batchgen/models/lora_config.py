"""LoRA adapter folders in peft's layout, read and held against a model without torch and without reading a weight.

`adapter_config.json` says which linear layers are changed and how strongly, `adapter_model.safetensors` holds two
matrices for each: y = x W^T + scale (x A^T) B^T with A [r, I] and B [O, r].
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.models.safetensors_header import TensorInfo, read_header, sample_tensors

__all__ = ["AdaptedLayer", "Adapter", "LinearSize", "NamePath", "by_pattern", "fit_adapter", "read_adapters"]

NamePath = tuple[str, str]
"""An adapter's name and its folder."""
LinearSize = tuple[int, int]
"""(inputs, outputs) of a linear layer."""

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_PARTS: Final = {".lora_A.weight": 0, ".lora_B.weight": 1}
_FLOATS: Final = ("F16", "BF16", "F32", "F64")
_READ: Final = frozenset((
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
))  # fmt: skip
_SILENT: Final = frozenset((
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "megatron_core", "qalora_group_size", "runtime_config", "peft_version",
))  # fmt: skip
"""Keys that change nothing once training is over."""
_KEEPS_BASE: Final = (True, False, None, "gaussian", "orthogonal", "eva")
"""Beginnings that leave the base model's weights as they are; others change them too."""


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """One linear layer's change."""

    down: TensorInfo
    """A [r, I]"""
    up: TensorInfo
    """B [O, r]"""
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder whose configuration is understood and whose weight file is whole."""

    name: str
    """As rows call it."""
    path: Path
    layers: Mapping[str, AdaptedLayer]
    """By the module's name in the model, as `model.layers.0.self_attn.q_proj`."""
    digest: str
    """sha256 over the configuration, the weight file's header and samples of its weights."""
    config: Mapping[str, Any]

    def error(self, problem: str) -> ModelError:
        """An error that names the adapter."""
        return _error(self.name, problem)

    def targets(self, module: str) -> bool:
        """Whether the configuration asks for a change of this linear layer; `all-linear` asks for each."""
        config = self.config
        if _named(config.get("exclude_modules"), module):
            return False
        wanted = config["target_modules"]
        if isinstance(wanted, str):
            return wanted.lower() == "all-linear" or _named(wanted, module)
        # A whole name says its layer itself.
        return module in wanted or (_named(wanted, module) and self._in_layer(module))

    def _in_layer(self, module: str) -> bool:
        """Whether `layers_to_transform` holds the layer of `module`, told by the first number in its name."""
        layers = self.config.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        given = self.config.get("layers_pattern") or []
        patterns = [rf"(?:^|.*?\.){pattern}" for pattern in ([given] if isinstance(given, str) else given)]
        for pattern in patterns or [r".*?\.[^.]*"]:
            found = re.match(rf"{pattern}\.(\d+)\.", module)
            if found:
                return int(found[1]) in ([layers] if isinstance(layers, int) else layers)
        return False


def read_adapters(given: Sequence[NamePath]) -> tuple[Adapter, ...]:
    """Read every adapter's configuration and header, in order.

    Raises:
        ModelError: naming the adapter, what is missing, damaged or not supported, and the remedy.
    """
    return tuple(_read(name, path) for name, path in given)


def _error(name: str, problem: str) -> ModelError:
    return ModelError(f"The adapter {name} (--lora) cannot be used: {problem}.")


def _read(name: str, path: str | os.PathLike[str]) -> Adapter:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise _error(name, f"there is no folder {folder}; check the path")
    raw, config = _read_config(name, folder)
    _check_config(name, config)
    file = folder / _WEIGHTS
    if not file.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        reason = "has its weights in a pickle, which can run code; save it as safetensors" if pickled else "has none"
        raise _error(name, f"{folder} needs {_WEIGHTS}; it {reason}")
    tensors, header = read_header(file)
    digest = hashlib.sha256(raw + header)
    for sample in sample_tensors(tensors):
        digest.update(sample)
    try:
        layers = {module: _layer(name, config, module, pair) for module, pair in _pairs(name, tensors).items()}
        adapter = Adapter(name, folder, layers, digest.hexdigest(), config)
        for module in layers:
            if not adapter.targets(module):
                raise _error(name, f"{_WEIGHTS} changes {module}, which {_CONFIG} does not name as a target")
    except re.error as error:
        raise _error(name, f"a pattern in {_CONFIG} is no regular expression ({error})") from None
    return adapter


def _read_config(name: str, folder: Path) -> tuple[bytes, dict[str, Any]]:
    file = folder / _CONFIG
    if not file.is_file():
        raise _error(name, f"{folder} has no {_CONFIG}; name the folder that peft saved")
    try:
        raw = file.read_bytes()
        config = json.loads(raw)
    except OSError as error:
        raise _error(name, f"{file} cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise _error(name, f"{file} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise _error(name, f"{file} does not hold an object")
    return raw, config


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """Refuse what is not plain LoRA, and values of the wrong type."""
    if config.get("peft_type") != "LORA":
        raise _error(name, f"its peft_type is {config.get('peft_type')!r}, and only LORA is supported")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _error(name, f"its task_type is {config['task_type']!r}; only CAUSAL_LM generates text")
    odd = [key for key, value in config.items() if key not in _READ | _SILENT and value]
    if odd:
        raise _error(name, f"{odd[0]} in {_CONFIG} is not supported")
    if config.get("bias", "none") != "none":
        raise _error(name, f"its bias is {config['bias']!r}, and only 'none' is supported")
    begin = config.get("init_lora_weights", True)
    if begin not in _KEEPS_BASE:
        raise _error(name, f"init_lora_weights {begin!r} changes the base model's weights, which is not supported")
    _check_numbers(name, config)
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(key)
        if not (value is None or isinstance(value, str) or _all(value, str)):
            raise _error(name, f"{key} in {_CONFIG} must be a string or a list of strings, got {value!r}")
    if not config.get("target_modules"):
        raise _error(name, f"{_CONFIG} names no target_modules")
    layers = config.get("layers_to_transform")
    if not (layers is None or type(layers) is int or _all(layers, int)):
        raise _error(name, f"layers_to_transform in {_CONFIG} must be an integer or a list of them, got {layers!r}")


def _check_numbers(name: str, config: Mapping[str, Any]) -> None:
    if type(config.get("use_rslora", False)) is not bool:
        raise _error(name, f"use_rslora in {_CONFIG} must be true or false")
    for key, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        patterns = config.get(pattern) or {}
        if not isinstance(patterns, dict):
            raise _error(name, f"{pattern} in {_CONFIG} must be an object, got {patterns!r}")
        for value in (config.get(key, 8), *patterns.values()):
            whole = type(value) is int and value > 0
            if not whole and not (key == "lora_alpha" and type(value) is float and math.isfinite(value)):
                raise _error(name, f"{key} in {_CONFIG} must be a positive number, got {value!r}")


def _all(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _named(names: str | list[str] | None, module: str) -> bool:
    """By peft's rule: a string is a regular expression for the whole name, a list holds names or ends of names."""
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _pairs(name: str, tensors: Mapping[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """A and B by module."""
    pairs: dict[str, list[TensorInfo | None]] = {}
    for key, info in tensors.items():
        suffix = next((end for end in _PARTS if key.endswith(end)), None)
        if suffix is None:
            raise _error(name, f"{_WEIGHTS} holds {key}, which is not supported")
        if info.dtype not in _FLOATS:
            raise _error(name, f"{key} is stored as {info.dtype}, which is not supported")
        module = key.removesuffix(suffix).removeprefix(_PREFIX)
        pairs.setdefault(module, [None, None])[_PARTS[suffix]] = info
    whole: dict[str, list[TensorInfo]] = {}
    for module, pair in pairs.items():
        found = [info for info in pair if info is not None]
        if len(found) < 2:
            raise _error(name, f"{_WEIGHTS} holds one of the two matrices of {module}; copy the folder again")
        whole[module] = found
    if not whole:
        raise _error(name, f"{_WEIGHTS} is empty")
    return whole


def _layer(name: str, config: Mapping[str, Any], module: str, pair: list[TensorInfo]) -> AdaptedLayer:
    """The change of one module, its rank held against the configuration."""
    rank = by_pattern(config.get("rank_pattern"), module, config.get("r", 8))
    alpha = by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    down, up = pair
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != rank or up.shape[1] != rank:
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise _error(name, f"{module} has matrices {shapes} where {_CONFIG} calls for rank {rank}")
    return AdaptedLayer(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of the name, at a dot."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def fit_adapter(adapter: Adapter, linears: Mapping[str, LinearSize], fixed: Mapping[str, str]) -> None:
    """Hold an adapter against a model.

    Args:
        adapter: as read.
        linears: the layers that adapters may change.
        fixed: modules that peft could change and batchgen does not, and why.

    Raises:
        ModelError: it changes something that the model does not have, has another size or may not be changed, or it
            lacks the weights of a layer that its configuration names.
    """
    literal = str(adapter.config["target_modules"]).lower() == "all-linear"
    for module, reason in fixed.items():
        if module in adapter.layers or (not literal and adapter.targets(module)):
            raise adapter.error(f"it changes {module}, {reason}")
    for module, layer in adapter.layers.items():
        if module not in linears:
            raise adapter.error(f"it changes {module}, which is no linear layer of the model; check its base model")
        size, needed = (layer.down.shape[1], layer.up.shape[0]), linears[module]
        if size != needed:
            raise adapter.error(
                f"{module} takes {needed[0]} to {needed[1]} numbers in the model and {size[0]} to {size[1]} in the "
                "adapter; check its base model"
            )
    lost = [module for module in linears if adapter.targets(module) and module not in adapter.layers]
    if lost:
        raise adapter.error(f"{_CONFIG} names {lost[0]} as a target, but {_WEIGHTS} does not hold it")
