"""Compiled decoder, against transformers' eager attention and against its operations run separately."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.kernels.cpu import decoder as module
from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.cpu.matmul import methods
from batchgen.kernels.cpu.ops import COMPILED_OPS
from batchgen.kernels.device import HOST
from batchgen.kernels.layouts import Compiled, LayoutChoice, Products, int8_refusal
from batchgen.kernels.lora import lora_step
from batchgen.models.base import CaptureSpec, Model, ModelInput, TokenEmbeds
from tests.models.adapters import KINDS, adapted_logits, save_adapter
from tests.models.loading import load_model
from tests.models.packed import PagedCache, packed_logits, random_sequences
from tests.models.test_native import CONFIGS, eager
from tests.models.tiny import VOCAB, save_tiny

pytestmark = pytest.mark.skipif(not loaded(), reason=str(missing()))

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "odd": ("llama", {"hidden_size": 35, "intermediate_size": 77, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "quick-gelu": ("qwen3", {"hidden_act": "quick_gelu", "head_dim": 6, "intermediate_size": 1000}),
    "relu": ("llama", {"hidden_act": "relu", "num_hidden_layers": 1}),
}
CASES = CONFIGS | MORE


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Two threads; `test_threads` proves that their number does not matter."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each step that the compiled decoder runs."""
    seen: list[int] = []
    hidden = module.CompiledDecoder.hidden

    def counted(self: Any, ids: Tensor, *given: Any, **named: Any) -> Tensor:
        seen.append(len(ids))
        return hidden(self, ids, *given, **named)

    monkeypatch.setattr(module.CompiledDecoder, "hidden", counted)
    return seen


def load(folder: Path, dtype: Any = "float32", products: Products = "fixed") -> Model:
    return load_model(folder, implementation="native", dtype=dtype, device="cpu", products=products)


USUAL = ("llama-biases", "mistral-window", "qwen2-tied-window", "qwen3", *MORE)
"""One of each kind of layer; `test_native` has all of the others, whose operations are the same."""


@pytest.mark.parametrize(
    "name", [*USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in USUAL)]
)
def test_float32_equals_eager(name: str, tmp_path: Path, calls: list[int]) -> None:
    model_type, overrides = CASES[name]
    save_tiny(model_type, tmp_path, seed=len(name), **overrides)
    model, sequences = load(tmp_path), random_sequences(VOCAB)
    cache = PagedCache(model.spec, len(sequences))
    found = packed_logits(model, sequences, cache.compiled_step)
    assert sum(calls) == sum(map(len, sequences))
    for ours, theirs in zip(found, eager(tmp_path, torch.float32, sequences), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-biases", "mistral-window", "qwen3", "odd"])
def test_bfloat16_is_as_close_to_float32_as_eager_bfloat16(name: str, tmp_path: Path, calls: list[int]) -> None:
    """error(ours) <= 2 * error(eager bfloat16), both against float32."""
    model_type, overrides = CASES[name]
    save_tiny(model_type, tmp_path, dtype=torch.bfloat16, **overrides)
    model, sequences = load(tmp_path, "bfloat16"), random_sequences(VOCAB)
    exact = torch.cat(eager(tmp_path, torch.float32, sequences))
    plain = torch.cat(eager(tmp_path, torch.bfloat16, sequences))
    got = torch.cat(packed_logits(model, sequences, PagedCache(model.spec, len(sequences)).compiled_step))
    assert calls
    assert (got - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.parametrize("name", ["llama-biases", "odd"])
def test_block_floating_point_is_as_close_to_float32_as_widening(
    name: str, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "bfp" not in methods(torch.bfloat16):
        pytest.skip("no products in block floating point here")
    model_type, overrides = CASES[name]
    save_tiny(model_type, tmp_path, dtype=torch.bfloat16, **overrides)
    sequences = random_sequences(VOCAB)
    exact = torch.cat(eager(tmp_path, torch.float32, sequences))
    widened = load(tmp_path, "bfloat16")
    taken = LayoutChoice("compiled bfp", partial(Compiled, method="bfp"), "for this test")
    monkeypatch.setattr("batchgen.kernels.linear.choose_layout", lambda dtype, products: taken)
    errors = []
    for model in (widened, load(tmp_path, "bfloat16")):
        got = torch.cat(packed_logits(model, sequences, PagedCache(model.spec, len(sequences)).compiled_step))
        errors.append(float((got - exact).norm()))
    assert sum(calls) == 2 * sum(map(len, sequences))
    assert errors[0] != errors[1]
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.parametrize(
    ("name", "products", "dtype", "adapted"),
    [
        ("llama-biases", "fixed", "float32", False),
        ("qwen3", "fixed", "bfloat16", False),
        ("qwen2-tied-window", "int8", "float32", False),
        ("qwen2-tied-window", "int8", "bfloat16", False),
        ("qwen3", "fixed", "float32", True),
        ("qwen3", "int8", "bfloat16", True),
    ],
)
def test_steps_equal_separate_operations(
    name: str, products: Products, dtype: Any, adapted: bool, tmp_path: Path, calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With captured states, and embeddings or an adapter."""
    if products == "int8" and int8_refusal(torch.float32, torch.device("cpu")) is not None:
        pytest.skip("no products of int8 here")
    model_type, overrides = CASES[name]
    base = save_tiny(model_type, tmp_path / "base", **overrides)
    lora = [("a", str(save_adapter(base, tmp_path / "a", **KINDS["all"])))] if adapted else []
    ids, layers = random_sequences(VOCAB, lengths=(19,))[0], (0, 1, 3, -1)
    embeds = TokenEmbeds(torch.tensor([2, 11]), torch.randn(2, 64, generator=torch.Generator().manual_seed(1)))
    given = {"lora": lora_step(np.zeros(19, np.int64), HOST)} if adapted else {"embeds": embeds}
    runs: list[dict[int, Tensor]] = []
    for alone in (False, True):
        if alone:
            monkeypatch.setattr("batchgen.models.native.decoder.fused_decoder", lambda weights: None)
        model = load_model(base, dtype=dtype, device="cpu", products=products, lora=lora)
        capture = CaptureSpec(torch.tensor([18, 2, 11, 0]), 19, layers)
        attention = PagedCache(model.spec, 1).compiled_step([(0, 19)])
        model.hidden(ModelInput(ids, torch.arange(19), attention, capture, ops=COMPILED_OPS, **given))
        runs.append(capture.states)
    assert calls == [19]
    for layer in layers:
        together, separate = runs[0][layer].float(), runs[1][layer].float()
        # Precomputed rope tables may round differently from those of a step.
        assert (together - separate).norm() <= (1e-6 if dtype == "float32" else 2e-3) * separate.norm()


@pytest.mark.parametrize("name", ["qwen3", "odd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_run_in_the_compiled_decoder(name: str, dtype: Any, tmp_path: Path, calls: list[int]) -> None:
    """Sequences without an adapter have the same bits as in steps without adapters; in float32, logits equal peft's.

    In bfloat16, only steps without adapters keep the inputs of products in float32, in the same buffer.
    """
    model_type, overrides = CASES[name]
    base = save_tiny(model_type, tmp_path / "base", **overrides)
    paths = [save_adapter(base, tmp_path / f"a{i}", seed=i, **KINDS[kind]) for i, kind in enumerate(("all", "some"))]
    adapters = [(f"a{i}", str(path)) for i, path in enumerate(paths)]
    model = load_model(base, dtype=dtype, device="cpu", products="fixed", lora=adapters)
    sequences = random_sequences(VOCAB)
    of = [i % 3 - 1 for i in range(len(sequences))]

    def logits(adapters: list[int] | None) -> list[Tensor]:
        cache = PagedCache(model.spec, len(sequences))
        return packed_logits(model, sequences, cache.compiled_step, adapters=adapters)

    before, mixed, after = logits(None), logits(of), logits(None)
    assert sum(calls) == 3 * sum(map(len, sequences))
    for i, adapter in enumerate(of):
        assert torch.equal(before[i], after[i])
        assert torch.equal(before[i], mixed[i]) == (adapter < 0)
        if adapter >= 0 and dtype == "float32":
            expected = adapted_logits(base, paths[adapter], [sequences[i]])[0]
            torch.testing.assert_close(mixed[i], expected, atol=1e-4, rtol=1e-4)
            assert (mixed[i] - before[i]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_changing_size_reuse_buffers(dtype: str, tmp_path: Path) -> None:
    """A step after a larger one gives the same result as alone."""
    save_tiny("qwen3", tmp_path)
    model = load(tmp_path, dtype)

    def hidden(count: int, first: int) -> Tensor:
        cache = PagedCache(model.spec, 1, pages_each=120)
        cache.step([(0, first)])
        cache.pool.keys[0].fill_(0.5)
        for pool in (*cache.pool.keys, *cache.pool.values):
            pool.fill_(0.5)
        ids = torch.arange(count) + 3
        return model.hidden(ModelInput(ids, torch.arange(first, first + count), cache.compiled_step([(0, count)])))

    with torch.inference_mode():
        once = hidden(3, 5).clone()
    assert hidden(0, 5).shape == (0, 64)
    assert hidden(50, 300).isfinite().all()
    assert torch.equal(hidden(3, 5), once)


def test_python_threads_have_separate_memory(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    model = load(tmp_path)

    def hidden(count: int) -> Tensor:
        attention = PagedCache(model.spec, 1, pages_each=20).compiled_step([(0, count)])
        return model.hidden(ModelInput(torch.arange(count) + 3, torch.arange(count), attention))

    counts = (40, 41)
    alone = [hidden(count) for count in counts]
    wrong: list[int] = []

    def work(at: int) -> None:
        wrong.extend(i for i in range(30) if not torch.equal(hidden(counts[at]), alone[at]))

    workers = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
