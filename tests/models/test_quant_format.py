"""Which quantisation a folder holds, by its descriptions and tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ModelError
from batchgen.models.checkpoint.quant_format import find_quant_format
from batchgen.models.checkpoint.safetensors_header import TensorInfo

GROUPS = {"group_0": {"weights": {"num_bits": 8}}}

IN_CONFIG: dict[str, tuple[dict[str, Any], str, str]] = {
    "named": ({"quantization_config": {"quant_method": "GPTQ", "bits": 4}}, "gptq", "quantization_config"),
    "not an object": ({"quantization_config": "int8"}, "int8", "quantization_config"),
    "compression": ({"compression_config": {"config_groups": GROUPS}}, "compressed-tensors", "compression_config"),
    "bitsandbytes without a name": ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes", "quantization"),
    "fp8 without a name": ({"quantization_config": {"weight_block_size": [128, 128]}}, "fp8", "quantization_config"),
    "modelopt without a name": ({"quantization_config": {"quant_algo": "NVFP4"}}, "modelopt", "quantization_config"),
    "mlx": ({"quantization": {"group_size": 64, "bits": 4}}, "mlx", "quantization of config.json"),
    "torchao without a name": ({"quantization_config": {"quant_type": {"default": {}}}}, "torchao", "quantization"),
    "of the text": ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8", "text_config"),
    "deep": (
        {"thinker_config": {"text_config": {"quantization_config": {"quant_method": "awq"}}}},
        "awq",
        "thinker_config.text_config",
    ),
}

FULL: dict[str, dict[str, Any]] = {
    "nothing": {},
    "null": {"quantization_config": None},
    "empty": {"quantization_config": {}},
    "named none": {"quantization_config": {"quant_method": "none"}},
    "cache alone": {"quantization_config": {"config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}},
    "cache alone, modelopt": {"quantization_config": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
    "of a tower": {"vision_config": {"quantization_config": {"quant_method": "fp8"}}},
    "not a configuration": {"labels": {"quantization_config": {"quant_method": "fp8"}}},
}

SIDE_FILES: dict[str, tuple[str, Any, str, dict[str, Any]]] = {
    "modelopt": (
        "hf_quant_config.json",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        "modelopt",
        {"quant_algo": "FP8"},
    ),
    "gptq": ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": True}, "gptq", {"bits": 4}),
    "awq in the file of gptq": ("quantize_config.json", {"quant_method": "awq", "bits": 4}, "awq", {"bits": 4}),
    "awq": ("quant_config.json", {"w_bit": 4, "q_group_size": 64}, "awq", {"bits": 4, "group_size": 64}),
    "other": ("quantization_config.json", {"quant_method": "auto-round", "bits": 2}, "auto-round", {"bits": 2}),
}

NO_SIDE_FILES: dict[str, tuple[str, Any]] = {
    "cache alone": ("hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}),
    "empty": ("quantize_config.json", {}),
    "another file": ("quantise.json", {"bits": 4}),
}

TENSORS: dict[str, tuple[dict[str, tuple[str, tuple[int, ...]]], str | None]] = {
    "full": ({"a.weight": ("BF16", (8, 8)), "b.weight": ("F32", (8,))}, None),
    "a mask of GPT-2": ({"h.0.attn.bias": ("BOOL", (1, 1, 8, 8)), "a.weight": ("F32", (8, 8))}, None),
    "scales of a cache": ({"a.weight": ("BF16", (8, 8)), "a.k_scale": ("F32", ())}, None),
    "a scale in the model": ({"a.weight": ("BF16", (8, 8)), "a.weight_scale": ("F32", ())}, None),
    "fp8": ({"a.weight": ("F8_E4M3", (8, 8)), "a.weight_scale": ("F32", ())}, "fp8"),
    "fp8 in blocks": ({"a.weight": ("F8_E4M3", (8, 8)), "a.weight_scale_inv": ("F32", (1, 1))}, "fp8"),
    "fp8 without scales": ({"a.weight": ("F8_E5M2", (8, 8))}, "fp8"),
    "int8": ({"a.weight": ("I8", (8, 8)), "a.weight_scale": ("F32", (8, 1))}, "compressed-tensors"),
    "int8 of bitsandbytes": ({"a.weight": ("I8", (8, 8)), "a.SCB": ("F32", (8,))}, "bitsandbytes"),
    "nf4": ({"a.weight": ("U8", (32, 1)), "a.weight.absmax": ("F32", (1,))}, "bitsandbytes"),
    "gptq": ({"a.qweight": ("I32", (1, 8)), "a.qzeros": ("I32", (1, 1)), "a.g_idx": ("I32", (8,))}, "gptq"),
    "gptq without order": ({"a.qweight": ("I32", (8, 64)), "a.qzeros": ("I32", (1, 8))}, "gptq"),
    "awq": ({"a.qweight": ("I32", (64, 8)), "a.qzeros": ("I32", (1, 8))}, "awq"),
    "packed": ({"a.weight_packed": ("I32", (8, 1)), "a.weight_scale": ("BF16", (8, 1))}, "compressed-tensors"),
    "mxfp4": ({"experts.down_proj_blocks": ("U8", (4, 8, 2, 16))}, "mxfp4"),
    "nvfp4": ({"a.weight": ("U8", (8, 4)), "a.weight_scale": ("F8_E4M3", (8, 1)), "a.weight_scale_2": ("F32", ())},
              "modelopt"),
    "mlx": ({"a.weight": ("U32", (8, 1)), "a.scales": ("BF16", (8, 1)), "a.biases": ("BF16", (8, 1))}, "mlx"),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_CONFIG)
def test_described_by_config(name: str, tmp_path: Path) -> None:
    config, method, source = IN_CONFIG[name]
    found = find_quant_format(tmp_path, config)
    assert found is not None
    assert found.method == method
    assert source in found.source
    assert method in str(found)


@pytest.mark.parametrize("name", FULL)
def test_weights_stored_in_full(name: str, tmp_path: Path) -> None:
    assert find_quant_format(tmp_path, FULL[name]) is None


@pytest.mark.parametrize("name", SIDE_FILES)
def test_described_by_a_side_file(name: str, tmp_path: Path) -> None:
    file, content, method, settings = SIDE_FILES[name]
    (tmp_path / file).write_text(json.dumps(content))
    found = find_quant_format(tmp_path, {})
    assert found is not None
    assert (found.method, found.source) == (method, file)
    assert settings.items() <= found.settings.items()
    assert find_quant_format(tmp_path, IN_CONFIG["named"][0]) != found  # config.json has precedence


@pytest.mark.parametrize("name", NO_SIDE_FILES)
def test_side_files_that_describe_nothing(name: str, tmp_path: Path) -> None:
    file, content = NO_SIDE_FILES[name]
    (tmp_path / file).write_text(json.dumps(content))
    assert find_quant_format(tmp_path, {}) is None


@pytest.mark.parametrize("text", ['{"bits": ', "[4]"])
def test_damaged_side_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"quantize_config\.json"):
        find_quant_format(tmp_path, {})


@pytest.mark.parametrize("name", TENSORS)
def test_known_by_tensors(name: str, tmp_path: Path) -> None:
    stored, method = TENSORS[name]
    tensors = {key: TensorInfo(tmp_path, dtype, shape, 0, 0) for key, (dtype, shape) in stored.items()}
    found = find_quant_format(tmp_path, {}, tensors)
    assert (None if found is None else found.method) == method
    assert found is None or next(iter(stored)) in found.source or "tensor" in found.source
