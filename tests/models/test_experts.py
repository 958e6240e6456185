"""Experts of library models computed by batchgen's kernels, against the library's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from batchgen.kernels.gpu import ops as gpu_ops
from batchgen.kernels.gpu.ops import TRITON_OPS
from batchgen.kernels.moe import Gating
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.models.base import CaptureSpec, ModelInput
from batchgen.models.library import load as hf_load
from batchgen.models.library.layers.experts import ExpertsSlot, install_experts
from batchgen.models.library.load_test import Expected
from batchgen.models.library.probe import ProbeAttention
from tests.models.loading import load_model
from tests.models.tiny import save_tiny, tiny_model

GPT_OSS = Gating("quick_gelu", interleaved=True, limit=7.0, shift=1.0)
KINDS = {
    "mixtral": (3, Gating()),
    "qwen2_moe": (3, Gating()),
    "deepseek_v3": (2, Gating()),
    "gpt_oss": (3, GPT_OSS),
}
"""Number of layers that batchgen's kernels can compute, and their gate."""


def counting_ops(calls: list[int]) -> Ops:
    """batchgen's kernels, with the number of tokens of each call of the experts."""

    def counted(x: Tensor, *given: Any) -> Tensor:
        calls.append(len(x))
        return TRITON_OPS.moe_experts(x, *given)

    return replace(TRITON_OPS, moe_experts=counted)


def inputs(ops: Ops, tokens: int = 7) -> ModelInput:
    ids = (torch.arange(tokens) * 37 + 5) % 256
    return ModelInput(ids, torch.arange(tokens), ProbeAttention(), ops=ops)


def loaded(model_type: str, folder: Path) -> tuple[Any, ExpertsSlot]:
    """A model, and the slot of its experts."""
    slots: list[ExpertsSlot] = []

    def install(model: Any) -> ExpertsSlot:
        slots.append(install_experts(model))
        return slots[-1]

    with patch.object(hf_load, "install_experts", install):
        model = load_model(save_tiny(model_type, folder), implementation="transformers", dtype="float32")
    return model, slots[-1]


@pytest.mark.parametrize("model_type", KINDS)
def test_states_equal_the_library(model_type: str, tmp_path: Path) -> None:
    layers, gating = KINDS[model_type]
    model, slot = loaded(model_type, tmp_path / "model")
    assert [layer.experts.gating for layer in slot.layers if layer.experts is not None] == [gating] * layers
    calls: list[int] = []
    counted = counting_ops(calls)
    expected, got = model.hidden(inputs(TORCH_OPS)), model.hidden(inputs(counted))
    assert calls == [7] * layers
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert slot.ops is TORCH_OPS

    capture = CaptureSpec(torch.arange(7), 7, experts=True)  # the routers' choices can still be captured
    model.hidden(replace(inputs(counted), capture=capture))
    assert capture.routed.shape == (7, layers, 2)

    slot.use_library()
    calls.clear()
    assert torch.equal(model.hidden(inputs(counted)), expected)
    assert calls == []


def with_experts(model_type: str, **overrides: Any) -> tuple[Any, list[Any]]:
    model = tiny_model(model_type, **overrides)
    return model, [module for name, module in model.named_modules() if name.endswith(".experts")]


def test_dense_model_is_unchanged() -> None:
    model: Any = tiny_model("llama")
    before = model.config._experts_implementation
    assert install_experts(model).layers == []
    assert model.config._experts_implementation == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("has_gate", False), ("has_post_expert_norm", True), ("_is_expert_parallel", True), ("is_transposed", True)],
)
def test_unsupported_layers_use_the_library(name: str, value: bool) -> None:
    model, modules = with_experts("mixtral")
    setattr(modules[1], name, value)
    assert len(install_experts(model).layers) == len(modules) - 1


def test_layer_with_an_unknown_gate_uses_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    model, modules = with_experts("mixtral")

    def odd(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * (up + 0.5)

    monkeypatch.setattr(modules[0], "_apply_gate", odd)
    slot = install_experts(model)
    assert len(slot.layers) == len(modules) - 1
    ids = torch.arange(5)[None]
    with torch.no_grad(), slot.step_context(TRITON_OPS):
        mixed = model(input_ids=ids, use_cache=False).logits
    slot.use_library()
    with torch.no_grad():
        torch.testing.assert_close(mixed, model(input_ids=ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)


def test_layer_with_a_failing_gate_uses_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(gate_up: Tensor) -> Tensor:
        raise RuntimeError("no numbers")

    model, modules = with_experts("mixtral")
    for module in modules:
        monkeypatch.setattr(module, "_apply_gate", failing)
    before = model.config._experts_implementation
    assert install_experts(model).layers == []
    assert model.config._experts_implementation == before


def test_library_function_is_kept() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for name in ("eager", "grouped_mm", "batched_mm"):
        model, modules = with_experts("qwen3_moe")
        model.set_experts_implementation(name)
        layer = install_experts(model).layers[0]
        eager = type(modules[0]).forward.__wrapped__
        assert layer.library is (eager if name == "eager" else ALL_EXPERTS_FUNCTIONS[name])


def different(x: Tensor, *_: Any) -> Tensor:
    return torch.zeros_like(x)


class CannotCompile(Exception):
    """An error like those of Triton, which derive directly from Exception."""


def failing(x: Tensor, *_: Any) -> Tensor:
    raise CannotCompile


@pytest.mark.parametrize("broken", [different, failing])
def test_experts_with_wrong_results_use_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    (model, slot), ids = loaded("mixtral", tmp_path / "model"), torch.arange(7)
    with torch.no_grad():
        logits = model.logits(model.hidden(ModelInput(ids, ids, ProbeAttention()))).float()
        expected = Expected(ids, (0,), (logits,))
        hf_load._check_experts(model, slot, expected)
        assert len(slot.layers) == 3
        monkeypatch.setattr(gpu_ops, "TRITON_OPS", replace(TRITON_OPS, moe_experts=broken))
        hf_load._check_experts(model, slot, expected)
    assert slot.layers == []
