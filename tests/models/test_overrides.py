"""`--hf-overrides` and `--rope-scaling`: what they make of a configuration, and logits equal to the library's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.errors import ModelError
from batchgen.models.check import check_model
from batchgen.models.checkpoint.overrides import Overrides
from tests.models.dense_attention import DenseCache
from tests.models.loading import inspect_model, load_model
from tests.models.packed import packed_logits, random_sequences
from tests.models.test_native import LONG, eager
from tests.models.tiny import VOCAB, save_tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BASE = {"model_type": "llama", "max_position_embeddings": 64, "rope_theta": 5000.0, "rope_scaling": None}
NEW = {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}
NESTED = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "rope_theta": 5.0, "hidden_size": 64}}


@pytest.mark.parametrize(
    ("config", "hf_overrides", "rope_scaling", "changed"),
    [
        (BASE, {"rms_norm_eps": 1e-3}, None, {"rms_norm_eps": 1e-3}),
        (
            BASE,
            {"sliding_window": None, "model_type": "mistral"},
            None,
            {"model_type": "mistral", "sliding_window": None},
        ),
        (BASE, None, YARN, {"rope_scaling": YARN}),
        (BASE, None, {**YARN, "rope_theta": 9.0}, {"rope_scaling": YARN, "rope_theta": 9.0}),
        (BASE, None, {"rope_theta": 9.0}, {"rope_theta": 9.0}),
        (BASE, {"rope_scaling": YARN}, None, {"rope_scaling": YARN}),
        (NEW, {"rope_scaling": YARN}, None, {"rope_parameters": {**YARN, "rope_theta": 5000.0}}),
        (NEW, {"rope_theta": 9.0}, None, {"rope_parameters": {**NEW["rope_parameters"], "rope_theta": 9.0}}),
        (NEW, {"rope_parameters": YARN}, None, {"rope_parameters": {**YARN, "rope_theta": 5000.0}}),
        (NEW, None, {"rope_type": "default"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
        (NEW, {"rope_scaling": None}, None, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
        (
            {**BASE, "original_max_position_embeddings": 8},
            None,
            YARN,
            {"rope_scaling": YARN, "original_max_position_embeddings": 16},
        ),
        (
            NESTED,
            {"text_config": {"num_hidden_layers": 1}},
            {"rope_theta": 7.0},
            {"text_config": {**NESTED["text_config"], "num_hidden_layers": 1, "rope_theta": 7.0}},
        ),
    ],
    ids=str,
)
def test_what_is_replaced(
    config: dict[str, Any], hf_overrides: Any, rope_scaling: Any, changed: dict[str, Any]
) -> None:
    assert _given(_overrides(hf_overrides, rope_scaling).merged(config)) == _given({**config, **changed})


def _given(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value or key != "rope_scaling"}


def _overrides(hf_overrides: Any = None, rope_scaling: Any = None) -> Overrides:
    return Overrides(*(None if given is None else json.dumps(given) for given in (hf_overrides, rope_scaling)))


@pytest.mark.parametrize(
    ("config", "hf_overrides", "rope_scaling", "words"),
    [
        (BASE, {"rms_norm_epsilon": 1e-3}, None, "'rms_norm_epsilon'.*llama.*did you mean rms_norm_eps"),
        (BASE, {"speed": 9}, None, "'speed', which no configuration class of a llama model reads. Remove it"),
        (BASE, {"id2label": {}}, None, "'id2label'"),
        (NESTED, {"hidden_size": 9}, None, "'hidden_size'.*text_config has it. Nest it there"),
        (NESTED, {"text_config": {"widht": 9}}, None, "'text_config.widht'.*gemma3_text"),
        (BASE, None, {"rope_type": "yarn", "faktor": 2}, "--rope-scaling has the unknown key 'faktor'.*factor"),
        (BASE, None, {"rope_type": "yarn", "factor": -1}, "--rope-scaling: factor must be a positive number"),
        (BASE, None, {"factor": 2.0}, "--rope-scaling names no rope_type"),
        (BASE, {"rope_scaling": 3}, None, "--hf-overrides: rope_scaling must be an object"),
        ({**BASE, "rope_scaling": {"a": {}, "b": {}}}, None, YARN, r"for each type of layer \(a, b\)"),
    ],
    ids=str,
)
def test_what_nothing_reads_is_refused_by_name(
    config: dict[str, Any], hf_overrides: Any, rope_scaling: Any, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        _overrides(hf_overrides, rope_scaling).merged(config)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize(
    ("hf_overrides", "rope_scaling", "same"),
    [
        (None, YARN, {"rope_parameters": {**YARN, "rope_theta": 10000.0}}),
        (None, {"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0}, None),
        ({"rms_norm_eps": 0.5, "rope_theta": 40.0}, None, None),
        ({"num_hidden_layers": 3, "tie_word_embeddings": False}, {"rope_type": "dynamic", "factor": 2.0}, None),
    ],
    ids=str,
)
def test_logits_equal_the_library_with_the_same_configuration(
    hf_overrides: Any, rope_scaling: Any, same: Any, implementation: Any, tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path / "own")
    given = _overrides(hf_overrides, rope_scaling)
    model = load_model(tmp_path / "own", implementation=implementation, dtype="float32", device="cpu", overrides=given)
    shutil.copytree(tmp_path / "own", tmp_path / "changed")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    changes = {**(hf_overrides or {}), "rope_parameters": {**config["rope_parameters"], **(rope_scaling or {})}}
    if "rope_theta" in changes:
        changes["rope_parameters"]["rope_theta"] = changes.pop("rope_theta")
    (tmp_path / "changed" / "config.json").write_text(json.dumps({**config, **changes, **(same or {})}))
    sequences = random_sequences(VOCAB)
    expected = eager(tmp_path / "changed", torch.float32, sequences)
    got = packed_logits(model, sequences, DenseCache().step)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    plain = eager(tmp_path / "own", torch.float32, sequences)
    changes_logits = rope_scaling is None or rope_scaling["rope_type"] != "dynamic"
    assert torch.allclose(got[1], plain[1], atol=1e-3) != changes_logits


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize(("rope", "limit"), [(LONG, 8), (DYNAMIC, 12)], ids=["longrope", "dynamic"])
def test_the_longest_row_chooses_the_frequencies(
    rope: dict[str, Any], limit: int, implementation: Any, tmp_path: Path
) -> None:
    """As the library chooses them for a sequence of that length, for all rows of a job."""
    longest = limit * 3
    positions = {} if rope is LONG else {"max_position_embeddings": limit}
    save_tiny("llama", tmp_path, rope_parameters=rope, **positions)
    model = load_model(tmp_path, implementation=implementation, dtype="float32", device="cpu", max_model_len=longest)
    assert model.spec.unscaled_context == limit
    long, short = random_sequences(VOCAB, lengths=(longest, limit))
    # Of a new model each: the library's keeps the frequencies of the longest forward.
    expected = [eager(tmp_path, torch.float32, [ids])[0] for ids in (long, short)]
    for length, sequence, wanted in ((longest, long, expected[0]), (limit, short, expected[1])) * 2:
        model.fit_positions(length)
        (got,) = packed_logits(model, [sequence], DenseCache().step)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    model.fit_positions(longest)
    (other,) = packed_logits(model, [short], DenseCache().step)
    assert not torch.allclose(other, expected[1], atol=1e-2)


@pytest.mark.parametrize("model_type", ["phi3", "phimoe"])
def test_longrope_of_library_models(model_type: str, tmp_path: Path) -> None:
    rope = {**LONG, "short_mscale": 1.1, "long_mscale": 1.3} if model_type == "phimoe" else LONG
    save_tiny(model_type, tmp_path, rope_parameters=rope, original_max_position_embeddings=8, sliding_window=None)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    sequences = random_sequences(VOCAB, lengths=(30, 8))
    for length, sequence, wanted in zip((30, 8), sequences, eager(tmp_path, torch.float32, sequences), strict=True):
        model.fit_positions(length)
        (got,) = packed_logits(model, [sequence], DenseCache().step)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_a_longer_context_is_named_with_the_scaling_that_reaches_it(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)  # 512 positions
    with pytest.raises(ModelError, match="--rope-scaling") as caught:
        check_model(tmp_path, max_model_len=2000)
    scaling = str(caught.value).split("--rope-scaling '")[1].split("'")[0]
    spec = inspect_model(tmp_path, max_model_len=2000, overrides=Overrides(rope_scaling=scaling), device="cpu")
    assert spec.context_length == 2000


def test_errors_say_that_the_configuration_is_changed(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    for implementation in ("native", "transformers"):
        with pytest.raises(ModelError, match=r"changed by --hf-overrides\."):
            load_model(tmp_path, implementation=implementation, overrides=_overrides({"num_hidden_layers": 9}))
