"""GGUF files: every family equals its original weights, every format its package's values, every rope setting eager."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import batchgen
from batchgen.errors import ModelError
from batchgen.gguf.families import FAMILIES, MISSING
from batchgen.models.check import check_model
from batchgen.models.folder import check_model_folder
from batchgen.models.load import inspect_model, load_model
from batchgen.models.weights import WeightReader
from tests.models.dense_attention import DenseCache
from tests.models.gguf_files import as_kind, write_gguf, write_tiny
from tests.models.gguf_layout import ARCHITECTURES, fused
from tests.models.packed import packed_logits, random_sequences
from tests.models.tiny import tiny_model

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
}
"""What a GGUF file of the type cannot state otherwise, and biases where there may be some."""
TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "starcoder2", "qwen3_moe",
    "mixtral", "qwen2_moe", "gemma", "phi", "stablelm", "olmo2", "olmoe", "cohere", "cohere2", "granite", "smollm3",
    "arcee", "seed_oss", "ernie4_5", "nemotron", "glm4", "gpt_oss", "deepseek_v2", "deepseek_v3",
    "glm4_moe", "dots1", "exaone4", "hunyuan_v1_dense", "granitemoe", "minimax_m2",
    "llama4_text", "ministral3", "gemma3n_text", "gemma4_text", "hunyuan_v1_moe", "ernie4_5_moe", "olmo3", "olmo",
    "exaone", "exaone_moe", "phimoe", "glm", "afmoe", "jais2", "minicpm3", "gpt2", "gpt_neox", "gpt_bigcode",
    "granitemoeshared", "solar_open", "glm4_moe_lite", "apertus", "mistral4",
)  # fmt: skip


def halved(tensors: dict[str, Any]) -> dict[str, Any]:
    """Rotated rows of q and k, half of each head, with the first of all pairs in front."""
    for name in [name for name in tensors if ".attn_q." in name or ".attn_k." in name]:
        heads = tensors[name].reshape(-1, 16, *tensors[name].shape[1:])
        parts = (heads[:, 0:8:2], heads[:, 1:8:2], heads[:, 8:])
        tensors[name] = np.concatenate(parts, axis=1).reshape(tensors[name].shape)
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
    "baichuan": ("llama", {}, {"architecture": "baichuan"}),
    "pangu-embedded": ("llama", {"attention_bias": True}, {"architecture": "pangu-embedded"}),
    "minicpm": (
        "granite", {**GRANITE, "attention_multiplier": 0.25},
        {"architecture": "minicpm", "metadata": {"minicpm.attention.scale": None}},
    ),
    "qwen": (
        "qwen2", FULL,
        {"architecture": "qwen", "change": fused, "metadata": {"qwen.feed_forward_length": 192}},
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
    "mistral3 of mistral": ("mistral", {"sliding_window": None}, {"architecture": "mistral3"}),
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
    "qwen3moe, fused": (
        "qwen3_moe", {**FULL, "norm_topk_prob": True}, {"change": lambda tensors: fused(tensors, "_exps")},
    ),
}  # fmt: skip
"""Architectures that have another's computation, and forms of an architecture: (type, its configuration, options)."""
THEIRS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": FULL,
    "qwen3": {**FULL, "head_dim": 128},
    "gemma2": {
        "query_pre_attn_scalar": 256, "head_dim": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
"""Types whose files transformers reads right if they have the values that it takes for granted."""
DEQUANTISED = [kind for kind in Kind if kind.name not in ("Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64")]


def logits(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]


def check(path: Path, reference: PreTrainedModel, **options: Any) -> None:
    """Logits of the file's model equal the reference's."""
    model = load_model(path, dtype="float32", device="cpu", **options)
    assert inspect_model(path, dtype="float32", device="cpu", **options) == model.spec
    sequences = random_sequences(model.spec.vocab_size)
    for ours, theirs in zip(
        packed_logits(model, sequences, DenseCache().step), logits(reference, sequences), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("model_type", TYPES)
def test_family_equals_its_original_weights(model_type: str, tmp_path: Path) -> None:
    reference = tiny_model(model_type, **OPTIONS.get(model_type, {}))
    check(write_gguf(tmp_path / "model.gguf", reference), reference)


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_layouts_equal_their_original_weights(name: str, tmp_path: Path) -> None:
    model_type, config, options = OTHERWISE[name]
    reference = tiny_model(model_type, **config)
    check(write_gguf(tmp_path / "model.gguf", reference, **options), reference)


def test_every_family_is_tested() -> None:
    tested = {ARCHITECTURES.get(model_type, model_type) for model_type in TYPES}
    tested |= {options["architecture"] for _, _, options in OTHERWISE.values() if "architecture" in options}
    assert FAMILIES.keys() - tested == {"qwen2vl", "qwen3vl", "qwen3vlmoe"}  # text parts: those of their siblings


NOT_READ = frozenset(("dbrx", "deepseek2-ocr", "chameleon", "hunyuan_vl", "paddleocr", "mimo2", "step35"))
"""Architectures that could be computed, and whose layout is not known."""


def test_every_architecture_of_the_package_runs_or_names_what_is_missing() -> None:
    assert not FAMILIES.keys() & MISSING.keys()
    assert FAMILIES.keys() | MISSING.keys() | NOT_READ == set(gguf.MODEL_ARCH_NAMES.values())


def test_the_docs_list_every_architecture() -> None:
    page = (Path(batchgen.__file__).parent / "docs/models.md").read_text()
    table = page.partition("| models | architectures |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([^`]+)`", table)) == FAMILIES.keys()


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.BF16, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Kind.Q8_0, Kind.F16))]
)
@pytest.mark.parametrize("model_type", THEIRS)
def test_quantised_model_equals_what_transformers_makes_of_the_file(
    model_type: str, kind: Kind, tmp_path: Path
) -> None:
    path = write_tiny(
        tmp_path / "model.gguf",
        model_type,
        choose=as_kind(kind),
        metadata={"general.name": "tiny", f"{ARCHITECTURES.get(model_type, model_type)}.vocab_size": 256},
        config=THEIRS[model_type],
    )
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    check(path, reference.eval())


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_values_of_every_format_are_those_of_the_package(kind: Kind, tmp_path: Path) -> None:
    """Also of formats that the package reads and does not write, from random blocks."""
    rows, columns = 96, 256
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 0x3c make every scale finite, whatever its place in the block.
    blocks = np.random.default_rng(0).integers(0, 0x3C, (rows, columns // block * size), dtype=np.uint8)
    dtype = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.F64: np.float64}.get(kind)
    values = blocks.view(dtype) if dtype else gguf.quants.dequantize(blocks, kind)
    model = tiny_model("llama", hidden_size=columns, num_hidden_layers=1)
    path = write_gguf(
        tmp_path / "model.gguf", model, choose=lambda name, _: kind if "ffn_up" in name else Kind.F32,
        extra={"blk.0.ffn_up.weight": blocks.view(dtype) if dtype else blocks},
    )  # fmt: skip
    info = check_model_folder(path).tensors
    target = torch.empty(rows, columns)
    with WeightReader(info) as reader:
        reader.read_into("model.layers.0.mlp.up_proj.weight", target)
    np.testing.assert_array_equal(target.numpy(), values.astype(np.float32))
    check_model(path)


def test_weights_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one head, of a size that divides no tensor, give the same model."""
    monkeypatch.setattr("batchgen.models.weights._BUFFER_BYTES", 4 * 64 * 17)
    reference = tiny_model("llama")
    check(write_gguf(tmp_path / "model.gguf", reference), reference)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = [1.0 + i / 4 for i in range(8)]
ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": (
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
    ),
    "yarn": (
        "qwen3", {"rope_parameters": YARN, **FULL},
        {
            "qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0,
            "qwen3.rope.scaling.original_context_length": 128,
        },
    ),
    "partial": ("phi3", {"partial_rotary_factor": 0.5}, {}),
    "gemma 3, scaled": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rope_settings_are_read(name: str, tmp_path: Path) -> None:
    model_type, options, metadata = ROPES[name]
    reference = tiny_model(model_type, **options)
    check(write_gguf(tmp_path / "model.gguf", reference, metadata=metadata), reference)


def test_the_factors_of_llama_3_are_read(tmp_path: Path) -> None:
    """The file holds what the settings come to: a factor for each frequency."""
    reference = tiny_model("llama", rope_parameters=LLAMA3)
    plain = tiny_model("llama").model.rotary_emb.inv_freq
    factors = (plain / reference.model.rotary_emb.inv_freq).numpy()
    assert len(set(factors)) > 1
    path = write_gguf(tmp_path / "model.gguf", reference, extra={"rope_freqs.weight": factors})
    check(path, reference)
    check(path, reference, implementation="transformers")


def test_the_long_factors_of_phi_3_are_read(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": LONG, "long_factor": LONG[::-1]}
    options = {"rope_parameters": rope, "original_max_position_embeddings": 512, "max_position_embeddings": 512}
    reference = tiny_model("phi3", **options)
    factors = {f"rope_factors_{key}.weight": np.array(rope[f"{key}_factor"], "f4") for key in ("short", "long")}
    metadata = {"phi3.rope.scaling.original_context_length": 512, "phi3.rope.scaling.attn_factor": 1.0}
    check(write_gguf(tmp_path / "model.gguf", reference, extra=factors, metadata=metadata), reference)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_tied_if_none_is_stored(tied: bool, tmp_path: Path) -> None:
    reference = tiny_model("llama", tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "model.gguf", reference)
    assert ("lm_head.weight" in check_model_folder(path).tensors) is not tied
    check(path, reference)


def test_a_vocabulary_padded_beyond_the_tokens_keeps_its_size(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 1}
    spec = inspect_model(write_tiny(tmp_path / "model.gguf", "llama", metadata=metadata), device="cpu")
    assert spec.vocab_size == 256


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.Q8_0, "bfloat16")])
def test_number_format_is_that_of_most_bytes(kind: Kind, dtype: str, tmp_path: Path) -> None:
    assert check_model(write_tiny(tmp_path / "m.gguf", "llama", choose=as_kind(kind))).stored_dtype == dtype


def test_split_files_are_one_model(tmp_path: Path) -> None:
    reference = tiny_model("llama")
    write_gguf(tmp_path / "model.gguf", reference, split_max_tensors=7)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 2
    for named in (files[0], files[1], tmp_path):
        assert check_model(named).folder.files == tuple(files)
    check(files[0], reference)
    files[1].unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of the {len(files)} parts of the model, {files[1].name} first"):
        check_model(files[0])


def test_a_folder_with_one_gguf_is_that_model(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model-Q8_0.gguf", "llama")
    write_tiny(tmp_path / "mmproj-model.gguf", "llama")
    assert check_model(tmp_path).folder.path == path
    write_tiny(tmp_path / "model-Q4_0.gguf", "llama")
    with pytest.raises(ModelError, match=r"holds 2 GGUF models: model-Q4_0.gguf, model-Q8_0.gguf. Name one"):
        check_model(tmp_path)


def test_without_the_package_the_command_to_install_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path / "model.gguf", "llama")
    monkeypatch.setattr("batchgen.gguf.header.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'batchgen\[gguf\]'"):
        check_model(path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": (
        {"metadata": {"general.architecture": "new"}}, "'new' is not supported: batchgen does not know how its",
    ),
    "recurrent": (
        {"metadata": {"general.architecture": "rwkv7"}},
        "the GGUF architecture 'rwkv7' is not supported: it keeps a recurrent state in addition to keys and values",
    ),
    "setting of another architecture": (
        {"metadata": {"llama.final_logit_softcapping": 30.0}},
        "states llama.final_logit_softcapping = 30.0, which batchgen does not compute",
    ),
    "vision tower": ({"metadata": {"general.type": "mmproj"}}, "holds no language model"),
    "unknown tensor": ({"extra": {"blk.0.ssm_conv1d.weight": np.ones((4, 4))}}, "holds 'blk.0.ssm_conv1d.weight'"),
    "further layer": ({"extra": {"blk.9.attn_q.weight": np.ones((4, 4))}}, "holds 'blk.9.attn_q.weight'"),
    "layers that differ": ({"metadata": {"llama.attention.head_count": [4, 2, 4]}}, "the layers differ in llama"),
    "no size": ({"metadata": {"llama.embedding_length": "big"}}, "must be a positive integer, got 'big'"),
    "another scaling": ({"metadata": {"llama.rope.scaling.type": "su"}}, "must be none, linear, yarn or longrope"),
    "odd heads": ({"metadata": {"llama.attention.head_count_kv": 3}}, "attn_k.weight has the shape"),
    "factor of zero": ({"extra": {"rope_freqs.weight": np.zeros(8)}}, "finite factors"),
    "misshapen": ({"extra": {"blk.0.ffn_up.weight": np.ones((4, 4))}}, r"has shape \[4, 4\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        check_model(write_tiny(tmp_path / "model.gguf", "llama", **options))


def test_parts_of_a_tensor_must_fit_together(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_up_exps.weight": np.ones((4, 90, 64))}
    with pytest.raises(ModelError, match="gate_up_proj has the shape"):
        check_model(write_tiny(tmp_path / "model.gguf", "gpt_oss", extra=extra))


def test_layers_that_draft_are_not_read(tmp_path: Path) -> None:
    reference = tiny_model("glm4_moe")
    layers = reference.config.num_hidden_layers
    metadata = {"glm4moe.block_count": layers + 1, "glm4moe.nextn_predict_layers": 1}
    extra = {f"blk.{layers}.{name}.weight": np.ones((4, 4)) for name in ("attn_q", "nextn.eh_proj")}
    check(write_gguf(tmp_path / "model.gguf", reference, metadata=metadata, extra=extra), reference)


def test_other_paths_are_refused_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"PK\3\4 and so on")
    for name, message in (("fake.gguf", "is not a GGUF file"), ("none.gguf", "There is no file")):
        with pytest.raises(ModelError, match=message):
            check_model(tmp_path / name)
