"""GGUF files: every format has its package's values, every rope setting is read; what cannot run is refused."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from batchgen.errors import ModelError
from batchgen.gguf.header import read_gguf
from batchgen.models.check import check_model
from batchgen.models.checkpoint.folder import check_model_folder
from batchgen.models.checkpoint.weights import WeightReader
from tests.models.gguf_files import as_kind, check_file, write_gguf, write_tiny
from tests.models.gguf_layout import ARCHITECTURES
from tests.models.loading import inspect_model
from tests.models.tiny import tiny_model

torch.set_num_threads(1)

FULL: dict[str, Any] = {"use_sliding_window": False}
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
    check_file(path, reference.eval())


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
    monkeypatch.setattr("batchgen.models.checkpoint.weights._BUFFER_BYTES", 4 * 64 * 17)
    reference = tiny_model("llama")
    check_file(write_gguf(tmp_path / "model.gguf", reference), reference)


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
    "olmo 3, scaled": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        {"olmo2.rope.scaling.yarn_attn_factor": 1.5},
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
    check_file(write_gguf(tmp_path / "model.gguf", reference, metadata=metadata), reference)


def test_the_factors_of_llama_3_are_read(tmp_path: Path) -> None:
    """The file holds what the settings come to: a factor for each frequency."""
    reference = tiny_model("llama", rope_parameters=LLAMA3)
    plain = tiny_model("llama").model.rotary_emb.inv_freq
    factors = (plain / reference.model.rotary_emb.inv_freq).numpy()
    assert len(set(factors)) > 1
    path = write_gguf(tmp_path / "model.gguf", reference, extra={"rope_freqs.weight": factors})
    check_file(path, reference)
    check_file(path, reference, implementation="transformers")


def test_the_long_factors_of_phi_3_are_read(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": LONG, "long_factor": LONG[::-1]}
    options = {"rope_parameters": rope, "original_max_position_embeddings": 512, "max_position_embeddings": 512}
    reference = tiny_model("phi3", **options)
    factors = {f"rope_factors_{key}.weight": np.array(rope[f"{key}_factor"], "f4") for key in ("short", "long")}
    metadata = {"phi3.rope.scaling.original_context_length": 512, "phi3.rope.scaling.attn_factor": 1.0}
    check_file(write_gguf(tmp_path / "model.gguf", reference, extra=factors, metadata=metadata), reference)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_tied_if_none_is_stored(tied: bool, tmp_path: Path) -> None:
    reference = tiny_model("llama", tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "model.gguf", reference)
    assert ("lm_head.weight" in check_model_folder(path).tensors) is not tied
    check_file(path, reference)


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
    check_file(files[0], reference)
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
    "missing class": (
        {"metadata": {"general.architecture": "rwkv7"}},
        "the GGUF architecture 'rwkv7' is not supported: the installed transformers has no class with its computation",
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
    "many scales": ({"extra": {"blk.0.ffn_up.scale": np.ones(3)}}, "ffn_up.weight has 3 scales"),
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


def test_attention_without_positions_is_refused(tmp_path: Path) -> None:
    metadata = {"granite.rope.scaling.finetuned": False}
    with pytest.raises(ModelError, match="attention without positions is not computed"):
        check_model(write_tiny(tmp_path / "model.gguf", "granite", metadata=metadata))


def test_layers_that_draft_are_not_read(tmp_path: Path) -> None:
    reference = tiny_model("glm4_moe")
    layers = reference.config.num_hidden_layers
    metadata = {"glm4moe.block_count": layers + 1, "glm4moe.nextn_predict_layers": 1}
    extra = {f"blk.{layers}.{name}.weight": np.ones((4, 4)) for name in ("attn_q", "nextn.eh_proj")}
    check_file(write_gguf(tmp_path / "model.gguf", reference, metadata=metadata, extra=extra), reference)


def head(*lists: tuple[str, int, bytes], tensors: int = 0) -> bytes:
    """A file of lists, each with its key, the number of its type and its bytes."""
    data = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(lists))
    for key, kind, values in lists:
        count = len(values) // SIZES[kind]
        data += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IIQ", 9, kind, count) + values
    return data


SIZES = {0: 1, 6: 4, 7: 1, 8: 8, 10: 8, 12: 8}
"""Number of a type -> bytes of a value; a text of no letters has a length alone."""


@pytest.mark.parametrize("kind", [0, 6, 7, 10, 12])
def test_lists_of_numbers_take_about_their_stored_size(kind: int, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(data := head(("numbers", kind, bytes(4 << 20))))
    read_gguf(tmp_path / "model.gguf")  # without what is imported
    tracemalloc.start()
    header = read_gguf(tmp_path / "model.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert header.metadata["numbers"][-1] == 0
    assert peak < 4 * len(data)


def test_all_lists_of_a_file_have_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.gguf.header.MAX_ITEMS", 10)
    path = tmp_path / "model.gguf"
    path.write_bytes(head(("a", 8, bytes(8 * 4)), ("b", 0, bytes(6))))
    assert read_gguf(path).metadata == {"a": [""] * 4, "b": bytes(6)}
    path.write_bytes(head(("a", 8, bytes(8 * 4)), ("b", 0, bytes(7))))
    with pytest.raises(ModelError, match="its lists up to b have 11 entries"):
        read_gguf(path)


def test_keys_and_tensors_have_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path / "model.gguf", "llama", split_max_tensors=9)
    files = sorted(tmp_path.glob("*.gguf"))
    count = len(read_gguf(files[0]).tensors)
    monkeypatch.setattr("batchgen.gguf.header.MAX_ENTRIES", count)
    read_gguf(files[0])
    monkeypatch.setattr("batchgen.gguf.header.MAX_ENTRIES", count - 1)
    with pytest.raises(ModelError, match=f"the parts hold more than {count - 1} tensors"):
        read_gguf(files[0])
    monkeypatch.setattr("batchgen.gguf.header.MAX_ENTRIES", 10)
    with pytest.raises(ModelError, match=r"its header counts [0-9]+ tensors and [0-9]+ keys"):
        read_gguf(files[0])


def test_a_key_lists_one_number_for_each_layer_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(tmp_path / "model.gguf", "llama", metadata={"llama.attention.head_count": [4, 4, 4]})
    check_model(path)
    monkeypatch.setattr("batchgen.gguf.metadata.MAX_LAYERS", 2)
    with pytest.raises(ModelError, match=r"llama\.attention\.head_count lists 3 numbers"):
        check_model(path)


def test_other_paths_are_refused_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"PK\3\4 and so on")
    for name, message in (("fake.gguf", "is not a GGUF file"), ("none.gguf", "There is no file")):
        with pytest.raises(ModelError, match=message):
            check_model(tmp_path / name)
