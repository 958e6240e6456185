"""Quantised checkpoints run as their plain twins do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from batchgen.models.base import ModelInput
from batchgen.models.check import check_model
from batchgen.models.load import load_model
from batchgen.models.probe import ProbeAttention
from tests.models.quantised import CASES, described, mxfp4, save_quantised, write_stored
from tests.models.tiny import save_tiny

torch.set_num_threads(1)


def logits(folder: Path, **options: Any) -> torch.Tensor:
    model = load_model(folder, device="cpu", **{"dtype": "float32", **options})
    ids = torch.arange(3, 27)
    return model.logits(model.hidden(ModelInput(ids, torch.arange(len(ids)), ProbeAttention()))).float()


def assert_same(quantised: Path, plain: Path, **options: Any) -> None:
    got, expected = logits(quantised, **options), logits(plain, **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", CASES)
def test_a_quantised_checkpoint_equals_its_plain_twin(name: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(CASES[name], "llama", tmp_path)
    assert check_model(quantised).folder.encodings == {CASES[name].label: 21}
    assert_same(quantised, plain, implementation="native")


TRANSFORMERS = ("fp8 blocks", "gptq act-order", "awq", "compressed int4 with zeros", "nvfp4", "bitsandbytes nf4 nested")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_library_gets_the_plain_tensors(name: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(CASES[name], "qwen3", tmp_path)
    assert_same(quantised, plain, implementation="transformers")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_are_stacked_from_quantised_ones(model_type: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(CASES["fp8 blocks"], model_type, tmp_path)
    assert sum(check_model(quantised).folder.encodings.values()) > 30
    assert_same(quantised, plain)


def test_gpt_oss_experts(tmp_path: Path) -> None:
    """Stored by outputs in groups of 32 inputs; the library's own conversion is a second reference."""
    plain = save_tiny("gpt_oss", tmp_path / "plain")
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        parts = [mxfp4(matrix) for matrix in tensor.mT]  # [O, I] each
        blocks = torch.stack([part["weight_packed"].unflatten(1, (-1, 16)) for part, _ in parts])
        scales = torch.stack([part["weight_scale"] for part, _ in parts])
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = torch.stack([matrix for _, matrix in parts]).mT.contiguous()
        assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), tensors[name])
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantised = write_stored(stored, described("mxfp4"), plain, tmp_path / "quantised")
    assert check_model(quantised).folder.encodings == {"MXFP4 in groups of 32": 6}
    assert_same(quantised, plain)
