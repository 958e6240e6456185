"""Native decoder with Triton operations (in the interpreter) against the decoder with PyTorch operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.kernels.gpu.ops import TRITON_OPS
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.models.base import CaptureSpec, Model, ModelInput, TokenEmbeds
from tests.models.dense_attention import DenseCache
from tests.models.loading import load_model
from tests.models.packed import PagedCache
from tests.models.tiny import VOCAB, WINDOW, save_tiny

torch.set_num_threads(1)

TOKENS = (5, 3)
"""Tokens of the two sequences in the first step; the second step feeds one more each."""
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-odd": ("llama", {"num_key_value_heads": 3, "hidden_size": 60, "num_attention_heads": 6, "head_dim": 10}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"use_sliding_window": False, "head_dim": 32}),
}


def run(model: Model, cache: PagedCache | DenseCache, ops: Ops) -> list[Tensor]:
    """Final and captured states of two steps."""
    ids = torch.randint(3, VOCAB, (sum(TOKENS) + 2,), generator=torch.Generator().manual_seed(5))
    first, second = ids.split((sum(TOKENS), 2))
    got: list[Tensor] = []
    for tokens, positions, parts in (
        (first, torch.cat([torch.arange(n) for n in TOKENS]), list(enumerate(TOKENS))),
        (second, torch.tensor(TOKENS), [(0, 1), (1, 1)]),
    ):
        capture = CaptureSpec(torch.tensor([1, 0]), len(tokens), (*range(model.spec.num_layers + 1), -1))
        values = torch.randn(1, model.spec.hidden_size, generator=torch.Generator().manual_seed(6))
        embeds = TokenEmbeds(torch.tensor([1]), values)
        hidden = model.hidden(ModelInput(tokens, positions, cache.step(parts), capture, embeds=embeds, ops=ops))
        got += [hidden, *capture.states.values()]
    return got


@pytest.mark.parametrize("name", CONFIGS)
def test_states_equal_those_of_plain_operations(name: str, tmp_path: Path) -> None:
    model_type, overrides = CONFIGS[name]
    save_tiny(model_type, tmp_path, num_hidden_layers=2, **overrides)
    model = load_model(tmp_path, implementation="native", dtype="float32", device="cpu")
    expected = run(model, PagedCache(model.spec, len(TOKENS)), TORCH_OPS)
    assert len(expected) == 2 * (1 + model.spec.num_layers + 2)
    for cache in (PagedCache(model.spec, len(TOKENS)), DenseCache()):
        for ours, theirs in zip(run(model, cache, TRITON_OPS), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_as_close_to_float32_as_plain_operations(name: str, dtype: Any, tmp_path: Path) -> None:
    model_type, overrides = CONFIGS[name]
    save_tiny(model_type, tmp_path, num_hidden_layers=2, dtype=getattr(torch, dtype), **overrides)
    states = []
    for of, ops in (("float32", TORCH_OPS), (dtype, TORCH_OPS), (dtype, TRITON_OPS)):
        model = load_model(tmp_path, implementation="native", dtype=of, device="cpu")
        states.append(torch.cat(run(model, PagedCache(model.spec, len(TOKENS)), ops)).float())
    exact, plain, got = states
    assert (got - exact).norm() <= 2 * (plain - exact).norm()
