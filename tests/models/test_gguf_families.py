"""GGUF files of every architecture: the model is that of the checkpoint which the file was made from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import batchgen
from batchgen.errors import ModelError
from batchgen.gguf.config import gguf_config
from batchgen.gguf.family import families, missing
from batchgen.gguf.header import read_gguf
from batchgen.gguf.tensors import hub_tensors
from tests.engine.test_hybrid import TYPES as HYBRIDS
from tests.models.dense_attention import DenseCache
from tests.models.gguf_files import check_file, write_gguf, write_tiny
from tests.models.gguf_layout import ARCHITECTURES, fused
from tests.models.loading import load_model
from tests.models.packed import packed_logits, random_sequences
from tests.models.tiny import VOCAB, tiny_model

torch.set_num_threads(1)

FULL: dict[str, Any] = {"use_sliding_window": False}
SCALED: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
"""Queries that are scaled from position 8 on."""
MISTRAL4: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 1, "n_shared_experts": 1, "rope_parameters": SCALED,
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {**HYBRIDS["nemotron_h"], "sliding_window": None}
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "smollm3"), FULL),
    **{model_type: {"sliding_window": None} for model_type in ("mistral", "mixtral", "starcoder2")},
    "qwen3_moe": {**FULL, "norm_topk_prob": True},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama4_text": {"intermediate_size_mlp": 80, "interleave_moe_layer_step": 2},
    "ministral3": {"sliding_window": None, "rope_parameters": SCALED},
    "gemma3n_text": {"altup_num_inputs": 3},
    "gemma4_text": {"global_head_dim": 32},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "mistral4": MISTRAL4,
    "afmoe": {"mup_enabled": True},
    "phimoe": {"lm_head_bias": True},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granitemoeshared": {"shared_intermediate_size": 48},
    **{
        model_type: HYBRIDS[model_type]
        for model_type in (
            "lfm2",
            "lfm2_moe",
            "qwen3_next",
            "qwen3_5_moe_text",
            "granitemoehybrid",
            "jamba",
            "mamba",
            "falcon_mamba",
            "mamba2",
        )
    },
    "qwen3_5_text": {**HYBRIDS["qwen3_5_text"], "linear_num_value_heads": 6},
    "nemotron_h": {**NEMOTRON_H, "moe_latent_size": 32, "n_shared_experts": 1},
    "falcon_h1": {
        **HYBRIDS["falcon_h1"],
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "key_multiplier": 0.5,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.8,
        "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.75,
        "mlp_multipliers": [0.9, 1.1],
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
}
"""What a GGUF file of the type cannot state otherwise, and biases where there may be some."""
TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "starcoder2", "qwen3_moe",
    "mixtral", "qwen2_moe", "gemma", "phi", "stablelm", "olmo2", "olmoe", "cohere", "cohere2", "granite", "smollm3",
    "arcee", "seed_oss", "ernie4_5", "nemotron", "glm4", "gpt_oss", "deepseek_v2", "deepseek_v3",
    "glm4_moe", "dots1", "exaone4", "hunyuan_v1_dense", "granitemoe", "minimax_m2",
    "llama4_text", "ministral3", "gemma3n_text", "gemma4_text", "hunyuan_v1_moe", "ernie4_5_moe", "olmo3", "olmo",
    "exaone", "exaone_moe", "phimoe", "glm", "afmoe", "jais2", "minicpm3", "gpt2", "gpt_neox", "gpt_bigcode",
    "granitemoeshared", "solar_open", "glm4_moe_lite", "apertus", "mistral4", "lfm2", "lfm2_moe", "qwen3_next",
    "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "falcon_h1", "nemotron_h", "jamba", "mamba", "falcon_mamba",
    "mamba2",
)  # fmt: skip


def halved(tensors: dict[str, Any]) -> dict[str, Any]:
    """Rotated rows of q and k, half of each head, with the first of all pairs in front."""
    for name in [name for name in tensors if ".attn_q." in name or ".attn_k." in name]:
        heads = tensors[name].reshape(-1, 16, *tensors[name].shape[1:])
        parts = (heads[:, 0:8:2], heads[:, 1:8:2], heads[:, 8:])
        tensors[name] = np.concatenate(parts, axis=1).reshape(tensors[name].shape)
    return tensors


def with_unread_keys(tensors: dict[str, Any]) -> dict[str, Any]:
    """Keys and values of layers that take those of others, as the checkpoints have them."""
    for part in ("attn_k", "attn_v", "attn_k_norm"):
        tensors[f"blk.3.{part}.weight"] = tensors[f"blk.1.{part}.weight"]
    return tensors


def scaled(tensors: dict[str, Any]) -> dict[str, Any]:
    """Weights that have a scale, or one for each expert, as NVFP4 has them; scales of inputs."""
    for name, factors in (("attn_q", [3.0]), ("ffn_up_exps", [0.5, 2.0, 3.0, 5.0]), ("attn_v", [0.25])):
        scale = np.array(factors, np.float32)
        shape = scale.reshape(-1, 1, 1) if "_exps" in name else scale
        tensors[f"blk.1.{name}.weight"] = tensors[f"blk.1.{name}.weight"] / shape
        tensors |= {f"blk.1.{name}.scale": scale, f"blk.1.{name}.input_scale": np.ones(1, np.float32)}
    return tensors


GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.8, "logits_scaling": 0.25}
GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
OTHERWISE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "internlm2": ("llama", {}, {"architecture": "internlm2"}),
    "xverse": ("llama", {}, {"architecture": "xverse"}),
    "pangu-embedded": ("llama", {"attention_bias": True}, {"architecture": "pangu-embedded"}),
    "minicpm": (
        "granite", {**GRANITE, "attention_multiplier": 0.25},
        {"architecture": "minicpm", "metadata": {"minicpm.attention.scale": None}},
    ),
    "bailingmoe2": (
        "glm4_moe", {"use_qk_norm": True},
        {
            "architecture": "bailingmoe2",
            "change": lambda tensors: {
                name.replace("post_attention_norm", "ffn_norm"): values for name, values in fused(tensors).items()
            },
        },
    ),
    "chatglm, fused": ("glm", {}, {"change": fused}),
    "glm4 of images": (
        "glm4", {}, {"change": halved, "metadata": {"glm4.rope.dimension_sections": [1, 1, 2, 0]}},
    ),
    "phi3 without a window": ("phi3", {"sliding_window": None}, {"metadata": {"phi3.attention.sliding_window": 0}}),
    "deepseek2 that does not say how it scores": (
        "glm4_moe_lite", {}, {"metadata": {"deepseek2.expert_gating_func": None}},
    ),
    "dense deepseek2": ("youtu", {}, {"architecture": "deepseek2"}),
    "mistral3 of mistral": ("mistral", {"sliding_window": None}, {"architecture": "mistral3"}),
    "gemma3n as published": ("gemma3n_text", {"altup_num_inputs": 4}, {"change": with_unread_keys}),
    "gemma4 with experts": (
        "gemma4_text", {"global_head_dim": 32, "hidden_size_per_layer_input": 0, **GEMMA4_MOE}, {},
    ),
    "gemma4 without values": (
        "gemma4_text",
        {
            "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "final_logit_softcapping": 5.0,
        },
        {},
    ),
    "gemma4 with shared layers": (
        "gemma4_text",
        {
            "global_head_dim": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {},
    ),
    "qwen3moe, scaled": ("qwen3_moe", {**FULL, "norm_topk_prob": True}, {"change": scaled}),
    "nemotron_h": (
        "nemotron_h", {**NEMOTRON_H, "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
        {"architecture": "nemotron_h"},
    ),
    "granitehybrid without experts": (
        "granitemoehybrid", {**HYBRIDS["granitemoehybrid"], "num_local_experts": 0, "shared_intermediate_size": 80}, {},
    ),
    "qwen3moe, fused": (
        "qwen3_moe", {**FULL, "norm_topk_prob": True}, {"change": lambda tensors: fused(tensors, "_exps")},
    ),
}  # fmt: skip
"""Architectures that have another's computation, and forms of an architecture: (type, its configuration, options)."""


RARE = frozenset(
    (
        "olmo", "jais2", "gpt_bigcode", "solar_open", "minicpm3", "exaone_moe", "phimoe", "glm4_moe_lite", "xverse",
        "pangu-embedded", "falcon_mamba", "qwen3_5_moe_text", "lfm2_moe", "granitehybrid without experts",
    )
)  # fmt: skip
"""Those that the slow tests cover."""


def rare_slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in RARE else name for name in names]


@pytest.mark.parametrize("model_type", rare_slow(TYPES))
def test_family_equals_its_original_weights(model_type: str, tmp_path: Path) -> None:
    reference = tiny_model(model_type, **OPTIONS.get(model_type, {}))
    check_file(write_gguf(tmp_path / "model.gguf", reference), reference)


@pytest.mark.parametrize("name", rare_slow(OTHERWISE))
def test_other_layouts_equal_their_original_weights(name: str, tmp_path: Path) -> None:
    model_type, config, options = OTHERWISE[name]
    reference = tiny_model(model_type, **config)
    check_file(write_gguf(tmp_path / "model.gguf", reference, **options), reference)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_heads_of_quantised_weights_are_moved(model_type: str, tmp_path: Path) -> None:
    """Rows, and values of rows, of blocks of a quantised type."""

    def kind(_: str, values: Any) -> gguf.GGMLQuantizationType:
        blocks = values.ndim > 1 and values.shape[-1] % 32 == 0
        return gguf.GGMLQuantizationType.Q8_0 if blocks else gguf.GGMLQuantizationType.F32

    def rounded(tensors: dict[str, Any]) -> dict[str, Any]:
        kinds = {name: kind(name, values) for name, values in tensors.items()}
        return {
            name: gguf.quants.dequantize(gguf.quants.quantize(values, kinds[name]), kinds[name])
            for name, values in tensors.items()
        }

    model = tiny_model(model_type, **OPTIONS[model_type])
    stored = [write_gguf(tmp_path / "quantised.gguf", model, choose=kind)]
    stored.append(write_gguf(tmp_path / "plain.gguf", model, change=rounded))
    sequences = random_sequences(VOCAB)
    models = [load_model(path, dtype="float32", device="cpu") for path in stored]
    ours, wanted = (packed_logits(each, sequences, DenseCache().step) for each in models)
    for got, want in zip(ours, wanted, strict=True):
        assert torch.equal(got, want)


def test_every_family_is_tested() -> None:
    tested = {ARCHITECTURES.get(model_type, model_type) for model_type in TYPES}
    tested |= {options["architecture"] for _, _, options in OTHERWISE.values() if "architecture" in options}
    assert families().keys() - tested == {"qwen2vl", "qwen3vl", "qwen3vlmoe"}  # text parts: those of their siblings


NOT_READ = frozenset(
    ("dbrx", "deepseek2-ocr", "kimi-linear", "chameleon", "hunyuan_vl", "paddleocr", "mimo2", "step35")
)
"""Architectures that could be computed, and whose layout is not known."""


def test_every_architecture_of_the_package_runs_or_names_what_is_missing() -> None:
    assert not families().keys() & missing().keys()
    assert families().keys() | missing().keys() | NOT_READ == set(gguf.MODEL_ARCH_NAMES.values())


def test_the_docs_list_every_architecture() -> None:
    page = (Path(batchgen.__file__).parent / "docs/models.md").read_text()
    table = page.partition("| models | architectures |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([^`]+)`", table)) == families().keys()


HOSTILE: tuple[Any, ...] = (
    None, 0, -1, 3, 2**31, 1.5, float("nan"), "x", True, [], [1, 2], ["a"], [None], [0.5] * 3, {},
)  # fmt: skip


@pytest.mark.parametrize(
    "model_type",
    [
        "gemma3n_text", "gemma4_text", "deepseek_v2", "minicpm3", "gpt2", "qwen3_next", "qwen3_5_text", "jamba",
        "nemotron_h", "mamba2",
    ],
)  # fmt: skip
def test_any_value_of_a_setting_is_read_or_refused(model_type: str, tmp_path: Path) -> None:
    options = OPTIONS.get(model_type, {})
    header = read_gguf(write_tiny(tmp_path / "model.gguf", model_type, config=options))
    for key in (key for key in header.metadata if not key.startswith("general.")):
        for value in HOSTILE:
            metadata = {**header.metadata, key: value}
            damaged = replace(header, metadata={k: v for k, v in metadata.items() if v is not None})
            with suppress(ModelError):
                hub_tensors(damaged, gguf_config(damaged))
