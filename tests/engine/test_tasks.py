"""Rows that return embeddings or scores: equal to the library's results for each row alone, with the pooling written
out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from batchgen import Engine
from batchgen.errors import ErrorCode, ModelError, UsageError
from batchgen.request.completion import Completion, LabelScore
from tests.models.tiny_encoders import (
    Floats,
    add_modules,
    library_logits,
    library_states,
    save_encoder,
    save_scorer,
    texts,
    write,
)

TEXTS = texts(12, longest=50)
FAST = ("bert", "xlm-roberta", "modernbert")
SLOW = (
    "roberta", "xlm-roberta-xl", "camembert", "distilbert", "electra", "ernie", "nomic_bert", "eurobert",
    "roberta-prelayernorm", "albert",
)  # fmt: skip
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def run(folder: Path, rows: Sequence[dict[str, Any]], **options: Any) -> list[Completion]:
    """The completions of rows, in order; small steps, so that a job has several."""
    engine = Engine(str(folder), **{"dtype": "float32", "max_tokens_per_step": 64, "max_num_seqs": 8, **options})
    return list(engine.generate(rows, ordered=True))


def embeddings(folder: Path, rows: Sequence[str] | Sequence[dict[str, Any]], **options: Any) -> list[Floats]:
    given: Any = [{"text": row, "embed": True} if isinstance(row, str) else row for row in rows]
    done = run(folder, given, **options)
    assert [each.error for each in done] == [None] * len(done)
    return [np.asarray(each.embedding) for each in done]


def scores(folder: Path, rows: Sequence[dict[str, Any]], **options: Any) -> list[Floats]:
    done = run(folder, rows, **options)
    assert [each.error for each in done] == [None] * len(done)
    listed = [[s.score for s in each.scores or () if isinstance(s, LabelScore)] for each in done]
    return [np.array(each, np.float32) for each in listed]


def assert_close(got: Sequence[Floats], expected: Sequence[Floats]) -> None:
    assert [x.dtype for x in got] == [np.dtype(np.float32)] * len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def unit(x: Floats) -> Floats:
    made: Floats = x / np.linalg.norm(x)
    return made


@pytest.mark.field("embed")
@pytest.mark.parametrize("kind", [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_packed_rows_of_encoders(kind: str, tmp_path: Path) -> None:
    """Rows of all lengths, longer than a window too, in steps with others; without files, the mean is pooled."""
    folder = save_encoder(kind, tmp_path)
    states = library_states(folder, TEXTS)
    assert max(map(len, states)) > 40
    assert_close(embeddings(folder, TEXTS), [x.mean(0) for x in states])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def states(encoder: Path) -> list[Floats]:
    return library_states(encoder, TEXTS)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_scorer("bert", tmp_path_factory.mktemp("scorer"))


def pooled(modes: Sequence[str], x: Floats) -> Floats:
    """The pooling of sentence-transformers, written out."""
    weights = np.arange(1, len(x) + 1, dtype=np.float32)
    by_mode = {
        "cls": x[0],
        "max": x.max(0),
        "mean": x.mean(0),
        "mean_sqrt_len_tokens": x.sum(0) / np.sqrt(len(x)),
        "weightedmean": weights @ x / weights.sum(),
        "lasttoken": x[-1],
    }
    return np.concatenate([by_mode[mode] for mode in modes]).astype(np.float32)


@pytest.mark.parametrize(
    "modes",
    [["cls"], ["max"], ["mean"], ["mean_sqrt_len_tokens"], ["weightedmean"], ["lasttoken"], ["cls", "max", "mean"]],
    ids="+".join,
)
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_pooling_of_the_files(kind: str, modes: list[str], tmp_path: Path) -> None:
    """A causal checkpoint shares prefixes, whose states are pooled all the same."""
    folder = save_encoder(kind, tmp_path, words="end" if kind == "qwen3" else None)
    old = {
        f"pooling_mode_{mode}" + ("_token" if mode == "cls" else "" if mode == "lasttoken" else "_tokens")
        for mode in modes
    }
    old = {name.replace("_tokens_tokens", "_tokens") for name in old}
    add_modules(folder, dict.fromkeys(sorted(old), True) if modes != ["max"] else {"pooling_mode": "max"})
    shared = [f"the quick brown fox {text}"[:200] for text in TEXTS]
    expected = [pooled(modes, x) for x in library_states(folder, shared)]
    assert_close(embeddings(folder, shared, max_model_len=60), expected)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_causal_checkpoints_without_a_language_head(kind: str, tmp_path: Path) -> None:
    """Without files the last token is pooled; options choose otherwise, and normalise."""
    folder = save_encoder(kind, tmp_path, words="end", tie_word_embeddings=False)
    expected = library_states(folder, TEXTS)
    assert_close(embeddings(folder, TEXTS), [x[-1] for x in expected])
    assert_close(embeddings(folder, TEXTS, pooling="cls", normalize=True), [unit(x[0]) for x in expected])
    refused = run(folder, [{"text": "the fox"}, {"text": "the", "completion": " fox"}])
    assert [each.error and each.error.code for each in refused] == [ErrorCode.UNSUPPORTED_FIELD] * 2


def test_dense_layers_norm_prompts_and_dimensions(encoder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in encoder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    add_modules(
        folder, {"pooling_mode_mean_tokens": True}, "Dense", "Normalize",
        prompts={"query": "find the ", "plain": ""}, default_prompt_name="plain", transformer={"do_lower_case": True},
    )  # fmt: skip
    weight, bias = torch.randn(24, 64) / 8, torch.randn(24)
    about = {
        "in_features": 64,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write(folder / "2_Dense" / "config.json", about)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    rows = [
        {"text": "Green LAKE", "embed": True},
        {"text": "green lake", "embed": True, "prompt_name": "query"},
        {"text": "green lake", "embed": True, "dimensions": 5},
        {"text": ["green lake", "stone"], "embed": True},
        {"input_ids": [0, 8, 9, 2], "embed": True},
    ]
    plain = ["green lake", "find the green lake", "green lake", "green lake", "stone"]
    dense = [np.tanh(weight.numpy() @ x.mean(0) + bias.numpy()) for x in library_states(folder, plain)]
    expected = [unit(x[: 5 if i == 2 else None]) for i, x in enumerate(dense)]
    got = embeddings(folder, rows)
    assert_close(got[:5], expected)
    assert np.isclose(np.linalg.norm(got[5]), 1.0)
    wrong = [
        {"text": "a", "embed": True, "dimensions": 25},
        {"text": "a", "embed": True, "prompt_name": "other"},
        {"input_ids": [0, 2], "embed": True, "prompt_name": "query"},
    ]
    found = [(each.error.code, each.error.param) for each in run(folder, wrong) if each.error is not None]
    assert found == [(ErrorCode.INVALID_FIELD, name) for name in ("dimensions", "prompt_name", "prompt_name")]


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum(), np.float32)


def sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


SCORERS = (
    ("bert", {}), ("xlm-roberta", {}), ("modernbert", {"classifier_pooling": "mean"}), ("qwen3", {"words": "end"}),
    *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in ("distilbert", "electra", "camembert")),
    pytest.param("modernbert", {"classifier_pooling": "cls"}, marks=pytest.mark.slow),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "fields"), SCORERS)
def test_labels_of_texts(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    folder = save_scorer(kind, tmp_path, **fields)
    expected = [softmax(x) for x in library_logits(folder, TEXTS)]
    rows = [{"text": text, "classify": True} for text in TEXTS]
    assert_close(scores(folder, rows), expected)
    done = run(folder, rows[:2])
    for each, values in zip(done, expected, strict=False):
        assert [s.label for s in each.scores or () if isinstance(s, LabelScore)] == ["label 0", "label 1", "label 2"]
        assert each.text == f"label {values.argmax()}"
    multi = save_scorer(kind, tmp_path / "multi", **fields, problem_type="multi_label_classification")
    assert_close(scores(multi, rows[:3]), [sigmoid(x) for x in library_logits(multi, TEXTS[:3])])


@pytest.mark.parametrize(("kind", "fields"), SCORERS)
def test_documents_for_a_query(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Each document is a prompt of its row; queries and documents are two texts with their own types of tokens."""
    folder = save_scorer(kind, tmp_path, labels=1, **fields)
    documents = texts(7, longest=20, seed=1)
    expected = library_logits(folder, [("the green lake", document) for document in documents])
    row = {"query": "the green lake", "documents": documents}
    assert_close(scores(folder, [row]), [sigmoid(x) for x in expected])
    plain = save_scorer(
        kind, tmp_path / "plain", labels=1, **fields, sbert_ce_default_activation_function="torch.nn.Identity"
    )
    assert_close(scores(plain, [row]), expected)


def test_rows_up_to_the_whole_context(encoder: Path) -> None:
    """The room for special tokens is known, so that a row of as many words as fit is computed, and no longer one."""
    fits, long = (" ".join(["fox"] * count) for count in (64, 65))
    (whole,) = library_states(encoder, [fits])
    assert_close(embeddings(encoder, [fits]), [whole.mean(0)])
    (refused,) = run(encoder, [{"text": long, "embed": True}])
    assert refused.error is not None
    assert refused.error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "has 65 tokens, and a row of this checkpoint at most 64" in refused.error.message


def test_equal_rows_are_computed_once_and_others_share_nothing(encoder: Path, states: list[Floats]) -> None:
    rows = [{"text": TEXTS[0], "embed": True}, {"text": TEXTS[0], "embed": True, "dimensions": 3}] * 2
    for dedup in (True, False):
        done = run(encoder, rows, dedup=dedup)
        assert [each.dedup_of for each in done] == ([None, None, 0, 1] if dedup else [None] * 4)
        expected = [states[0].mean(0), states[0].mean(0)[:3]] * 2
        assert_close([np.asarray(each.embedding) for each in done], expected)


def test_what_a_checkpoint_cannot_do(encoder: Path, scorer: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "fox"},
        {"text": "fox", "completions": [" a"]},
        {"text": "fox", "classify": True},
        {"query": "fox", "documents": ["a"]},
        {"text": "fox </s> a", "embed": True},
        {"text": "fox", "embed": True},
    ]
    found = [(each.error.code, each.error.param) if each.error else None for each in run(encoder, rows)]
    unsupported = ErrorCode.UNSUPPORTED_FIELD
    assert found == [
        (unsupported, "embed"), (unsupported, "embed"), (unsupported, "classify"), (unsupported, "documents"),
        (ErrorCode.INVALID_FIELD, "text"), None,
    ]  # fmt: skip
    (several,) = run(scorer, [rows[3]])
    assert several.error is not None
    assert "scores one label, and this one has 3" in several.error.message
    folder = save_encoder("bert", tmp_path)
    add_modules(folder, {"pooling_mode": "mean"}, "Router")
    (odd,) = run(folder, [rows[5]])
    assert odd.error is not None
    assert "Router" in odd.error.message
    with pytest.raises(UsageError, match="not supported for a bert encoder"):
        Engine(str(encoder), deterministic=True)
    with pytest.raises(ModelError, match="native decoder"):
        Engine(str(encoder), model_impl="native")
    (folder / "modules.json").write_text('{"type": 1}')
    with pytest.raises(ModelError, match=r"modules\.json"):
        Engine(str(folder))


def test_states_that_are_not_finite_fail_their_row_alone(encoder: Path) -> None:
    engine = Engine(str(encoder), dtype="float32")
    table = next(module for module in engine.model._model.modules() if isinstance(module, torch.nn.Embedding))  # type: ignore[attr-defined]
    with torch.no_grad():
        table.weight[8] = torch.nan
    done = list(engine.generate([{"input_ids": ids, "embed": True} for ids in ([0, 8, 2], [0, 9, 2])], ordered=True))
    assert done[0].error is not None
    assert done[0].error.code == ErrorCode.NAN_LOGITS
    assert done[1].error is None
