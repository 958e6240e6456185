"""Tiny checkpoints in the formats of quantisers, packed straight from their documents, each with its plain twin.

A packer takes a float32 matrix [O, I] and gives the tensors that the format stores, by the ends of their names, and the
float32 matrix that they mean. Bits are packed one value after another, and values are computed one block after another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.tiny import save_tiny

Stored = dict[str, Tensor]
Packer = Callable[[Tensor], tuple[Stored, Tensor]]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def bit_string(codes: list[int], bits: int) -> list[int]:
    """Signed 32-bit words that hold the codes one after another, lowest bits first."""
    whole = sum(code << (bits * at) for at, code in enumerate(codes))
    words = [(whole >> (32 * at)) & 0xFFFFFFFF for at in range(-(-len(codes) * bits // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def packed_rows(codes: Tensor, bits: int) -> Tensor:
    """[R, C] -> int32 [R, C x bits / 32]."""
    return torch.tensor([bit_string(row, bits) for row in codes.tolist()], dtype=torch.int32)


def nearest(values: Tensor, table: tuple[float, ...]) -> Tensor:
    return (values[..., None] - torch.tensor(table)).abs().argmin(-1)


def scaled(
    rows: int | None, columns: int | None, dtype: torch.dtype, most: float, ending: str, scale_dtype: torch.dtype
) -> Packer:
    """Values of 8 bits with a scale for each block of `rows` x `columns`; None: all of them."""

    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        height, width = rows or weight.shape[0], columns or weight.shape[1]
        scale = torch.empty(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
        values, plain = torch.empty(weight.shape, dtype=dtype), torch.empty_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
                one = (weight[part].abs().max() / most).to(scale_dtype)
                scaled = (weight[part] / one.float()).clamp(-most, most)
                values[part] = (scaled if dtype.is_floating_point else scaled.round()).to(dtype)
                plain[part] = values[part].float() * one.float()
                scale[i, j] = one.float()
        whole = rows is None and columns is None
        return {"weight": values, ending: (scale[0, 0] if whole else scale).to(scale_dtype)}, plain

    return pack


def bitsandbytes_int8(weight: Tensor) -> tuple[Stored, Tensor]:
    most = weight.abs().amax(1)
    values = (weight * 127 / most[:, None]).round().to(torch.int8)
    plain = values.float() * (most / 127)[:, None]
    return {"weight": values, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}, plain


def int8_with_zeros(weight: Tensor) -> tuple[Stored, Tensor]:
    """compressed-tensors, one scale and zero for each row."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round().to(torch.int8)
    values = (weight / scale + zero).round().clamp(-128, 127).to(torch.int8)
    plain = (values.float() - zero.float()) * scale
    return {"weight": values, "weight_scale": scale, "weight_zero_point": zero}, plain


def torchao(pack: Packer, prefix: str = "_weight_") -> Packer:
    """The parts that `pack` makes, by torchao's names."""
    names = {"weight": "qdata", "weight_scale": "scale", "weight_zero_point": "zero_point"}

    def renamed(weight: Tensor) -> tuple[Stored, Tensor]:
        parts, plain = pack(weight)
        return {f"{prefix}{names[name]}": part for name, part in parts.items()}, plain

    return renamed


def grouped(weight: Tensor, bits: int, group: int, of: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [O, I], scales [O, G] in float16 and zeros [O, G]; `of` [I] is each input's group."""
    of = torch.arange(weight.shape[1]) // group if of is None else of
    top, groups = (1 << bits) - 1, int(of.max()) + 1
    codes = torch.empty(weight.shape, dtype=torch.int64)
    scales, zeros = torch.empty(weight.shape[0], groups), torch.empty(weight.shape[0], groups, dtype=torch.int64)
    for g in range(groups):
        part = weight[:, of == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = ((high - low) / top).half().float()
        zeros[:, g] = (-low / scale).round().clamp(0, top).long()
        codes[:, of == g] = (part / scale[:, None] + zeros[:, g, None]).round().clamp(0, top).long()
        scales[:, g] = scale
    return codes, scales.half(), zeros


def meant(codes: Tensor, scales: Tensor, zeros: Tensor, of: Tensor) -> Tensor:
    return (codes.float() - zeros.float()[:, of]) * scales.float()[:, of]


def gptq(
    bits: int,
    group: int,
    *,
    act_order: bool = False,
    version: int = 1,
    bias: bool = False,
    symmetric: bool = False,
) -> Packer:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        of = torch.arange(weight.shape[1]) // group
        if act_order:
            of = of[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[0]))]
        codes, scales, zeros = grouped(weight, bits, group, of)
        # A stored zero of -1 would borrow from its neighbours, so the first version needs zeros of 1 or more.
        zeros = torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros.clamp(min=1)
        stored = {
            "qweight": packed_rows(codes, bits).T.contiguous(),
            "qzeros": packed_rows(zeros.T - (2 - version), bits),
            "scales": scales.T.contiguous(),
            "g_idx": of.int(),
        }
        if bias:
            stored["bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
        return stored, meant(codes, scales, zeros, of)

    return pack


def awq(weight: Tensor, *, symmetric: bool = False) -> tuple[Stored, Tensor]:
    of = torch.arange(weight.shape[1]) // 32
    codes, scales, zeros = grouped(weight, 4, 32)
    zeros = torch.full_like(zeros, 8) if symmetric else zeros

    def words(matrix: Tensor) -> Tensor:  # [R, C] -> [R, C / 8], columns of a word in AutoAWQ's order
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        mixed = torch.cat([matrix[:, [at + k for k in order]] for at in range(0, matrix.shape[1], 8)], 1)
        return packed_rows(mixed, 4)

    stored = {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T.contiguous()}
    return stored, meant(codes, scales, zeros, of)


def pack_quantized(bits: int, group: int, *, zeros: bool = False, act_order: bool = False) -> Packer:
    """compressed-tensors' words."""

    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        size = group or weight.shape[1]
        of = torch.arange(weight.shape[1]) // size
        if act_order:
            of = of[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))]
        codes, scales, zero = grouped(weight, bits, size, of)
        if not zeros:
            zero = torch.full_like(zero, 1 << (bits - 1))
        stored = {"weight_packed": packed_rows(codes, bits), "weight_scale": scales.bfloat16()}
        stored["weight_shape"] = torch.tensor(weight.shape)
        if zeros:
            stored["weight_zero_point"] = packed_rows(zero.T, bits).T.contiguous()
        if act_order:
            stored["weight_g_idx"] = of.int()
        return stored, meant(codes, scales.bfloat16(), zero, of)

    return pack


def fp4(weight: Tensor, group: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes with the first value in the low half, plain values) for scales [O, G] in float32."""
    wide = scale.repeat_interleave(group, 1)
    codes = nearest(weight / wide, E2M1)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), torch.tensor(E2M1)[codes] * wide


def nvfp4(weight: Tensor, *, modelopt: bool = False) -> tuple[Stored, Tensor]:
    most = weight.unflatten(1, (-1, 16)).abs().amax(-1)  # [O, G]
    whole = 448 * 6 / weight.abs().max()
    scale = (most / 6 * whole).to(torch.float8_e4m3fn)
    if modelopt:
        factor = 1 / whole
        values, plain = fp4(weight, 16, scale.float() * factor)
        return {"weight": values, "weight_scale": scale, "weight_scale_2": factor}, plain
    values, plain = fp4(weight, 16, scale.float() / whole)
    return {"weight_packed": values, "weight_scale": scale, "weight_global_scale": whole[None]}, plain


def exponents(weight: Tensor, group: int = 32) -> Tensor:
    """Powers of two for groups of 32, as exponents with a bias of 127."""
    most = weight.unflatten(-1, (-1, group)).abs().amax(-1)
    return (most / 6).log2().ceil().add(127).to(torch.uint8)


def mxfp4(weight: Tensor, ending: str = "weight_packed") -> tuple[Stored, Tensor]:
    stored = exponents(weight)
    values, plain = fp4(weight, 32, torch.tensor(2.0) ** (stored.float() - 127))
    return {ending: values, "weight_scale": stored}, plain


def bitsandbytes_4bit(table: tuple[float, ...], kind: str, *, nested: bool) -> Packer:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        flat, block = weight.flatten(), 64
        absmax = torch.stack([flat[at : at + block].abs().max() for at in range(0, len(flat), block)])
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [*weight.shape]}
        stored: Stored = {"weight.quant_map": torch.tensor(table)}
        if nested:
            tables, offset, size = torch.linspace(-1, 1, 256), float(absmax.mean()), 256
            most = torch.stack([(absmax[at : at + size] - offset).abs().max() for at in range(0, len(absmax), size)])
            wide = most.repeat_interleave(size)[: len(absmax)]
            codes = ((absmax - offset) / wide)[:, None].sub(tables).abs().argmin(1)
            absmax = tables[codes] * wide + offset
            stored |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_quant_map": tables}
            stored["weight.nested_absmax"] = most
            state |= {"nested_blocksize": size, "nested_offset": offset, "nested_dtype": "float32"}
        else:
            stored["weight.absmax"] = absmax
        wide = absmax.repeat_interleave(block)[: len(flat)]
        codes = nearest(flat / wide, table)
        stored["weight"] = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
        text = json.dumps(state).encode()
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor([*text], dtype=torch.uint8)
        return stored, (torch.tensor(table)[codes] * wide).view(weight.shape)

    return pack


@dataclass(frozen=True, slots=True)
class Case:
    """A format: its packer, its description and what the program calls it."""

    pack: Packer
    config: Mapping[str, Any]
    label: str
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Further tensors of each layer, which text does not need."""


def described(method: str, **settings: Any) -> dict[str, Any]:
    return {"quant_method": method, **settings}


def by_groups(kind: str, **weights: Any) -> dict[str, Any]:
    """A description of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return described("compressed-tensors", format=kind, config_groups={"group_0": group}, ignore=["lm_head"])


E4M3, E5M2, I8, F32, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float32, torch.bfloat16
ONE = torch.tensor(0.25)
CASES: dict[str, Case] = {
    "fp8 blocks": Case(
        scaled(40, 24, E4M3, 448, "weight_scale_inv", F32),
        described("fp8", weight_block_size=[40, 24], activation_scheme="dynamic"),
        "FP8 in blocks of 40 x 24",
    ),
    "fp8 blocks, undescribed size": Case(
        scaled(16, 32, E4M3, 448, "weight_scale_inv", BF16), described("fp8"), "FP8 in blocks of 16 x 32"
    ),
    "fp8 tensor": Case(
        scaled(None, None, E4M3, 448, "weight_scale_inv", BF16),
        described("fp8", activation_scheme="static"),
        "FP8 per tensor",
        {"activation_scale": ONE},
    ),
    "fp8 channel": Case(
        scaled(1, None, E4M3, 448, "weight_scale", F32),
        described("fbgemm_fp8"),
        "FP8 per channel",
        {"input_scale_ub": ONE[None]},
    ),
    "fp8 e5m2": Case(scaled(None, None, E5M2, 57344, "weight_scale", F32), described("fp8"), "FP8 (E5M2) per tensor"),
    "fp8 modelopt": Case(
        scaled(None, None, E4M3, 448, "weight_scale", F32),
        described("modelopt", quant_algo="FP8"),
        "FP8 per tensor",
        {"input_scale": ONE},
    ),
    "gptq": Case(gptq(4, 32), described("gptq", bits=4, group_size=32, desc_act=False), "int4 in groups of 32"),
    "gptq act-order": Case(
        gptq(4, 32, act_order=True), described("gptq", bits=4, group_size=32, desc_act=True), "int4 in groups of 32"
    ),
    "gptq 8 bits": Case(gptq(8, 16), described("gptq", bits=8, group_size=16), "int8 in groups of 16"),
    "gptq 3 bits": Case(gptq(3, 32), described("gptq", bits=3, group_size=32), "int3 in groups of 32"),
    "gptq 2 bits": Case(gptq(2, 32), described("gptq", bits=2, group_size=32), "int2 in groups of 32"),
    "gptq second version": Case(
        gptq(4, 32, version=2),
        described("gptq", bits=4, group_size=32, checkpoint_format="gptq_v2"),
        "int4 in groups of 32",
    ),
    "gptq zero biases": Case(gptq(4, 32, bias=True), described("gptq", bits=4, group_size=32), "int4 in groups of 32"),
    "awq symmetric": Case(
        lambda weight: awq(weight, symmetric=True),
        described("awq", bits=4, group_size=32, version="gemm", zero_point=False),
        "int4 in groups of 32",
    ),
    "awq": Case(awq, described("awq", bits=4, group_size=32, version="gemm", zero_point=True), "int4 in groups of 32"),
    "compressed int8": Case(
        scaled(1, None, I8, 127, "weight_scale", BF16),
        by_groups("int-quantized", num_bits=8, type="int", strategy="channel"),
        "int8 per channel",
    ),
    "compressed int8 with zeros": Case(
        int8_with_zeros, by_groups("int-quantized", num_bits=8, type="int", symmetric=False), "int8 per channel"
    ),
    "compressed int8 groups": Case(
        scaled(1, 32, I8, 127, "weight_scale", F32),
        by_groups("naive-quantized", num_bits=8, type="int", strategy="group", group_size=32),
        "int8 in groups of 32",
    ),
    "compressed fp8": Case(
        scaled(1, None, E4M3, 448, "weight_scale", BF16),
        by_groups("float-quantized", num_bits=8, type="float", strategy="channel"),
        "FP8 per channel",
        {"k_scale": ONE, "input_scale": ONE},
    ),
    "compressed fp8 blocks": Case(
        scaled(40, 40, E4M3, 448, "weight_scale", BF16),
        by_groups("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[40, 40]),
        "FP8 in blocks of 40 x 40",
    ),
    "compressed int4": Case(
        pack_quantized(4, 32),
        by_groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        "int4 in groups of 32",
    ),
    "compressed int4 with zeros": Case(
        pack_quantized(4, 32, zeros=True),
        by_groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
        "int4 in groups of 32",
    ),
    "compressed int4 act-order": Case(
        pack_quantized(4, 32, act_order=True),
        by_groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, actorder="group"),
        "int4 in groups of 32",
    ),
    "compressed int3 per channel": Case(
        pack_quantized(3, 0, zeros=True),
        by_groups("pack-quantized", num_bits=3, type="int", strategy="channel", symmetric=False),
        "int3 per channel",
    ),
    "nvfp4": Case(
        nvfp4,
        by_groups("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "NVFP4 in groups of 16",
        {"input_global_scale": ONE[None]},
    ),
    "nvfp4 modelopt": Case(
        lambda weight: nvfp4(weight, modelopt=True),
        described("modelopt", quant_algo="NVFP4", group_size=16),
        "NVFP4 in groups of 16",
        {"input_scale": ONE},
    ),
    "mxfp4 compressed": Case(
        mxfp4,
        by_groups("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        "MXFP4 in groups of 32",
    ),
    "mxfp4 quark": Case(lambda weight: mxfp4(weight, "weight"), described("quark"), "MXFP4 in groups of 32"),
    "torchao float8": Case(
        torchao(scaled(1, None, E4M3, 448, "weight_scale", F32)),
        described("torchao", quant_type={"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}}),
        "FP8 per channel",
    ),
    "torchao int8 with zeros": Case(torchao(int8_with_zeros), described("torchao", quant_type={}), "int8 per channel"),
    "torchao int8 groups": Case(
        torchao(scaled(1, 32, I8, 127, "weight_scale", BF16), "weight:"),
        described("torchao", quant_type={}),
        "int8 in groups of 32",
    ),
    "bitsandbytes int8": Case(bitsandbytes_int8, described("bitsandbytes", load_in_8bit=True), "int8 per channel"),
    "bitsandbytes nf4": Case(
        bitsandbytes_4bit(NF4, "nf4", nested=False),
        described("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "NF4 in groups of 64",
    ),
    "bitsandbytes nf4 nested": Case(
        bitsandbytes_4bit(NF4, "nf4", nested=True),
        described("bitsandbytes", load_in_4bit=True, bnb_4bit_use_double_quant=True),
        "NF4 in groups of 64",
    ),
}
"""Formats whose layers are matrices."""


def int8_inputs(**inputs: Any) -> dict[str, Any]:
    """A description of compressed-tensors whose layers have weights and inputs of int8."""
    described = by_groups("int-quantized", num_bits=8, type="int", strategy="channel")
    described["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", **inputs}
    return described


W8A8: dict[str, Case] = {
    "per token": Case(
        scaled(1, None, I8, 127, "weight_scale", BF16),
        int8_inputs(strategy="token", dynamic=True, symmetric=True),
        "int8 per channel",
    ),
    "static": Case(
        scaled(None, None, I8, 127, "weight_scale", F32),
        int8_inputs(strategy="tensor", dynamic=False, symmetric=True),
        "int8 per tensor",
        {"input_scale": ONE},
    ),
    "in groups": Case(
        scaled(1, 64, I8, 127, "weight_scale", BF16),
        int8_inputs(strategy="token", dynamic=True, symmetric=True),
        "int8 in groups of 64",
    ),
    "torchao": Case(
        torchao(scaled(1, None, I8, 127, "weight_scale", F32)),
        described("torchao", quant_type={"default": {"_type": "Int8DynamicActivationInt8WeightConfig", "_data": {}}}),
        "int8 per channel",
    ),
}
"""Formats whose linear layers have inputs of int8, too."""


def save_quantised(case: Case, model_type: str, folder: Path, **overrides: Any) -> tuple[Path, Path]:
    """Write a tiny checkpoint with its projections quantised, and its plain twin in float32; returns both folders."""
    plain = save_tiny(model_type, folder / "plain", **overrides)
    return quantise_folder(case, folder / "quantised", plain), plain


def quantise_folder(case: Case, folder: Path, plain: Path) -> Path:
    """Write the checkpoint `plain` to `folder` with its projections quantised, and what they mean to `plain`."""
    tensors = load_file(plain / "model.safetensors")
    stored: Stored = {}
    for name in list(tensors):
        base = name.removesuffix(".weight")
        if not base.endswith(("_proj", ".w1", ".w2", ".w3")) or tensors[name].dim() != 2:
            stored[name] = tensors[name]
            continue
        parts, tensors[name] = case.pack(tensors[name])
        stored |= {f"{base}.{ending}": part.contiguous() for ending, part in parts.items()}
        stored |= {f"{base}.{ending}": part.clone() for ending, part in case.extra.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return write_stored(stored, case.config, plain, folder)


def write_stored(stored: Stored, config: Mapping[str, Any], plain: Path, folder: Path) -> Path:
    """Write a quantised checkpoint with the configuration of `plain`."""
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(described))
    return folder
