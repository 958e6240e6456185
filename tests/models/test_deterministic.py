"""Models that run on tiles: the check at start, and the errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from batchgen.errors import UsageError
from batchgen.models.base import ModelInput, ModelSpec
from batchgen.models.deterministic import DeterministicModel
from batchgen.models.library.model import TransformersModel
from tests.models.loading import load_model
from tests.models.tiny import save_tiny


class Altered:
    """A model whose states are changed by a function."""

    stream = None

    def __init__(self, model: DeterministicModel, alter: Callable[[Tensor], Tensor]) -> None:
        self._model = model
        self._alter = alter
        self.seen: set[int] = set()

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    def hidden(self, inputs: ModelInput) -> Tensor:
        self.seen.add(len(inputs.input_ids))
        return self._alter(self._model.hidden(inputs))

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        self.seen.add(len(hidden))
        return self._model.logits(hidden)

    def accepts_embeds(self) -> bool:
        return True


def altered(folder: Path, alter: Callable[[Tensor], Tensor]) -> Altered:
    return Altered(load_model(save_tiny("llama", folder), dtype="float32", device="cpu"), alter)


def test_model_runs_on_tiles_only(tmp_path: Path) -> None:
    model = altered(tmp_path, lambda states: states)
    wrapped = DeterministicModel(model)
    states = torch.randn(150, wrapped.spec.hidden_size)
    logits = wrapped.logits(states)
    assert model.seen <= {16, 64}
    torch.testing.assert_close(logits, model.logits(states), rtol=0, atol=1e-4)
    assert all(torch.equal(wrapped.logits(states[i : i + 1])[0], logits[i]) for i in range(0, 150, 7))


@pytest.mark.parametrize(
    "alter",
    [
        lambda states: states + states.mean(0),
        lambda states: states + 1e-7 * torch.arange(len(states))[:, None],
    ],
    ids=["neighbours", "place"],
)
def test_batch_dependent_models_are_rejected(alter: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`--deterministic`: the bits of a llama model's logits depend on the batch"):
        DeterministicModel(altered(tmp_path, alter))


def test_tile_sizes_with_different_bits_are_not_mixed(tmp_path: Path) -> None:
    model = altered(tmp_path, lambda states: states * (1 + 1e-6 * (len(states) == 16)))
    wrapped = DeterministicModel(model)
    model.seen.clear()
    wrapped.logits(torch.randn(3, wrapped.spec.hidden_size))
    assert model.seen == {64}


def test_error_names_expert_layers_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("mixtral", tmp_path)
    model = load_model(folder, implementation="transformers", dtype="float32", device="cpu")
    DeterministicModel(model)
    monkeypatch.setattr(TransformersModel, "library_experts", ["model.layers.0.mlp.experts"])
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp\.experts of a mixtral model multiplies in groups"):
        DeterministicModel(model)
