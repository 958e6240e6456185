"""Rows with logits processing in any batch, and rows whose masks leave few tokens or none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.engine import Engine
from batchgen.errors import ErrorCode
from tests.engine.reference import EXACT, assert_same, save_word_tokenizer, shared_prefix_prompts
from tests.engine.sampling.test_logits_processor import drawn_fields
from tests.models.tiny import VOCAB, save_tiny

NEW_TOKENS = 12
PATHS = ["native", "transformers"]
PLAIN = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny("llama", folder, initializer_range=0.12)
    save_word_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return shared_prefix_prompts(16, VOCAB, seed=8, longest=24)


def engine_of(folder: Path, implementation: str = "native", **options: Any) -> Engine:
    return Engine(str(folder), model_impl=implementation, dtype="float32", page_size=4, **options)


def push(logits: Tensor, rows: Any) -> Tensor:
    for i, row in enumerate(rows):
        logits[i, (7 * len(row.output_ids) + row.prompt_ids[0]) % VOCAB] += row.params["by"]
    return logits


def rows_of(prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
    """Plain rows and rows with every kind of logits processing, with several samples each."""
    rng = Random(7)
    rows: list[dict[str, Any]] = []
    for i in range(count):
        fields = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS} if i % 4 == 0 else drawn_fields(rng, i)
        if i % 5 == 1:
            fields |= {"custom_logit_processor": "push", "custom_params": {"by": float(i % 7)}}
        fields |= {"return_logprob": i % 3 == 1, "top_logprobs_num": 2 if i % 3 == 1 else 0, "n": 1 + i % 3}
        rows.append({"id": str(i), "input_ids": prompts[i % len(prompts)], **fields})
    return rows


@pytest.mark.field(
    "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "allowed_token_ids",
    "min_new_tokens", "custom_logit_processor", "n",
)  # fmt: skip
@pytest.mark.parametrize(("implementation", "mode"), [("native", "processed"), ("transformers", "raw")])
def test_rows_are_the_same_alone_shuffled_and_preempted(
    folder: Path, prompts: list[list[int]], implementation: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(
        folder,
        implementation,
        logprobs_mode=mode,
        repetition_penalty_scope="prompt+output",
        logit_processor={"push": push},
    )
    rows = rows_of(prompts, 40)
    together = {(c.id, c.sample_index): c for c in engine.generate(rows)}
    Random(1).shuffle(rows)
    longest = max(map(len, prompts)) + NEW_TOKENS
    engine.order, engine.admission = "tree", "free"  # rows are to be preempted
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 2 * longest // 4 + 4)
    again = list(engine.generate(rows))
    assert engine.last_run.scheduler.stats.preemptions > 0
    alone = [c for row in rows[:8] for c in engine.generate([row])]
    assert len(again) == len(together)
    for completion in [*again, *alone]:
        expected = together[completion.id, completion.sample_index]
        assert_same(replace(completion, row_index=expected.row_index), expected, 1e-4, EXACT)


@pytest.mark.field("allowed_token_ids", "min_new_tokens")
def test_min_new_tokens_is_ignored_if_no_other_token_is_left(folder: Path, prompts: list[list[int]]) -> None:
    base = {"input_ids": prompts[0], "temperature": 0, "max_new_tokens": 6, "return_logprob": True}
    rows = [
        base | {"min_new_tokens": 4, "allowed_token_ids": [9], "stop_token_ids": [9]},
        base | {"min_new_tokens": 4, "allowed_token_ids": [9, 11], "stop_token_ids": [9], "logit_bias": {"9": 50}},
        base | {"min_new_tokens": 3, "allowed_token_ids": [9, 11], "bad_words": [[11, 11]], "stop_token_ids": [9]},
        base | {"min_new_tokens": 4, "stop_token_ids": list(range(VOCAB))},
    ]
    for mode in ("raw", "processed"):
        done = list(engine_of(folder, logprobs_mode=mode).generate(rows, ordered=True))
        assert [c.error for c in done] == [None] * 4
        assert [list(c.output_ids or []) for c in done[:3]] == [[9], [11] * 4 + [9], [11, 9]]
        assert [c.min_new_tokens_unmet for c in done] == [True, False, True, True]
        assert [c.stop_kind for c in done] == ["token"] * 4
    assert done[0].output_logprobs == [0.0]
    assert done[2].output_logprobs == [0.0, 0.0]


@pytest.mark.field("allowed_token_ids", "bad_words")
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_rows_without_a_token_to_sample_fail_with_the_fields(
    folder: Path, prompts: list[list[int]], temperature: float
) -> None:
    base = {"input_ids": prompts[0], "temperature": temperature, "max_new_tokens": 6, "return_logprob": True}
    rows = [
        base | {"allowed_token_ids": [9, 5], "bad_words": [[5], "w9"]},
        base | {"bad_words": [[i] for i in range(VOCAB)], "n": 2},
        base | {"allowed_token_ids": [9], "bad_words": [[9, 9]]},
        base,
    ]
    for mode in ("raw", "processed"):
        both, words, later, plain = engine_of(folder, logprobs_mode=mode).generate(rows, ordered=True)
        assert plain.error is None
        for done, named in ((both, "`allowed_token_ids` and `bad_words`"), (words, "`bad_words`"), (later, "both")):
            assert done.error.code == ErrorCode.INVALID_FIELD
            assert "left no token to sample" in done.error.message
            assert named == "both" or done.error.message.startswith(named)
        assert (both.error.param, words.error.param) == ("allowed_token_ids", "bad_words")  # type: ignore[union-attr]


def test_nan_logits_are_an_error_despite_a_mask(
    folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN logits of the model give `nan_logits`, whatever the row masks, and are not passed to processors."""

    def watch(logits: Tensor, rows: Any) -> Tensor:
        assert not logits.isnan().any()
        return logits

    engine = engine_of(folder, logit_processor={"watch": watch})
    logits = engine.model.logits

    def broken(hidden: Tensor) -> Tensor:
        found = logits(hidden)
        found[:2, 100] = torch.nan
        return found

    monkeypatch.setattr(engine.model, "logits", broken)
    named = {"custom_logit_processor": "watch", "return_logprob": True, "top_logprobs_num": 3}
    rows = [{"input_ids": [i + 3, 7], **PLAIN, "max_new_tokens": 1, **named} for i in range(4)]
    rows[0] |= {"allowed_token_ids": [5, 6]}
    done = list(engine.generate(rows, ordered=True))
    assert [c.error.code if c.error else None for c in done] == [ErrorCode.NAN_LOGITS] * 2 + [None] * 2
