"""Text of checkpoints that also hold vision or audio, against the library's own run of text alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from batchgen.errors import ModelError
from tests.models.loading import inspect_model, load_model
from tests.models.packed import PagedCache, packed_logits, random_sequences
from tests.models.tiny_packed import save_packed, text_logits

torch.set_num_threads(1)

CLASSES = tuple(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("lfm2_vl", "lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni", "nemo_speechlm"),
        "recurrent state",
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp"), "recurrent state"),
    "glm5_next": "recurrent state",
    "unlimited_ocr": "layers of type reference_sliding_attention",
    **dict.fromkeys(("inkling2", "inkling2_loop", "inkling_mm_model"), "attention interface"),
    **dict.fromkeys(("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop"), "encoder"),
    **dict.fromkeys(("vision-encoder-decoder", "git"), "encoder"),
    **dict.fromkeys(
        ("blip", "evolla", "idefics", "kyutai_speech_to_text", "voxtral_realtime"), "reads what is packed with it"
    ),
    "diffusion_gemma": "denoises",
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), "positions"),
    "pi0": "no language head",
}
"""Classes whose text decoder cannot be computed -> the missing computation."""
RUN = [name for name in CLASSES if name not in REFUSED]
COMMON = (
    "gemma3", "gemma3n", "mistral3", "llama4", "qwen2_5_vl", "qwen3_vl_moe", "glm4v", "internvl", "phi4_multimodal",
    "smolvlm", "llava_next", "kimi_k25", "mllama",
)  # fmt: skip
"""Classes that every run of the tests covers."""
SCALED = ("aya_vision", "cohere2_vision", "granite_speech", "granite_speech_plus")
"""Classes that leave out the factor of their decoder's logits, which batchgen applies as the decoder's own class."""


def check(name: str, folder: Path) -> None:
    reference = save_packed(name, folder)
    model = load_model(folder, dtype="float32", device="cpu", max_model_len=64)
    assert inspect_model(folder, dtype="float32", device="cpu", max_model_len=64) == model.spec
    sequences = random_sequences(model.spec.vocab_size, lengths=(3, 19, 11))
    with torch.no_grad():
        expected = [text_logits(reference, ids) for ids in sequences]
    got = packed_logits(model, sequences, PagedCache(model.spec, len(sequences)).step)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
        factor = (ours * theirs).sum() / (ours * ours).sum() if name in SCALED else 1.0
        torch.testing.assert_close(ours * factor, theirs, atol=1e-4, rtol=0)
    read = sum(parameter.numel() for parameter in reference.parameters())
    assert model.spec.parameters <= read


@pytest.mark.parametrize("name", COMMON)
def test_text_of_common_classes_equals_the_library(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(RUN) - set(COMMON)))
def test_text_of_all_classes_equals_the_library(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_the_missing_computation(name: str, tmp_path: Path) -> None:
    try:
        save_packed(name, tmp_path)
    except Exception:  # no small form can be built: the configuration alone tells
        (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[name]().to_diff_dict(), default=str))
        save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=REFUSED[name]):
        load_model(tmp_path, dtype="float32", device="cpu", max_model_len=64)
