"""Quantisation of a checkpoint, as its config.json, the side files of quantisers, or else its tensors tell.

Describes only; nothing is dequantised here. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.models.checkpoint.safetensors_header import TensorInfo
from batchgen.request.foreign_text import ForeignTextError, read_json_file

_ENTRIES: Final = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json, and of the configurations nested in it, that describe a quantisation; the first one counts."""
_OTHER_MODALITIES: Final = ("vision", "audio", "image", "video", "speech", "projector")
"""Words in the names of nested configurations whose weights text does not read."""
_TELLING_KEYS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("quant_algo",), "modelopt"),
    (("config_groups",), "compressed-tensors"),
    (("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"), "bitsandbytes"),
    (("weight_block_size",), "fp8"),
    (("quant_type",), "torchao"),
    (("w_bit", "zero_point"), "awq"),
    (("desc_act", "damp_percent"), "gptq"),
    (("bits",), "mlx"),
)
"""Keys of descriptions that name no method, and the method that writes them; the first match counts."""
_FULL: Final = ("none", "unquantized", "no")
_AWQ_NAMES: Final = {"w_bit": "bits", "q_group_size": "group_size"}
"""Keys of AutoAWQ's own file, and those of transformers."""


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """Quantisation of a checkpoint."""

    method: str
    """As `quant_method` of transformers names it ("fp8", "gptq", "awq", "compressed-tensors", "mxfp4", "bitsandbytes",
    "torchao", "modelopt", ...); other writers by their own name ("mlx"); "unnamed" if nothing tells."""
    settings: Mapping[str, Any]
    """The description, in the spelling of transformers' `quantization_config`; empty if only the tensors tell."""
    source: str
    """Where it is described: a file and key, or the tensor that tells."""

    @property
    def integer_inputs(self) -> bool:
        """Whether all quantised linear layers are described as products of eight-bit integers with such inputs.

        Scales of inputs may be stored, or be those of each token.
        """
        if self.method == "torchao":
            return "Int8DynamicActivationInt8Weight" in str(self.settings.get("quant_type"))
        groups = self.settings.get("config_groups")
        entries = [entry for entry in groups.values() if isinstance(entry, dict)] if isinstance(groups, dict) else []
        both = [entry.get(part) for entry in entries for part in ("weights", "input_activations")]
        return bool(both) and all(_is_int8(each) for each in both)

    def __str__(self) -> str:
        kind = next((self.settings[key] for key in ("quant_algo", "format") if self.settings.get(key)), None)
        bits = self.settings.get("bits")
        detail = f" {kind}" if kind is not None else f", {bits} bits" if bits is not None else ""
        return f"{self.method}{detail}, by {self.source}"


def _is_int8(entry: Any) -> bool:
    """Whether an entry of compressed-tensors' `config_groups` describes integers of eight bits."""
    return isinstance(entry, dict) and entry.get("num_bits") == 8 and entry.get("type", "int") == "int"


def find_quant_format(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None = None
) -> QuantFormat | None:
    """Description of a checkpoint's quantisation; None if its weights are stored in full.

    Args:
        folder: the model folder, whose side files are read.
        config: contents of its config.json.
        tensors: headers of its weight files; None to go by the descriptions alone.

    Raises:
        ModelError: a side file cannot be read.
    """
    for where, holder in _text_configs(config, ""):
        for key in _ENTRIES:
            if form := _described(holder.get(key), f"{key} of {where or 'config.json'}"):
                return form
    for name, read in _SIDE_FILES.items():
        if (folder / name).is_file() and (form := _described(read(_object(folder / name)), name)):
            return form
    return _by_tensors(tensors or {})


def _text_configs(config: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration and those nested in it, outermost first, without those of other modalities."""
    yield where, config
    for key, value in config.items():
        nested = isinstance(value, dict) and key.endswith("_config") and key not in _ENTRIES
        if nested and not any(word in key for word in _OTHER_MODALITIES):
            yield from _text_configs(value, f"{where}.{key}" if where else key)


def _described(entry: Any, source: str) -> QuantFormat | None:
    """The format that an entry describes; None if it describes none, or that weights are stored in full."""
    if not entry:
        return None
    if not isinstance(entry, dict):
        return QuantFormat(str(entry)[:80], {}, source)
    named = entry.get("quant_method")
    unnamed = next((method for keys, method in _TELLING_KEYS if any(key in entry for key in keys)), "unnamed")
    method = str(named)[:80].lower() if named else unnamed
    return None if method in _FULL or _is_full(entry) else QuantFormat(method, entry, source)


def _is_full(entry: Mapping[str, Any]) -> bool:
    """Whether a description leaves all weights as they are: only the cache, or only a sparsity, is described."""
    if "quant_algo" in entry and "config_groups" not in entry:
        return not entry["quant_algo"]
    sparsity = entry.get("sparsity_config")
    stored = sparsity.get("format", "dense") if isinstance(sparsity, dict) else "dense"
    return "config_groups" in entry and not entry["config_groups"] and stored == "dense"


def _modelopt(entry: dict[str, Any]) -> Any:
    inner = entry.get("quantization")
    return {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else inner


def _of_method(method: str, entry: dict[str, Any]) -> Any:
    named = {_AWQ_NAMES.get(key, key): value for key, value in entry.items()}
    return {"quant_method": method, **named} if entry else None


_SIDE_FILES: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "hf_quant_config.json": _modelopt,  # NVIDIA ModelOpt
    "quantize_config.json": partial(_of_method, "gptq"),  # AutoGPTQ, GPTQModel
    "quant_config.json": partial(_of_method, "awq"),  # AutoAWQ
    "quantization_config.json": dict,  # AutoRound and others
}
"""Files next to config.json, and what makes an entry of `quantization_config` of their contents."""


def _object(file: Path) -> dict[str, Any]:
    try:
        value = read_json_file(file)
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror or error}. Check its permissions.") from None
    except ForeignTextError as error:
        raise ModelError(f"{file} {error}. Copy the file again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold an object that describes a quantisation. Copy the file again.")
    return value


_TELLING_NAMES: Final = (
    (".g_idx", "gptq"),
    (".weight_packed", "compressed-tensors"),
    (".quant_state.bitsandbytes__nf4", "bitsandbytes"),
    (".quant_state.bitsandbytes__fp4", "bitsandbytes"),
    (".SCB", "bitsandbytes"),
    ("_blocks", "mxfp4"),
    (".weight_scale_2", "modelopt"),
    (".weight_scale_inv", "fp8"),
    ("_weight_qdata", "torchao"),
    (".weight:qdata", "torchao"),
    (".biases", "mlx"),
)
"""Ends of the names of tensors that one quantiser alone stores."""
FULL_DTYPES: Final = ("F16", "BF16", "F32", "F64")
"""Stored dtypes of weights that are not quantised."""
_PACKED_DTYPES: Final = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2")
"""Dtypes that only quantised weights have."""


def _by_tensors(tensors: Mapping[str, TensorInfo]) -> QuantFormat | None:
    """The format that names and dtypes of tensors tell."""
    odd = [name for name, info in tensors.items() if info.dtype not in FULL_DTYPES]
    if not odd:
        return None
    for ending, method in _TELLING_NAMES:
        if (tensor := next((name for name in tensors if name.endswith(ending)), None)) is not None:
            return QuantFormat(method, {}, f"its tensor {tensor}")
    words = next((name for name in odd if name.endswith(".qweight")), None)
    if words is not None:
        # Each packs its words along another axis, and both pack zeros along the outputs.
        zeros = tensors.get(words.removesuffix("qweight") + "qzeros")
        same = zeros is not None and zeros.shape[-1:] == tensors[words].shape[-1:]
        return QuantFormat("awq" if same else "gptq", {}, f"its tensor {words}")
    small = next((name for name in odd if tensors[name].dtype in _PACKED_DTYPES), None)
    if small is not None:
        return QuantFormat("fp8" if "F8" in tensors[small].dtype else "unnamed", {}, _stored(small, tensors))
    scaled = next((name for name in odd if f"{name}_scale" in tensors or f"{name}.absmax" in tensors), None)
    if scaled is None:
        return None
    method = "bitsandbytes" if f"{scaled}.absmax" in tensors else "compressed-tensors"
    return QuantFormat(method, {}, _stored(scaled, tensors))


def _stored(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    return f"its tensor {name}, stored as {tensors[name].dtype}"
