"""Text of checkpoints that also hold vision or audio, against the library's own run of text alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.models.loading import inspect_model, load_model
from tests.models.packed import PagedCache, packed_logits, random_sequences
from tests.models.tiny_packed import save_packed, text_logits

torch.set_num_threads(1)

CLASSES = tuple(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
REFUSED = (
    "blip", "diffusion_gemma", "evolla", "florence2", "git", "glm5_next", "idefics", "inkling2", "inkling2_loop",
    "inkling_mm_model", "kosmos-2", "kosmos-2.5", "kyutai_speech_to_text", "pi0", "pix2struct", "pp_formulanet",
    "qwen4_exp", "t5gemma2", "udop", "unlimited_ocr", "vision-encoder-decoder", "voxtral_realtime",
)  # fmt: skip
"""Classes whose text decoder cannot be computed."""
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
