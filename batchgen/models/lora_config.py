"""LoRA adapter folders in peft's layout, read and checked without torch and without reading weights.

`adapter_config.json` names the adapted linear layers and their scale, `adapter_model.safetensors` stores two matrices
for each: y = x W^T + scale (x A^T) B^T with A [r, I] and B [O, r].
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.models.file_hashes import FileStamp
from batchgen.models.safetensors_header import TensorInfo, read_header
from batchgen.request.foreign_text import ForeignTextError, file_content, read_json, typed

NamePath = tuple[str, str]
"""(name, folder) of an adapter."""
LinearSize = tuple[int, int]
"""(inputs, outputs) of a linear layer."""

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_PARTS: Final = {".lora_A.weight": 0, ".lora_B.weight": 1}
_FLOATS: Final = ("F16", "BF16", "F32", "F64")
_KNOWN_KEYS: Final = frozenset((
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
))  # fmt: skip
_IGNORED_KEYS: Final = frozenset((
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "megatron_core", "qalora_group_size", "runtime_config", "peft_version",
))  # fmt: skip
"""Configuration keys without effect on inference."""
_SUPPORTED_INITS: Final = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that do not change the base model's weights."""


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """LoRA matrices of one linear layer."""

    down: TensorInfo
    """A [r, I]."""
    up: TensorInfo
    """B [O, r]."""
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter whose configuration is supported and whose weight file is complete."""

    name: str
    """Name by which rows select the adapter."""
    path: Path
    layers: Mapping[str, AdaptedLayer]
    """Module name in the model, such as `model.layers.0.self_attn.q_proj` -> its matrices."""
    config: Mapping[str, Any]
    config_digest: str
    """sha256 of the configuration file."""
    stamp: FileStamp
    """Stamp of the weight file, taken before it was read."""

    @property
    def weights(self) -> Path:
        """The weight file."""
        return self.path / _WEIGHTS

    def error(self, problem: str) -> ModelError:
        """Create an error that names the adapter."""
        return _error(self.name, problem)

    def targets(self, module: str) -> bool:
        """Whether the configuration targets this linear layer; `all-linear` targets every one."""
        config = self.config
        if _name_matches(config.get("exclude_modules"), module):
            return False
        wanted = config["target_modules"]
        if isinstance(wanted, str):
            return wanted.lower() == "all-linear" or _name_matches(wanted, module)
        # A full module name includes the layer.
        return module in wanted or (_name_matches(wanted, module) and self._in_layer(module))

    def _in_layer(self, module: str) -> bool:
        """Whether `layers_to_transform` contains the layer of `module`, the first number in its name."""
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
    """Read the configuration and header of every adapter, in order.

    Raises:
        ModelError: the message names the adapter, the problem and the remedy.
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
    tensors, stamp = read_header(file)
    try:
        layers = {module: _layer(name, config, module, pair) for module, pair in _pairs(name, tensors).items()}
        adapter = Adapter(name, folder, layers, config, hashlib.sha256(raw).hexdigest(), stamp)
        for module in layers:
            if not adapter.targets(module):
                raise _error(name, f"{_WEIGHTS} changes {module}, which {_CONFIG} does not name as a target")
    except re.error as error:
        raise _error(name, f"a pattern in {_CONFIG} is not a valid regular expression ({error})") from None
    return adapter


def _read_config(name: str, folder: Path) -> tuple[bytes, dict[str, Any]]:
    file = folder / _CONFIG
    if not file.is_file():
        raise _error(name, f"{folder} has no {_CONFIG}; name the folder that peft saved")
    try:
        raw = file_content(file)
        config = typed(read_json(raw), {})
    except OSError as error:
        raise _error(name, f"{file} cannot be read ({error.strerror or error})") from None
    except ForeignTextError as error:
        raise _error(name, f"{file} {error}") from None
    return raw, config


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """Reject variants other than plain LoRA, and values of the wrong type."""
    if config.get("peft_type") != "LORA":
        raise _error(name, f"its peft_type is {config.get('peft_type')!r}, and only LORA is supported")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _error(name, f"its task_type is {config['task_type']!r}; only CAUSAL_LM generates text")
    unsupported = [key for key, value in config.items() if key not in _KNOWN_KEYS | _IGNORED_KEYS and value]
    if unsupported:
        raise _error(name, f"{unsupported[0]} in {_CONFIG} is not supported")
    if config.get("bias", "none") != "none":
        raise _error(name, f"its bias is {config['bias']!r}, and only 'none' is supported")
    init = config.get("init_lora_weights", True)
    if init not in _SUPPORTED_INITS:
        raise _error(name, f"init_lora_weights {init!r} changes the base model's weights, which is not supported")
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


def _name_matches(names: str | list[str] | None, module: str) -> bool:
    """Match a module by peft's rule: a string is a regular expression, a list contains names or endings of names."""
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _pairs(name: str, tensors: Mapping[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Module name -> [A, B]."""
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
    """The matrices of one module, with their rank checked against the configuration."""
    rank = by_pattern(config.get("rank_pattern"), module, config.get("r", 8))
    alpha = by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    down, up = pair
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != rank or up.shape[1] != rank:
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise _error(name, f"{module} has matrices {shapes} where {_CONFIG} calls for rank {rank}")
    return AdaptedLayer(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Value of the first pattern that matches the name, or its end after a dot; `default` if none does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def fit_adapter(adapter: Adapter, linears: Mapping[str, LinearSize], fixed: Mapping[str, str]) -> None:
    """Check that an adapter fits a model.

    Args:
        adapter: the adapter.
        linears: layers that adapters may change.
        fixed: modules that peft supports and batchgen does not -> the reason.

    Raises:
        ModelError: the adapter changes a module that the model lacks, that has another size or that is in `fixed`, or
            it lacks the weights of a targeted layer.
    """
    all_linear = str(adapter.config["target_modules"]).lower() == "all-linear"
    for module, reason in fixed.items():
        if module in adapter.layers or (not all_linear and adapter.targets(module)):
            raise adapter.error(f"it changes {module}, {reason}")
    for module, layer in adapter.layers.items():
        if module not in linears:
            raise adapter.error(f"it changes {module}, which is not a linear layer of the model; check its base model")
        size, needed = (layer.down.shape[1], layer.up.shape[0]), linears[module]
        if size != needed:
            raise adapter.error(
                f"{module} maps {needed[0]} to {needed[1]} features in the model and {size[0]} to {size[1]} in the "
                "adapter; check its base model"
            )
    lost = [module for module in linears if adapter.targets(module) and module not in adapter.layers]
    if lost:
        raise adapter.error(f"{_CONFIG} names {lost[0]} as a target, but {_WEIGHTS} does not hold it")
