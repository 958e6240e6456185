"""Library models that several ranks compute equal those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from batchgen.cli.help import page_path
from batchgen.errors import ModelError
from batchgen.kernels.ranks import Ranks
from batchgen.models.base import Model
from batchgen.models.check import check_model
from batchgen.models.checkpoint.weights import WeightReader
from batchgen.models.library import load as library_load
from batchgen.models.library import recurrence
from batchgen.models.library.load_test import Expected
from batchgen.models.load import checked_spec
from tests.engine.test_hybrid import TYPES as HYBRIDS
from tests.kernels.thread_ranks import in_ranks
from tests.models.adapters import KINDS, save_adapter
from tests.models.loading import inspect_model, load_model
from tests.models.packed import PagedCache, packed_logits, random_sequences
from tests.models.quantised import CASES, save_quantised
from tests.models.test_lora_kinds import EXPERTS, MORE, QV
from tests.models.test_packed_types import COMMON
from tests.models.tiny import HYBRID_TYPES, MORE_TYPES, SPARSE_TYPES, TYPES, VOCAB, save_tiny
from tests.models.tiny_encoders import save_encoder
from tests.models.tiny_packed import save_packed

torch.set_num_threads(1)
Result = TypeVar("Result")
_CHECKED = {"implementation", "max_model_len", "lora"}

NO_PLAN = (
    "biogpt", "bitnet", "ctrl", "dbrx", "dory", "falcon_mamba", "gpt2", "gpt_bigcode", "jetmoe", "mamba", "mamba2",
    "mllama", "modernbert-decoder", "moshi", "opt", "persimmon", "recurrent_gemma", "stablelm", "zamba", "zamba2",
    "zaya",
)  # fmt: skip
"""Types for which the library has no plan."""
CASES_OF_TYPES = [
    ("llama", 2), ("llama", 4), ("qwen2", 3), ("qwen3", 4), ("gemma2", 3), ("gemma3_text", 2), ("phi3", 3), ("glm4", 2),
    ("qwen3_moe", 3), ("mixtral", 2), ("deepseek_v2", 3), ("deepseek_v3", 2), ("gpt_oss", 3), ("olmo2", 3),
    ("gpt_neox", 3), ("cohere", 2), ("longcat_flash", 2), ("llama4_text", 2),
]  # fmt: skip


class _Turns(Ranks):
    """Ranks in threads of which one runs at a time: the library's loader and what a step sets are of one process."""

    def __init__(self, inner: Ranks, running: Lock) -> None:
        super().__init__(inner.rank, inner.count)
        self._inner, self._running = inner, running

    def _reduce(self, x: Tensor, how: Any) -> None:
        with self._others():
            self._inner._reduce(x, how)

    def _gather(self, x: Tensor) -> Tensor:
        with self._others():
            return self._inner._gather(x)

    @contextmanager
    def _others(self) -> Iterator[None]:
        step, recurrence._active = recurrence._active, None
        self._running.release()
        try:
            yield
        finally:
            self._running.acquire()
            recurrence._active = step


def in_turns(count: int, body: Callable[[Ranks], Result]) -> list[Result]:
    """What `body` returns on each of `count` ranks."""
    running = Lock()

    def run(ranks: Ranks) -> Result:
        with running:
            return body(_Turns(ranks, running))

    return in_ranks(count, run)


def logits(model: Model, ranks: Ranks, adapters: list[int] | None) -> list[Tensor]:
    sequences = random_sequences(min(VOCAB, model.spec.vocab_size), lengths=(3, 17, 9))
    own = packed_logits(model, sequences, PagedCache(model.spec, len(sequences)).step, adapters=adapters)
    return [ranks.whole(each, model.spec.vocab_size, 32) for each in own]


def check(folder: Path, count: int, adapters: list[int] | None = None, **options: Any) -> list[Model]:
    """Logits of every rank, its spec without weights, and that each has far less than the whole."""
    options = {"implementation": "transformers", "dtype": "float32", "device": "cpu", **options}
    whole = load_model(folder, **options)
    expected = logits(whole, Ranks(), adapters)

    def run(ranks: Ranks) -> tuple[Model, list[Tensor]]:
        model = load_model(folder, **options, ranks=ranks)
        return model, logits(model, ranks, adapters)

    results = in_turns(count, run)
    for model, got in results:
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)
        assert all(torch.equal(one, other) for one, other in zip(got, results[0][1], strict=True))
        assert model.spec.parameters < 0.9 * whole.spec.parameters
        alone = Ranks(model.spec.ranks.rank, count)  # its spec needs no other rank
        checked = check_model(folder, **{key: options[key] for key in options.keys() & _CHECKED})
        spec = checked_spec(checked, dtype="float32", device="cpu", ranks=alone)
        assert replace(spec, ranks=model.spec.ranks) == model.spec
    return [model for model, _ in results]


@pytest.mark.parametrize(("model_type", "count"), CASES_OF_TYPES)
def test_logits(model_type: str, count: int, tmp_path: Path) -> None:
    models = check(save_tiny(model_type, tmp_path), count)
    assert sum(model.spec.num_heads for model in models) == 4
    assert all(model.spec.kv_layers[0].kv_heads <= 2 for model in models)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("model_type", sorted({*TYPES, *MORE_TYPES, *HYBRID_TYPES, *SPARSE_TYPES} - {*NO_PLAN}))
def test_logits_of_all_types(model_type: str, count: int, tmp_path: Path) -> None:
    check(save_tiny(model_type, tmp_path), count)


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_next",
        "nemotron_h",
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*HYBRIDS} - {*NO_PLAN})),
    ],
)
def test_recurrent_layers_are_whole(model_type: str, tmp_path: Path) -> None:
    models = check(save_tiny(model_type, tmp_path, **HYBRIDS[model_type]), 2)
    whole = inspect_model(tmp_path, implementation="transformers", dtype="float32", device="cpu")
    assert all(model.spec.states == whole.states for model in models)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "gpt_oss", "phi3"])
def test_a_rank_reads_its_part_alone(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(model_type, tmp_path)
    read: list[Tensor] = []
    original = WeightReader.read

    def counted(*args: Any) -> Tensor:
        read.append(original(*args))
        return read[-1]

    monkeypatch.setattr(WeightReader, "read", counted)
    options: Any = {"implementation": "transformers", "dtype": "float32", "device": "cpu"}
    models = in_turns(3, lambda ranks: load_model(tmp_path, **options, ranks=ranks))
    assert sum(x.numel() for x in read) == sum(model.spec.parameters for model in models)


@pytest.mark.parametrize("name", [name for name in CASES if "gptq" in name.lower() or "fp8" in name.lower()][:2])
def test_quantised_checkpoints(name: str, tmp_path: Path) -> None:
    quantised, _ = save_quantised(CASES[name], "llama", tmp_path, num_hidden_layers=1)
    check(quantised, 2)


@pytest.mark.parametrize(
    "name", ["qwen2_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*COMMON} - {*NO_PLAN}))]
)
def test_text_of_classes_that_pack_more(name: str, tmp_path: Path) -> None:
    save_packed(name, tmp_path)
    check(tmp_path, 2, max_model_len=64)


@pytest.mark.parametrize(
    ("model_type", "count", "kinds", "config"),
    [
        ("llama", 3, {**MORE, "all": KINDS["all"]}, {}),
        ("llama", 2, {"tokens": MORE["tokens"], "plain": KINDS["two"]}, {"tie_word_embeddings": True}),
        ("qwen2", 2, {"dora": MORE["dora"], "bias": MORE["bias"]}, {}),
        ("qwen3_moe", 2, {**EXPERTS, "linear": {"r": 2, "target_modules": "all-linear"}}, {}),
        ("gpt_oss", 3, EXPERTS, {}),
        ("deepseek_v3", 2, {"latent": {"r": 2, "target_modules": ["q_b_proj", "kv_b_proj", "o_proj"]}}, {}),
        ("llama", 2, {"saved": {"target_modules": QV, "modules_to_save": ["norm", "o_proj", "up_proj"]}}, {}),
    ],
)
def test_adapters(
    model_type: str, count: int, kinds: dict[str, dict[str, Any]], config: dict[str, Any], tmp_path: Path
) -> None:
    base = save_tiny(model_type, tmp_path / "base", **config)
    paths = [save_adapter(base, tmp_path / f"a{i}", seed=i, **kind) for i, kind in enumerate(kinds.values())]
    lora = [(name, str(path)) for name, path in zip(kinds, paths, strict=True)]
    for first in range(0, len(paths), 2):
        adapters = [-1, first, min(first + 1, len(paths) - 1)]
        check(base, count, adapters, lora=lora)


def test_ranks_agree_on_the_comparison_with_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one would refuse the model while the others wait for it."""
    save_tiny("qwen2", tmp_path)
    found: list[float] = []
    original = Expected.difference

    def noted(self: Expected, *args: Any) -> float:
        wrong = Expected(self.ids, self.starts, tuple(x + (0.01 if x.shape[1] == 64 else 0) for x in self.logits))
        found.append(original(wrong, *args))
        return 0.0

    monkeypatch.setattr(library_load.Expected, "difference", noted)
    options: Any = {"implementation": "transformers", "dtype": "float32", "device": "cpu"}
    in_turns(3, lambda ranks: load_model(tmp_path, **options, ranks=ranks))
    assert len(found) == 3
    assert found[0] == found[1] == found[2] > 1e-4


@pytest.mark.parametrize("model_type", ["stablelm", "dbrx"])
def test_types_without_a_plan_are_refused(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    with pytest.raises(ModelError, match=rf"A {model_type} model cannot be split.*Use --tensor-parallel 1"):
        load_model(tmp_path, implementation="transformers", dtype="float32", device="cpu", ranks=Ranks(0, 2))


def test_the_documentation_names_the_types_without_a_plan() -> None:
    text = page_path("models").read_text(encoding="utf-8")
    assert [name for name in NO_PLAN if f"`{name}`" not in text] == []


def test_embedding_models_are_refused(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    with pytest.raises(ModelError, match=r"An embedding model is not split: .* Use --tensor-parallel 1"):
        load_model(tmp_path, dtype="float32", device="cpu", ranks=Ranks(0, 2))
