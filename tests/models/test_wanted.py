"""Steps in which only some tokens' final states are wanted; all keys and values must be stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.device import HOST
from batchgen.kernels.invariant import INVARIANT_OPS
from batchgen.kernels.linear import Linear
from batchgen.kernels.lora import lora_step
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.types import Attention, AttentionBatch, KVPool
from batchgen.models.base import CaptureSpec, Model, ModelInput
from batchgen.models.deterministic import DeterministicModel
from tests.models.adapters import save_adapter
from tests.models.loading import load_model
from tests.models.packed import PagedCache
from tests.models.tiny import save_tiny

Attend = Callable[[KVPool, AttentionBatch], Attention]
TOKENS, LAYERS = 23, 3
WANTED = ([22], [3, 0, 17], list(range(23)), [])


def run(model: Model, attention: Attend, wanted: list[int] | None, **given: Any) -> tuple[Tensor, list[Tensor]]:
    """Final states, and the contents of the KV pool."""
    cache = PagedCache(model.spec, 1)
    rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
    step = attention(cache.pool, cache.batch([(0, TOKENS)]))
    hidden = model.hidden(ModelInput(torch.arange(TOKENS) + 3, torch.arange(TOKENS), step, wanted=rows, **given))
    return hidden, [torch.nan_to_num(pool) for pool in (*cache.pool.keys, *cache.pool.values)]


@pytest.mark.parametrize(("model_type", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16")])
@pytest.mark.skipif(not loaded(), reason=str(missing()))
def test_wanted_tokens_of_the_compiled_decoder(model_type: str, dtype: Any, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    model = load_model(tmp_path, implementation="native", dtype=dtype, device="cpu", products="fixed")
    for deterministic in (False, True):
        # A single token reads its keys by another path than several, except in deterministic attention.
        tolerance = 0.0 if deterministic else 1e-5 if dtype == "float32" else 0.05
        check(model, partial(CompiledAttention, deterministic=deterministic), tolerance)


def check(model: Model, attention: Attend, tolerance: float, **given: Any) -> None:
    whole, stored = run(model, attention, None, **given)
    for wanted in WANTED:
        selected, stored_too = run(model, attention, wanted, **given)
        torch.testing.assert_close(selected, whole[wanted], rtol=0, atol=tolerance)
        assert all(torch.equal(a, b) for a, b in zip(stored, stored_too, strict=True))


@pytest.mark.parametrize("kind", ["native", "transformers", "tiles"])
def test_wanted_tokens_of_plain_models(kind: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    implementation: Any = "transformers" if kind == "transformers" else "native"
    model = load_model(tmp_path, implementation=implementation, dtype="float32", device="cpu", products="torch")
    if kind == "tiles":
        check(DeterministicModel(model), TorchAttention, 0.0, ops=INVARIANT_OPS)
    else:
        check(model, TorchAttention, 1e-5, ops=TORCH_OPS)


def test_last_layer_multiplies_wanted_tokens_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path)
    model = load_model(tmp_path, implementation="native", dtype="float32", device="cpu", products="torch")
    rows: list[int] = []
    multiply = Linear.__call__

    def counted(self: Linear, x: Tensor) -> Tensor:
        rows.append(len(x))
        return multiply(self, x)

    monkeypatch.setattr(Linear, "__call__", counted)
    assert model.spec.num_layers == LAYERS
    before = [TOKENS] * (4 * (LAYERS - 1) + 1)
    for wanted in WANTED:
        rows.clear()
        run(model, TorchAttention, wanted)
        assert rows == (before + [len(wanted)] * 3 if wanted else before)


@pytest.mark.parametrize("compiled", [False, True])
def test_captures_and_adapters_see_all_tokens(compiled: bool, tmp_path: Path) -> None:
    if compiled and not loaded():
        pytest.skip(str(missing()))
    folder = save_tiny("llama", tmp_path / "base")
    adapters = [("a", str(save_adapter(folder, tmp_path / "a")))]
    attention = CompiledAttention if compiled else TorchAttention
    model = load_model(
        folder,
        implementation="native",
        dtype="float32",
        device="cpu",
        products="fixed" if compiled else "torch",
        lora=adapters,
    )
    wanted, kept = [22, 4], torch.tensor([1, 22])
    for layers in ((1,), (0, LAYERS), (-1,), ()):
        for adapted in (False, True):
            given = {"lora": lora_step(np.arange(TOKENS) % 2 - 1, HOST)} if adapted else {}
            found = []
            for rows in (None, wanted):
                capture = CaptureSpec(kept, TOKENS, layers)
                found.append((run(model, attention, rows, capture=capture, ops=TORCH_OPS, **given)[0], capture.states))
            (whole, states), (selected, states_too) = found
            torch.testing.assert_close(selected, whole[wanted], rtol=0, atol=1e-5)
            assert states.keys() == states_too.keys() == set(layers)
            for layer, values in states.items():
                torch.testing.assert_close(states_too[layer], values, rtol=0, atol=1e-5)
