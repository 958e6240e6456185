"""Rows with logits processing in any batch, and rows whose masks leave few tokens or none."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.engine import Engine
from batchgen.errors import ErrorCode
from batchgen.request.completion import Completion
from batchgen.request.params import SamplingParams
from tests.engine.pipeline import Oracle, distribution, processed_logits
from tests.engine.reference import save_word_tokenizer, shared_prefix_prompts
from tests.engine.sampling.chi_square import p_value
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


def assert_same(a: Completion, b: Completion) -> None:
    assert (a.id, a.sample_index, a.error) == (b.id, b.sample_index, b.error)
    assert list(a.output_ids or []) == list(b.output_ids or [])
    assert a.output_top_ids == b.output_top_ids
    for name in ("output_logprobs", "output_top_logprobs"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None)
        if left is not None:
            np.testing.assert_allclose(left, right, atol=1e-4, rtol=0)


@pytest.mark.field(
    "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "allowed_token_ids",
    "min_new_tokens", "custom_logit_processor", "n",
)  # fmt: skip
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("mode", ["raw", "processed"])
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
    assert engine.last_run is not None
    assert engine.last_run.scheduler.stats.preemptions > 0
    alone = [c for row in rows[:25] for c in engine.generate([row])]
    assert len(again) == len(together)
    for completion in [*again, *alone]:
        assert_same(completion, together[completion.id, completion.sample_index])


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
            assert done.error is not None
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


MIXES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.6, "top_k": 20},
    {"logit_bias": {"5": 3.0, "9": -4.0}, "top_p": 0.7},
    {"allowed_token_ids": list(range(0, VOCAB, 9)), "temperature": 0.7},
    {"bad_words": [[5], [9], [77]], "repetition_penalty": 0.6, "min_p": 0.05},
    {"allowed_token_ids": list(range(90)), "logit_bias": {"5": 2.0}, "bad_words": [[8]], "top_k": 30, "top_p": 0.9},
]


@pytest.mark.field("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words")
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_tokens_follow_the_processed_and_filtered_distribution(folder: Path, mix: dict[str, Any]) -> None:
    """Chi-square test of 8,000 first tokens, and their processed logprobs exactly."""
    prompt, draws = [5, 9, 77, 30, 31], 8_000
    fields = {"temperature": 1.2, **mix, "max_new_tokens": 1, "ignore_eos": True}
    asked = {"return_logprob": True, "top_logprobs_num": VOCAB}
    engine = engine_of(folder, repetition_penalty_scope="prompt+output", logprobs_mode="processed")
    rows = [{"input_ids": prompt, **fields, "n": 400, "seed": seed} for seed in range(draws // 400)]
    rows[0] |= asked
    done = list(engine.generate(rows))
    params = SamplingParams(**fields | {"logit_bias": {int(t): b for t, b in mix.get("logit_bias", {}).items()}})
    logits = Oracle(folder).positions(prompt, [0], SamplingParams())[0].logits
    exact = distribution(processed_logits(logits, prompt, [], params, "prompt+output"), params)
    counts = np.bincount([(c.output_ids or [-1])[0] for c in done], minlength=VOCAB)
    assert counts.sum() == draws
    assert not counts[exact == 0].any()
    assert p_value(counts, exact * draws) > 1e-3
    first = next(c for c in done if c.output_top_ids is not None)
    got = np.full(VOCAB, -np.inf)
    got[first.output_top_ids] = first.output_top_logprobs
    np.testing.assert_allclose(np.exp(got), exact, atol=1e-5, rtol=0)
    assert (np.isfinite(got) == (exact > 0)).all()
