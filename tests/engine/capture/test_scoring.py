"""Scoring rows against eager logits in float32, together with rows that generate, in different batches and pools."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.engine.outputs.processor import Scores
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request.completion import Completion
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import Request
from tests.engine.reference import eager_logprobs, save_with_words, shared_prefix_prompts
from tests.models.tiny import VOCAB

pytestmark = pytest.mark.field("completion", "completions")
TOLERANCE = 1e-4
Row = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_words("qwen3", tmp_path_factory.mktemp("qwen3"))


def scoring_rows(count: int, seed: int) -> list[Row]:
    """Rows with several prompts and texts; texts may be equal or share a prefix, and rows may share prompts."""
    rng = Random(seed)
    prompts = shared_prefix_prompts(count, VOCAB, seed)

    def text() -> list[int]:
        stem = [7, 8, 9][: rng.randint(0, 3)]
        return stem + [rng.randrange(3, VOCAB) for _ in range(rng.randint(0 if stem else 1, 5))]

    rows: list[Row] = []
    for i, prompt in enumerate(prompts):
        source = [prompt, prompts[rng.randrange(count)]] if i % 5 == 0 else prompt
        several = [text() for _ in range(1 if i % 3 == 0 else rng.randint(1, 4))]
        rows.append({"input_ids": source, **({"completion": several[0]} if i % 3 == 0 else {"completions": several})})
    rows[1]["completions"] = [[7, 8], [7, 8], [7]]
    rows[4] = {**rows[2]}
    return rows


def pairs(row: Row) -> list[list[tuple[list[int], list[int]]]]:
    """The (prompt, text) pairs of each prompt."""
    prompts = row["input_ids"] if isinstance(row["input_ids"][0], list) else [row["input_ids"]]
    texts = [row["completion"]] if "completion" in row else row["completions"]
    return [[(prompt, text) for text in texts] for prompt in prompts]


def assert_scores(done: Completion, expected: list[tuple[list[int], list[int]]], folder: Path) -> None:
    assert done.error is None, done.error
    assert (done.text, done.output_ids, done.seed) == (None, None, None)
    assert (done.finish_reason, done.completion_tokens, done.sample_index) == ("length", 0, 0)
    references = eager_logprobs(folder, [prompt + text for prompt, text in expected])
    flat: list[float] = []
    for score, (prompt, text), logprobs in zip(done.scores, expected, references, strict=True):
        rows = logprobs[len(prompt) - 1 : -1]
        values = rows[np.arange(len(text)), text]
        flat += values.tolist()
        assert score.tokens == len(text)
        assert score.sum == pytest.approx(values.sum(), abs=TOLERANCE * len(text))
        assert score.mean == pytest.approx(values.mean(), abs=TOLERANCE)
        assert score.is_greedy == (rows.argmax(-1) == text).all()
    np.testing.assert_allclose(done.score_logprobs, flat, atol=TOLERANCE)
    assert list(done.prompt_ids) == [token for prompt, text in expected for token in prompt + text]
    assert done.prompt_tokens == len(done.prompt_ids)


def check(engine: Engine, rows: list[Row], folder: Path, others: list[Row]) -> list[Completion]:
    done = list(engine.generate([*rows, *others], ordered=True))
    scored = [c for c in done if c.row_index < len(rows)]
    keys = [(i, p) for i, row in enumerate(rows) for p in range(len(pairs(row)))]
    assert [(c.row_index, c.prompt_index) for c in scored] == keys, "one output row per prompt, in order"
    for completion in scored:
        assert_scores(completion, pairs(rows[completion.row_index])[completion.prompt_index], folder)
    return done[len(scored) :]


def greedy_rows(rows: list[Row]) -> list[Row]:
    """Rows that generate from the prompts of scoring rows, with and without prompt logprobs."""
    found = [{"input_ids": pairs(row)[0][0], "temperature": 0, "max_new_tokens": 3} for row in rows[::4]]
    return [{**row, "return_logprob": True, "logprob_start_len": i % 2} for i, row in enumerate(found)]


@pytest.mark.parametrize(
    ("implementation", "shape"),
    [("native", {}), ("transformers", {"max_num_seqs": 2, "max_tokens_per_step": 5, "page_size": 4})],
    ids=str,
)
def test_scores_equal_eager(folder: Path, implementation: str, shape: Row) -> None:
    engine = Engine(str(folder), model_impl=implementation, dtype="float32", **shape)
    rows = scoring_rows(30, seed=2)
    others = greedy_rows(rows)
    alone = list(engine.generate(others, ordered=True))
    together = check(engine, rows, folder, others)
    assert [c.output_ids for c in together] == [c.output_ids for c in alone]


@pytest.mark.parametrize(("model_type", "page_size"), [("qwen3", 4), ("gpt2", 16)], ids=str)
def test_the_last_token_may_be_past_the_context(model_type: str, page_size: int, tmp_path: Path) -> None:
    """It is scored by those before it: a model's own positions are enough, also where they are learned."""
    context = 24
    own = {"max_position_embeddings": context} if model_type == "qwen3" else {"n_positions": context}
    folder = save_with_words(model_type, tmp_path, **own)
    engine = Engine(str(folder), dtype="float32", page_size=page_size)
    ids = [token % VOCAB for token in range(7, 7 + 5 * (context + 1), 5)]
    borders = [1, context // 2, context]
    rows = [{"input_ids": ids[:border], "completion": ids[border:]} for border in borders]
    done = list(engine.generate([*rows, {"input_ids": ids[:-4], "temperature": 0, "max_new_tokens": 4}], ordered=True))
    (logprobs,) = eager_logprobs(folder, [ids[:-1]])
    for completion, border in zip(done, borders, strict=False):
        expected = logprobs[np.arange(border - 1, context), ids[border:]]
        np.testing.assert_allclose(completion.score_logprobs, expected, atol=TOLERANCE)
    assert done[-1].completion_tokens == 3, "what is generated fills the context"
    (refused,) = engine.generate([{"input_ids": ids, "completion": [5]}])
    assert refused.error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_in_a_pool_for_little_more_than_one_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(str(folder), dtype="float32", page_size=4)
    rows = scoring_rows(30, seed=5)
    longest = max(len(prompt) + len(text) for row in rows for group in pairs(row) for prompt, text in group)
    engine.order, engine.admission = "tree", "free"  # nodes are to be evicted
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: -(-(longest + 3) // 4) + 2)
    check(engine, rows, folder, greedy_rows(rows))
    assert engine.last_run.scheduler.stats.evicted_nodes > 0


def test_shared_tokens_of_texts_are_computed_and_scored_once(folder: Path) -> None:
    engine = Engine(str(folder), dtype="float32", max_num_seqs=64)
    prompt = list(range(3, 43))
    rows = [{"input_ids": prompt, "completions": [[50, 51], [50, 52], [50]]}, {"input_ids": prompt, "completion": [53]}]
    done = list(engine.generate(rows, ordered=True))
    stats = engine.last_run.scheduler.stats
    assert stats.prompt_tokens == len(prompt) + 4
    assert stats.recomputed_last_tokens == 0
    # The prompt's last position scores both first tokens, the shared first token scores both second ones.
    assert engine.last_run.loop.prompts.buffers.positions == 2
    assert sum((c.prompt_tokens or 0) - (c.cached_tokens or 0) for c in done) == len(prompt) + 4


def test_which_texts_are_greedy(folder: Path) -> None:
    """Prefixes of the greedy output; of equal logits the lowest id."""
    engine = Engine(str(folder), dtype="float32")
    prompt = [5, 6, 7]
    (path,) = engine.generate([{"input_ids": prompt, "temperature": 0, "max_new_tokens": 4, "ignore_eos": True}])
    best = list(path.output_ids)
    off = [best[0], (best[1] + 1) % VOCAB, *best[2:]]
    (done,) = engine.generate([{"input_ids": prompt, "completions": [best, best[:1], off, off[:2], best[:3]]}])
    assert [score.is_greedy for score in done.scores] == [True, True, False, False, True]
    head = engine.model.logits
    engine.model.logits = lambda hidden: torch.zeros_like(head(hidden))  # type: ignore[method-assign]
    (done,) = engine.generate([{"input_ids": [5], "completions": [[0], [1]]}])
    assert [score.is_greedy for score in done.scores] == [True, False]
    assert done.scores[1].sum == pytest.approx(-np.log(VOCAB))


def test_text_is_scored_with_its_prompt(folder: Path) -> None:
    engine = Engine(str(folder), dtype="float32")
    (by_text,) = engine.generate([{"text": "w5 w6", "completions": [" w7 w8", " w9"]}])
    (by_ids,) = engine.generate([{"input_ids": [5, 6], "completions": [[7, 8], [9]]}])
    same = {"id": None, "prompt_ids": by_text.prompt_ids, "score_logprobs": by_text.score_logprobs}
    assert replace(by_text, id=None) == replace(by_ids, **same)
    np.testing.assert_array_equal(by_text.score_logprobs, by_ids.score_logprobs)


def test_a_text_too_large_for_the_pool_only_fails_its_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(str(folder), dtype="float32", page_size=4)
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 5)
    rows = [{"input_ids": [[3, 4], [5] * 12], "completions": [[6], [7] * 6]}, {"input_ids": [3, 4], "completion": [8]}]
    done = list(engine.generate(rows, ordered=True))
    assert [(c.row_index, c.prompt_index) for c in done] == [(0, 0), (0, 1), (1, 0)]
    assert [c.error.code if c.error is not None else None for c in done] == [None, ErrorCode.OOM, None]
    assert_scores(done[0], [([3, 4], [6]), ([3, 4], [7] * 6)], folder)


def test_a_prompt_reports_the_error_of_its_first_failed_text() -> None:
    workload: Any = SimpleNamespace(table=None, tree=None, first_text=np.array([0, 0, 0]))
    asked = [Request(i, 7, 0, np.array([1, 2], np.int32), SamplingParams(), 0, 0, score_start=1) for i in range(3)]
    errors = [ErrorInfo(ErrorCode.NAN_LOGITS, f"text {i}") for i in range(3)]
    for order in permutations(range(3)):
        scores = Scores(workload, None, prompt_ids=True)  # type: ignore[arg-type]
        *before, (done,) = [scores.add(asked[i], errors[i]) for i in order]
        assert (before, done) == ([[], []], Completion(7, error=errors[0]))


def test_nan_logits_fail_the_prompts_that_read_them(folder: Path) -> None:
    engine = Engine(str(folder), dtype="float32")
    head = engine.model.logits
    seen: list[torch.Tensor] = []
    engine.model.logits = lambda hidden: seen.append(head(hidden)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    list(engine.generate([{"input_ids": [3, 4], "completion": [5]}]))
    bad = seen[0][-1]

    def with_nan(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        return torch.where(((logits - bad).abs().amax(dim=-1) < 1e-4)[:, None], torch.nan, logits)

    engine.model.logits = with_nan  # type: ignore[method-assign]
    rows = [{"input_ids": [3, 4], "completions": [[6], [5, 7]]}, {"input_ids": [3], "completion": [8]}]
    done = list(engine.generate(rows, ordered=True))
    assert [c.error.code if c.error is not None else None for c in done] == [ErrorCode.NAN_LOGITS, None]
