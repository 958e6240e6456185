"""Recognises quantised tensors of a checkpoint by their names, dtypes and shapes; does not import torch.

Sizes of blocks and numbers of bits follow from shapes, so that layers of one checkpoint may differ. The checkpoint's
description decides only what shapes leave open.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.models.checkpoint.quant_format import FULL_DTYPES, QuantFormat
from batchgen.models.checkpoint.quantized_tensors import (
    BlockTensor,
    Layout,
    PackedTensor,
    QuantizedTensor,
    ScaledTensor,
    StoredTensor,
    aligned,
    block_size,
    granularity,
)
from batchgen.models.checkpoint.safetensors_header import TensorInfo
from batchgen.request.foreign_text import ForeignTextError, read_json, typed

METHODS: Final = (
    "fp8", "fbgemm_fp8", "gptq", "awq", "compressed-tensors", "mxfp4", "bitsandbytes", "modelopt", "auto-round",
    "quark", "torchao",
)  # fmt: skip
"""Methods whose tensors are recognised, by the names of `quant_method`."""
_ACTIVATIONS: Final = (
    ".input_scale", "activation_scale", ".input_scale_ub", ".input_zero_point", "input_global_scale", ".k_scale",
    ".v_scale", ".q_scale", ".kv_scale", ".prob_scale", ".output_scale", ".output_zero_point", ".weight_format",
)  # fmt: skip
"""Ends of tensors that only a computation with quantised activations or caches reads."""
_SMALL: Final = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "F4", "F6_E2M3", "F6_E3M2")
"""Dtypes of quantised values."""
_KINDS: Final = {"F8_E4M3": "FP8", "F8_E5M2": "FP8 (E5M2)", "I8": "int8"}
_BITS: Final = (4, 8, 2, 3)
_READABLE_INTS: Final = {"I32": "i", "I64": "q"}

_Taken = tuple[str, QuantizedTensor, tuple[str, ...]]
"""(name of the plain tensor, the tensor, names of stored tensors that are parts of it or say nothing else)."""


@dataclass(frozen=True, slots=True)
class PlainTensors:
    """The tensors of a quantised checkpoint as a model takes them."""

    method: str
    """The quantiser, by the name of `quant_method`."""
    tensors: Mapping[str, StoredTensor]
    labels: Mapping[str, int]
    """Encoding in words -> number of tensors, most frequent first."""
    spare: frozenset[str]
    """Tensors that a model may lack: biases of zeros, which some quantisers store for every layer."""

    def __str__(self) -> str:
        return f"{self.method}: {', '.join(self.labels)}"

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def plain_tensors(stored: Mapping[str, TensorInfo], form: QuantFormat) -> PlainTensors:
    """The plain tensors that `stored` holds, each as it is stored or as it is computed.

    Args:
        stored: headers of all weight files.
        form: their description.

    Raises:
        ModelError: a tensor's encoding is not supported or its parts do not fit; the message names it.
    """
    _refuse_settings(form)
    checkpoint = _Checkpoint(stored, form.method, form.settings)
    by_name: dict[str, StoredTensor] = {}
    for name, info in stored.items():
        taken = checkpoint.take(name, info)
        if taken is not None:
            plain, tensor, used = taken
            if plain in by_name:
                raise _refused(name, f"{plain} is stored twice")
            by_name[plain] = tensor
            checkpoint.used.update(used)
    quantized = [tensor for tensor in by_name.values() if isinstance(tensor, QuantizedTensor)]
    for name, info in stored.items():
        if name in checkpoint.used or (quantized and name.endswith(_ACTIVATIONS)):
            continue
        if info.dtype in _SMALL:
            raise _refused(name, f"it is stored as {info.dtype}, and no scale for it is stored that is known")
        if name.endswith((".weight_scale", "_scale_inv", ".weight_zero_point", ".weight_scale_2", ".pre_quant_scale")):
            raise _refused(name, "it belongs to no quantised tensor that is known")
        if name in by_name:
            raise _refused(name, "it is stored twice, quantised and in full")
        by_name[name] = info
    labels = Counter(tensor.label for tensor in quantized)
    return PlainTensors(form.method, by_name, dict(labels.most_common()), frozenset(checkpoint.zero_biases()))


def _refuse_settings(form: QuantFormat) -> None:
    """Refuse what a description announces and tensors do not show."""
    settings, reason = form.settings, None
    sparsity = settings.get("sparsity_config")
    if form.method not in METHODS:
        reason = "which is not supported"
    elif isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        reason = f"and its weights are stored sparsely ({str(sparsity['format'])[:80]}), which is not supported"
    elif settings.get("transform_config"):
        reason = "and its activations are transformed (transform_config), which is not supported"
    for key, known in _KNOWN_VALUES.get(form.method, {}).items():
        value = settings.get(key)
        if value is not None and str(value).lower() not in known:
            reason = f"and its {key} {str(value)[:80]} is not supported"
    if reason is not None:
        raise ModelError(f"The checkpoint is quantised ({form}), {reason}. Use the unquantised checkpoint.")


_KNOWN_VALUES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2", ""), "planar": ("false",)},
    "awq": {"version": ("gemm", "exllama", "ipex"), "checkpoint_format": ("gemm", "awq", "")},
    "auto-round": {"packing_format": ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_gptq", "auto_awq")},
}
"""Values of settings that name the form of the stored tensors."""


@dataclass(slots=True)
class _Checkpoint:
    """All stored tensors and the description."""

    stored: Mapping[str, TensorInfo]
    method: str
    settings: Mapping[str, Any]
    used: set[str] = field(default_factory=set)

    def take(self, name: str, info: TensorInfo) -> _Taken | None:
        """The quantised tensor whose main part is `name`; None if that is none."""
        for ending, read in _BY_ENDING.items():
            if name.endswith(ending):
                return read(self, name, name.removesuffix(ending))
        if info.dtype in _SMALL:
            return self._scaled(name, info)
        return None

    def need(self, name: str, main: str) -> TensorInfo:
        """A part that has to be there.

        Raises:
            ModelError: it is not.
        """
        if name not in self.stored:
            raise _refused(main, f"{name} is not stored")
        return self.stored[name]

    def optional(self, **parts: str) -> dict[str, TensorInfo]:
        """Parts that may be there, by role."""
        return {role: self.stored[name] for role, name in parts.items() if name in self.stored}

    def zero_biases(self) -> list[str]:
        """Biases of packed layers that hold only zeros."""
        biases = (name.removesuffix("qweight") + "bias" for name in self.stored if name.endswith(".qweight"))
        return [name for name in biases if name in self.stored and not any(_bytes(self.stored[name]))]

    def _scaled(self, name: str, info: TensorInfo) -> _Taken | None:
        """Values of 8 bits, or pairs of 4-bit floats, with scales in a tensor next to them."""
        base = name.removesuffix(".weight")
        names = (f"{name}_scale_inv", f"{name}_scale", f"{base}.SCB", f"{base}.scale")
        scale = next((at for at in names if at in self.stored), None)
        if scale is None or scale == name or info.dtype not in (*_KINDS, "U8"):
            return None
        parts = {"values": info, "scale": self.stored[scale]}
        parts |= self.optional(zero=f"{name}_zero_point", groups=f"{name}_g_idx", global_scale=f"{name}_scale_2")
        order = self.stored.get(f"{base}.weight_format")
        if order is not None and any(_bytes(order)):
            raise _refused(name, "its values are in the order of one kernel (weight_format)")
        if info.dtype == "U8" and "global_scale" not in parts and parts["scale"].dtype not in ("U8", "F8_E8M0"):
            return None
        if "zero" in parts and not any(_bytes(parts["zero"])):
            parts.pop("zero")
        if "zero" in parts and self.symmetric():
            raise _refused(name, "its zero points are not those of symmetric values, which its description names")
        tensor = self.scaled(name, parts, pairs=info.dtype == "U8", factor=1 / 127 if scale.endswith(".SCB") else 1.0)
        used = (name, scale, f"{name}_zero_point", f"{name}_g_idx", f"{name}_scale_2", f"{name}_shape")
        return name, tensor, used

    def scaled(
        self,
        name: str,
        parts: dict[str, TensorInfo],
        *,
        pairs: bool = False,
        factor: float = 1.0,
        divides: bool = False,
    ) -> ScaledTensor:
        """Values with scales, whose blocks follow from the shapes."""
        values, scale = parts["values"], parts["scale"]
        shape = (*values.shape[:-1], values.shape[-1] * 2) if pairs and values.shape else values.shape
        axes = aligned(scale.shape, shape)
        known = self._known_blocks(len(shape))
        blocks = tuple(map(block_size, shape, axes, known)) if axes else ()
        if not shape or not axes or 0 in blocks:
            raise _refused(name, f"its scale has shape {list(scale.shape)} where its values have {list(shape)}")
        for role in ("zero", "groups"):
            expected = shape[-1] if role == "groups" else math.prod(scale.shape)
            if role in parts and math.prod(parts[role].shape) != expected:
                raise _refused(name, f"the shape of its {role} is {list(parts[role].shape)}")
        exponents = scale.dtype in ("U8", "F8_E8M0")
        of_pairs = "MXFP4" if exponents else "NVFP4"
        kind = of_pairs if pairs else _KINDS[values.dtype]
        label = f"{kind} {granularity(shape, blocks)}"
        return ScaledTensor(shape, parts, label, shape, axes, blocks, pairs, exponents, divides, factor)

    def _known_blocks(self, axes: int) -> tuple[int | None, ...]:
        """Size of a block along each axis by the description, None where it names none."""
        named = self.settings.get("weight_block_size") or _group_setting(self.settings, "block_structure")
        if isinstance(named, str):
            named = [int(part) for part in named.lower().split("x") if part.isdigit()]
        if isinstance(named, list) and len(named) == 2 and all(type(size) is int and size > 0 for size in named):
            return (*(None,) * (axes - 2), *named)[-axes:]
        return (*(None,) * (axes - 1), self.group_size())

    def group_size(self) -> int | None:
        """Inputs of a group by the description."""
        size = self.settings.get("group_size") or _group_setting(self.settings, "group_size")
        return size if type(size) is int and size > 0 else None

    def symmetric(self) -> bool | None:
        """Whether the description says that codes are symmetric, of all layers; None if it does not say."""
        each = [entry for key in ("dynamic", "extra_config") for entry in _values(self.settings.get(key))]
        if any("sym" in entry for entry in each if isinstance(entry, dict)):
            return None
        zeros = self.settings.get("zero_point")
        said = (self.settings.get("sym"), _group_setting(self.settings, "symmetric"), zeros is False or None)
        return next((each for each in said if type(each) is bool), None)


def _values(entry: Any) -> list[Any]:
    return list(entry.values()) if isinstance(entry, dict) else []


def _group_setting(settings: Mapping[str, Any], key: str) -> Any:
    """A setting of the weights that all groups of a compressed-tensors description share; None without one."""
    weights = [entry.get("weights") for entry in _values(settings.get("config_groups")) if isinstance(entry, dict)]
    values = [weight.get(key) for weight in weights if isinstance(weight, dict)]
    return values[0] if values and all(value == values[0] for value in values) else None


def _compressed(checkpoint: _Checkpoint, name: str, base: str) -> _Taken:
    """Words of small integers (pack-quantized), or pairs of 4-bit floats, of compressed-tensors."""
    info, plain = checkpoint.stored[name], f"{base}.weight"
    scale = checkpoint.need(f"{plain}_scale", name)
    used = tuple(f"{plain}_{each}" for each in ("packed", "scale", "shape", "zero_point", "g_idx", "global_scale"))
    if info.dtype == "U8":
        parts = {"values": info, "scale": scale} | checkpoint.optional(global_scale=f"{plain}_global_scale")
        if scale.dtype == "F8_E4M3":
            checkpoint.need(f"{plain}_global_scale", name)
        return plain, checkpoint.scaled(name, parts, pairs=True, divides=True), used
    parts = {"words": info, "scale": scale}
    parts |= checkpoint.optional(zero=f"{plain}_zero_point", groups=f"{plain}_g_idx")
    shape = _ints(checkpoint.need(f"{plain}_shape", name), name)
    if info.dtype != "I32" or len(shape) != 2 or len(info.shape) != 2 or info.shape[0] != shape[0]:
        raise _refused(name, f"it is stored as {info.dtype} {list(info.shape)} for a tensor of shape {shape}")
    rows, inputs = shape
    bits = next((each for each in range(1, 9) if -(-inputs * each // 32) == info.shape[1]), 0)
    named = _group_setting(checkpoint.settings, "num_bits")
    if type(named) is int and 1 <= named <= 8 and -(-inputs * named // 32) == info.shape[1]:
        bits = named
    axes = aligned(scale.shape, (rows, inputs)) or (0, 0)
    group = block_size(inputs, axes[1], checkpoint.group_size())
    zero = parts.get("zero")
    fits = zero is None or zero.shape == (-(-rows * bits // 32), axes[1])
    if not bits or not group or axes[0] != rows or not fits:
        raise _refused(name, f"its scale {list(scale.shape)} or its zeros do not fit the shape {shape}")
    label = f"int{bits} {granularity((rows, inputs), (1, group))}"
    symmetric = checkpoint.symmetric() is True
    packed = PackedTensor((rows, inputs), parts, label, bits, "columns", group, symmetric=symmetric)
    return plain, packed, used


def _by_inputs(checkpoint: _Checkpoint, name: str, base: str) -> _Taken:
    """GPTQ and AWQ: words of small integers, stored by inputs."""
    words = checkpoint.stored[name]
    parts = {
        "words": words,
        "scale": checkpoint.need(f"{base}.scales", name),
        "zero": checkpoint.need(f"{base}.qzeros", name),
    }
    parts |= checkpoint.optional(groups=f"{base}.g_idx")
    scale, zero = parts["scale"].shape, parts["zero"].shape
    if any(part.dtype != "I32" for role, part in parts.items() if role != "scale") or not (
        len(words.shape) == len(scale) == len(zero) == 2 and scale[0] == zero[0] > 0
    ):
        raise _refused(name, f"it is stored as {words.dtype} {list(words.shape)} with scales {list(scale)}")
    outputs = scale[1]
    layout: Layout = "gptq"
    if zero[1] == words.shape[1] and outputs == 8 * words.shape[1]:
        layout, bits, inputs = "awq", 4, words.shape[0]
    else:
        fits = words.shape[1] == outputs
        bits = next((each for each in _BITS if fits and -(-outputs * each // 32) == zero[1]), 0)
        inputs = words.shape[0] * 32 // bits if bits else 0
    group = block_size(inputs, scale[0], checkpoint.group_size())
    if not bits or not group or ("groups" in parts and parts["groups"].shape != (inputs,)):
        raise _refused(name, f"its shape {list(words.shape)} does not fit scales of {list(scale)}")
    symmetric = checkpoint.symmetric()
    less_one = None if symmetric is False else _symmetric_less_one(parts["zero"], bits, outputs)
    if symmetric and (less_one is None or (less_one and layout == "awq")):
        raise _refused(name, "its zero points are not those of symmetric codes, which its description names")
    if less_one is None:
        if checkpoint.method not in ("gptq", "awq", "auto-round") or not checkpoint.settings:
            raise _refused(name, "no description says which version of its format it has (quantize_config.json)")
        less_one = checkpoint.settings.get("checkpoint_format") != "gptq_v2"
    label = f"int{bits} {granularity((outputs, inputs), (1, group))}"
    used = (name, f"{base}.scales", f"{base}.qzeros", f"{base}.g_idx")
    packed = PackedTensor((outputs, inputs), parts, label, bits, layout, group, less_one, symmetric is True)
    return f"{base}.weight", packed, used


def _symmetric_less_one(zero: TensorInfo, bits: int, outputs: int) -> bool | None:
    """Whether the zeros of symmetric codes are stored less one; None if the first row holds other zeros."""
    within = (1 << bits * outputs) - 1  # the last word may have room for more codes
    row = int.from_bytes(_bytes(zero, zero.nbytes // zero.shape[0]), "little") & within
    code, others = divmod(row, within // ((1 << bits) - 1))
    half = 1 << (bits - 1)
    return None if others or code not in (half - 1, half) else code < half


def _torchao(checkpoint: _Checkpoint, name: str, base: str) -> _Taken:
    """Values of 8 bits of torchao, which names the parts of `layer.weight` by `layer._weight_` or `layer.weight:`."""
    prefix = name.removesuffix("qdata")
    plain = f"{base.removesuffix(':')}" if base.endswith(":") else f"{base.removesuffix('_weight_')}weight"
    values, scale = checkpoint.stored[name], checkpoint.need(f"{prefix}scale", name)
    other = next((part for part in _TORCHAO_OTHERS if f"{prefix}{part}" in checkpoint.stored), None)
    if other is not None:
        raise _refused(name, f"its part {other} is not known")
    if values.dtype not in _KINDS or scale.dtype not in FULL_DTYPES or _holds_int4(checkpoint.settings):
        raise _refused(name, f"it is {values.dtype} with {scale.dtype} scales, in the layout of one kernel")
    parts = {"values": values, "scale": scale}
    parts |= checkpoint.optional(zero=f"{prefix}zero_point")
    return plain, checkpoint.scaled(name, parts), tuple(f"{prefix}{part}" for part in ("qdata", "scale", "zero_point"))


_TORCHAO_OTHERS: Final = ("scale_and_zero", "per_tensor_scale", "act_pre_scale")
"""Parts of tensors that torchao lays out for a kernel, or whose inputs are scaled."""


def _holds_int4(settings: Any) -> bool:
    """Whether a description of torchao names an encoding of two values a byte, whose shapes may look like others."""
    if isinstance(settings, dict):
        kind = settings.get("_type")
        return (isinstance(kind, str) and "Int4" in kind) or any(map(_holds_int4, settings.values()))
    return False


def _expert_blocks(checkpoint: _Checkpoint, name: str, base: str) -> _Taken:
    """MXFP4 of gpt-oss: for each expert and output, groups of 16 bytes and an exponent each; inputs come first."""
    values, scale = checkpoint.stored[name], checkpoint.need(f"{base}_scales", name)
    if values.dtype != "U8" or scale.dtype != "U8" or values.shape != (*scale.shape, 16) or len(scale.shape) != 3:
        raise _refused(name, f"its shape {list(values.shape)} does not fit scales of {list(scale.shape)}")
    experts, outputs, groups = scale.shape
    stored = (experts, outputs, 32 * groups)
    tensor = ScaledTensor(
        shape=(experts, 32 * groups, outputs),
        parts={"values": values, "scale": scale},
        label="MXFP4 in groups of 32",
        stored_shape=stored,
        scale_shape=scale.shape,
        blocks=(1, 1, 32),
        pairs=True,
        exponents=True,
        transposed=True,
    )
    return base, tensor, (name, f"{base}_scales")


def _bitsandbytes(checkpoint: _Checkpoint, name: str, plain: str) -> _Taken:
    """Four bits of bitsandbytes: a table of 16 values, and a JSON object in a tensor."""
    try:
        state = typed(read_json(_bytes(checkpoint.stored[name])), {"shape": list, "blocksize": int})
        shape, block = tuple(map(int, state["shape"])), int(state["blocksize"])
        nested = int(state.get("nested_blocksize", 1))
        offset = float(state.get("nested_offset", 0.0))
    except (ForeignTextError, KeyError, TypeError, ValueError) as error:
        raise _refused(name, f"it does not describe a quantised tensor ({error})") from None
    parts = {
        "values": checkpoint.need(plain, name),
        "table": checkpoint.need(f"{plain}.quant_map", name),
        "absmax": checkpoint.need(f"{plain}.absmax", name),
    }
    parts |= checkpoint.optional(absmax_table=f"{plain}.nested_quant_map", absmax_scale=f"{plain}.nested_absmax")
    size, counts = math.prod(shape), {role: math.prod(part.shape) for role, part in parts.items()}
    blocks = -(-size // block) if block > 0 else 0
    stored = parts["values"].dtype == "U8" and parts["values"].shape == (counts["values"], 1)
    fits = stored and (counts["values"], counts["absmax"], counts["table"]) == (-(-size // 2), blocks, 16)
    if "absmax_scale" in parts:
        fits = fits and nested > 0 and counts["absmax_scale"] == -(-blocks // nested)
        fits = fits and counts.get("absmax_table") == 256
    small = parts["absmax"].dtype == "U8"
    if not fits or block % 2 or not shape or small != ("absmax_scale" in parts):
        raise _refused(name, f"its parts do not fit the shape {list(shape)} and blocks of {block}")
    kind = "NF4" if name.endswith("nf4") else "FP4"
    endings = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
    used = (name, *(f"{plain}{ending}" for ending in endings))
    return plain, BlockTensor(shape, parts, f"{kind} in groups of {block}", block, nested, offset), used


_BY_ENDING: Final[dict[str, Callable[[_Checkpoint, str, str], _Taken]]] = {
    ".weight_packed": _compressed,
    ".qweight": _by_inputs,
    "_blocks": _expert_blocks,
    "qdata": _torchao,
    ".quant_state.bitsandbytes__nf4": _bitsandbytes,
    ".quant_state.bitsandbytes__fp4": _bitsandbytes,
}


def _bytes(info: TensorInfo, size: int | None = None) -> bytes:
    """The stored bytes of a tensor, or the first `size` of them."""
    try:
        with info.file.open("rb") as stream:
            stream.seek(info.start)
            return stream.read(info.nbytes if size is None else size)
    except OSError as error:
        raise ModelError(f"Cannot read {info.file}: {error.strerror or error}. Copy the file again.") from None


def _ints(info: TensorInfo, name: str) -> list[int]:
    code = _READABLE_INTS.get(info.dtype)
    raw = _bytes(info)
    if code is None or len(raw) != info.nbytes or info.nbytes > 64:
        raise _refused(name, f"its shape is stored as {info.dtype}")
    return list(struct.unpack(f"<{math.prod(info.shape)}{code}", raw))


def _refused(name: str, reason: str) -> ModelError:
    return ModelError(f"{name[:200]} is quantised in a form that is not supported: {reason}. Use another checkpoint.")
