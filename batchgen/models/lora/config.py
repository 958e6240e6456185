"""LoRA adapter folders in peft's layout, read and checked without torch and without reading weights.

`adapter_config.json` names the adapted layers and their scale, `adapter_model.safetensors` stores two matrices for
each: y = x W^T + scale (x A^T) B^T with A [r, I] and B [O, r]; of an embedding, A [r, V] has a column for each token.
With DoRA, a magnitude [O] takes the place of the norms of the rows of W + scale B A. Other modules may be replaced
whole (`modules_to_save`), and rows of embeddings and heads (`trainable_token_indices`).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.models.checkpoint.file_hashes import FileStamp
from batchgen.models.checkpoint.safetensors_header import TensorInfo, read_header
from batchgen.models.checkpoint.text_part import unscoped
from batchgen.request.foreign_text import ForeignTextError, file_content, read_json, typed

NamePath = tuple[str, str]
"""(name, folder) of an adapter."""

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_PARTS: Final = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "down",
    ".lora_embedding_B": "up",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".token_adapter.trainable_tokens_delta": "tokens",
    ".base_layer.weight": "base",
}
"""Ending of a tensor's name -> what it is of its module."""
_EXPERT: Final = re.compile(r"^(?P<owner>.*\.experts)(?:(?:\.base_layer)*$|\.(?P<expert>\d+)\.(?P<projection>\w+)$)")
"""Module of the changes of a layer's experts, or of one of them."""
_FLOATS: Final = ("F16", "BF16", "F32", "F64")
_KNOWN_KEYS: Final = frozenset((
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights", "use_dora",
    "modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias", "ensure_weight_tying",
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
    """LoRA matrices of one linear layer or embedding."""

    down: TensorInfo
    """A [r, I]; of an embedding [r, V]."""
    up: TensorInfo
    """B [O, r]."""
    scale: float
    magnitude: TensorInfo | None = None
    """[O] of DoRA."""
    bias: TensorInfo | None = None
    """[O], which is scaled as B is (`lora_bias`)."""


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """LoRA matrices of one parameter of all experts of a layer, or of one expert's own projection."""

    down: TensorInfo
    """A [E r, I], or [r, I]."""
    up: TensorInfo
    """B [O, r E], or [O, r]."""
    expert: int | None = None
    """Whose projection it is; None: of all experts, and which parameter it is shows by its sizes."""
    projection: str = ""
    """Name of the projection of one expert."""
    scale: float = 1.0
    """Of one expert's projection; that of all experts follows from the parameter, see `Adapter.scale_of`."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of an embedding or a head that replace those of the model."""

    ids: tuple[int, ...]
    values: TensorInfo
    """[n, H]."""


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
    saved: Mapping[str, Mapping[str, TensorInfo]] = field(default_factory=dict)
    """Name of a replaced module -> name of its parameter -> the tensor."""
    tokens: Mapping[str, TokenRows] = field(default_factory=dict)
    """Name of an embedding or head -> its replaced rows."""
    experts: Mapping[str, tuple[ExpertPart, ...]] = field(default_factory=dict)
    """Name of a layer's experts -> what is changed of them."""
    scope: str | None = None
    """What precedes the names of the decoder's modules where the adapter was trained; None: as in the model."""
    towers: Adapter | None = None
    """What `located` left out, under its names in the adapter."""

    @property
    def modules(self) -> frozenset[str]:
        """All modules that the adapter changes."""
        return frozenset((*self.layers, *self.saved, *self.tokens, *self.experts))

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
        if self.scope is not None:
            module = self.scope + unscoped(module)
        if _name_matches(config.get("exclude_modules"), module):
            return False
        wanted = config.get("target_modules") or []
        if isinstance(wanted, str):
            return wanted.lower() == "all-linear" or _name_matches(wanted, module)
        # A full module name includes the layer.
        return module in wanted or (_name_matches(wanted, module) and self._in_layer(module))

    def located(self, names: Collection[str], unread: Callable[[str], bool]) -> Adapter:
        """The adapter with the names that its modules have in a model.

        Args:
            names: modules of the model.
            unread: whether a name belongs to a part of the checkpoint that text does not run; `towers` has it.
        """
        known = {unscoped(name): name for name in names}
        places = {name: name if name in names else known.get(unscoped(name), name) for name in self.modules}
        kept = {old: new for old, new in places.items() if new in names or not unread(old)}
        moved = next((old for old, new in kept.items() if new != old and old in self.layers), None)
        scope = self.scope if moved is None else moved.removesuffix(unscoped(moved))
        left = {name: name for name in self.modules - kept.keys()}
        return replace(self.part(kept), scope=scope, towers=self.part(left) if left else self.towers)

    def part(self, names: Mapping[str, str]) -> Adapter:
        """The adapter's changes to the modules `names`, under the names that they map to."""
        return replace(
            self,
            layers={names[name]: layer for name, layer in self.layers.items() if name in names},
            saved={names[name]: tensors for name, tensors in self.saved.items() if name in names},
            tokens={names[name]: rows for name, rows in self.tokens.items() if name in names},
            experts={names[name]: parts for name, parts in self.experts.items() if name in names},
        )

    def scale_of(self, module: str, parameter: str, rank: int) -> float:
        """Scale of the change of a parameter of a layer's experts."""
        alpha = by_pattern(self.config.get("alpha_pattern"), f"{module}.{parameter}", self.config.get("lora_alpha", 8))
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def _in_layer(self, module: str) -> bool:
        """Whether `layers_to_transform` contains the layer of `module`, the first number in its name."""
        layers = self.config.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        names = self.config.get("layers_pattern") or []
        patterns = [rf"(?:^|.*?\.){pattern}" for pattern in ([names] if isinstance(names, str) else names)]
        for pattern in patterns or [r".*?\.[^.]*"]:
            match = re.match(rf"{pattern}\.(\d+)\.", module)
            if match:
                return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
        return False


def read_adapters(paths: Sequence[NamePath]) -> tuple[Adapter, ...]:
    """Read the configuration and header of every adapter, in order.

    Raises:
        ModelError: the message names the adapter, the problem and the remedy.
    """
    return tuple(_read(name, path) for name, path in paths)


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
        by_module = _parts(name, tensors, config.get("modules_to_save") or ())
        experts = _experts(name, config, by_module)
        layers = {
            module: _layer(name, config, module, parts)
            for module, parts in by_module.items()
            if {"down", "up", "bias"} & set(parts)
        }
        saved = {module: kept for module, parts in by_module.items() if (kept := _saved(parts))}
        tokens = {
            module: TokenRows(_token_ids(name, config, module, parts["tokens"]), parts["tokens"])
            for module, parts in by_module.items()
            if "tokens" in parts
        }
        adapter = Adapter(name, folder, layers, config, hashlib.sha256(raw).hexdigest(), stamp, saved, tokens, experts)
        for module in layers:
            if not adapter.targets(module) and not _name_matches(config.get("target_parameters"), f"{module}.weight"):
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
    if type(config.get("use_dora", False)) is not bool:
        raise _error(name, f"use_dora in {_CONFIG} must be true or false")
    for key in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save", "target_parameters"):
        value = config.get(key)
        if not (value is None or isinstance(value, str) or _all(value, str)):
            raise _error(name, f"{key} in {_CONFIG} must be a string or a list of strings, got {value!r}")
    if not any(config.get(key) for key in ("target_modules", "target_parameters", "trainable_token_indices")):
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


def _parts(name: str, tensors: Mapping[str, TensorInfo], saved: Collection[str]) -> dict[str, dict[str, TensorInfo]]:
    """Module name -> what is stored of it, by the names of `_PARTS`; parameters of replaced modules by `saved NAME`."""
    by_module: dict[str, dict[str, TensorInfo]] = {}
    for key, info in tensors.items():
        suffix = next((end for end in _PARTS if key.endswith(end)), None)
        if suffix is None:
            module, _, parameter = key.removeprefix(_PREFIX).replace(".modules_to_save", "").rpartition(".")
            if not any(owner.endswith(wanted) for owner in _owners(module) for wanted in saved):
                raise _error(name, f"{_WEIGHTS} holds {key}, which is not supported")
            part = f"saved {parameter}"
        else:
            module, part = key.removesuffix(suffix).removeprefix(_PREFIX), _PARTS[suffix]
        if info.dtype not in _FLOATS:
            raise _error(name, f"{key} is stored as {info.dtype}, which is not supported")
        by_module.setdefault(module, {})[part] = info
    if not by_module:
        raise _error(name, f"{_WEIGHTS} is empty")
    return by_module


def _experts(
    name: str, config: Mapping[str, Any], by_module: dict[str, dict[str, TensorInfo]]
) -> dict[str, tuple[ExpertPart, ...]]:
    """Changes to experts, taken out of `by_module`: peft wraps one parameter of them around another."""
    experts: dict[str, list[ExpertPart]] = {}
    for module in [module for module in by_module if _EXPERT.search(module)]:
        parts = by_module.pop(module)
        where = _EXPERT.search(module)
        assert where is not None
        owner = module[: where.end("owner")].replace(".block_sparse_moe.", ".mlp.")
        if not {"down", "up"} == set(parts) or any(len(info.shape) != 2 for info in parts.values()):
            raise _error(name, f"{_WEIGHTS} does not hold two matrices of {module} alone; copy the folder again")
        part = ExpertPart(parts["down"], parts["up"])
        if where["expert"] is not None:
            layer = _layer(name, config, module, parts)
            part = ExpertPart(layer.down, layer.up, int(where["expert"]), where["projection"], layer.scale)
        experts.setdefault(owner, []).append(part)
    return {owner: tuple(parts) for owner, parts in experts.items()}


def _owners(module: str) -> Iterator[str]:
    """A module's name, and those of the modules around it."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _saved(parts: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Parameters that replace the model's; the weight below an adapted embedding or head is stored, too."""
    saved = {part.removeprefix("saved "): info for part, info in parts.items() if part.startswith("saved ")}
    return saved | ({"weight": parts["base"]} if "base" in parts else {})


def _token_ids(name: str, config: Mapping[str, Any], module: str, values: TensorInfo) -> tuple[int, ...]:
    """The ids of a module's replaced rows."""
    stated = config.get("trainable_token_indices")
    if isinstance(stated, dict):
        stated = next((ids for wanted, ids in stated.items() if f".{module}".endswith(f".{wanted}")), None)
    if (
        not (isinstance(stated, list) and _all(stated, int))
        or len(values.shape) != 2
        or len(stated) != values.shape[0]
        or min(stated, default=0) < 0
    ):
        raise _error(name, f"trainable_token_indices in {_CONFIG} do not fit the {values.shape[0]} rows of {module}")
    return tuple(stated)


def _layer(name: str, config: Mapping[str, Any], module: str, parts: Mapping[str, TensorInfo]) -> AdaptedLayer:
    """The matrices of one module, with their rank checked against the configuration."""
    rank = by_pattern(config.get("rank_pattern"), module, config.get("r", 8))
    alpha = by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    if not {"down", "up"} <= set(parts):
        raise _error(name, f"{_WEIGHTS} holds one of the two matrices of {module}; copy the folder again")
    down, up, magnitude = parts["down"], parts["up"], parts.get("magnitude")
    # Those of a convolution have the axes of its kernel, too.
    axes, ranks = len(up.shape), (rank, rank, *[1] * (len(up.shape) - 2))
    if len(down.shape) != axes or axes < 2 or (down.shape[0], *up.shape[1:]) != ranks:
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise _error(name, f"{module} has matrices {shapes} where {_CONFIG} calls for rank {rank}")
    if (magnitude is not None) != bool(config.get("use_dora")) or (magnitude and magnitude.shape != up.shape[:1]):
        raise _error(name, f"the magnitude of {module} (lora_magnitude_vector) does not fit use_dora in {_CONFIG}")
    bias = parts.get("bias")
    if (bias is not None) != bool(config.get("lora_bias")) or (bias and (magnitude or bias.shape != up.shape[:1])):
        raise _error(name, f"the bias of {module} (lora_B.bias) does not fit lora_bias in {_CONFIG}")
    return AdaptedLayer(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), magnitude, bias)


def by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Value of the first pattern that matches the name, or its end after a dot; `default` if none does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
