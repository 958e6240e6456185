"""Logits processing and sampling, against transformers' `generate`, a plain reference pipeline and rows alone."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.engine import Engine
from batchgen.errors import ErrorCode
from batchgen.kernels.noise import row_keys
from batchgen.request.completion import Completion
from batchgen.request.fields.params import SamplingParams
from tests.engine.pipeline import Oracle
from tests.engine.reference import EXACT, assert_same, eager_model, save_with_words, shared_prefix_prompts
from tests.kernels.references import sample_reference
from tests.models.tiny import VOCAB

NEW_TOKENS = 12
TOLERANCE = 1e-4
EOS = 2

PATHS = ["native", "transformers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_words("llama", tmp_path_factory.mktemp("model"), initializer_range=0.12)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return shared_prefix_prompts(24, VOCAB, seed=5, longest=30)


def engine_of(folder: Path, implementation: str = "native", **options: Any) -> Engine:
    return Engine(str(folder), model_impl=implementation, dtype="float32", page_size=4, **options)


def by_row(engine: Engine, rows: list[dict[str, Any]]) -> list[Completion]:
    """Completions in input order; asserts that none has failed."""
    found = list(engine.generate(rows, ordered=True))
    assert [c.error for c in found] == [None] * len(found)
    return found


# Whole greedy generations against transformers


def generate(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """Greedy ids of transformers' `generate` with eager attention, one batch per prompt length."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        by_length[len(prompt)].append(i)
    found: list[list[int]] = [[] for _ in prompts]
    for length, members in by_length.items():
        batch = torch.tensor([prompts[i] for i in members])
        mask = torch.ones_like(batch)
        with torch.inference_mode():
            out = eager_model(folder).generate(
                batch, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **settings
            )
        for row, i in enumerate(members):
            found[i] = out[row, length:].tolist()
    return found


def cut(ids: list[int]) -> list[int]:
    """The ids up to and including EOS; `generate` pads after it."""
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids


def words_that_bite(plain: list[list[int]], prompts: list[list[int]]) -> list[list[int]]:
    """Sequences of one to three ids out of unshaped outputs, none of which a prompt's end could begin."""
    ends = {token for prompt in prompts for token in prompt[-2:]}
    words = [[plain[0][0]], [plain[1][3]]]
    for output in plain[2:]:
        at = next((i for i in range(1, NEW_TOKENS - 3) if output[i] not in ends), None)
        if at is not None:
            words += [output[at : at + 2], output[at : at + 3]]
    return words[:12]


@pytest.fixture(scope="module")
def generations(folder: Path, prompts: list[list[int]]) -> list[tuple[dict[str, Any], list[list[int]]]]:
    """(fields of a row, ids that transformers generates with equivalent settings); plain rows first."""
    plain = generate(folder, prompts)
    words = words_that_bite(plain, prompts)
    rng = Random(0)
    allowed = sorted(rng.sample(range(3, VOCAB), 40))
    others = [token for token in range(VOCAB) if token not in allowed]
    bias = {token: rng.choice([-5.0, 4.0, 6.5]) for token in rng.sample(range(3, VOCAB), 60)}
    early = {EOS: 9.0}  # so likely that outputs end at once without a minimum
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"ignore_eos": True, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"ignore_eos": True, "repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
        ({"ignore_eos": True, "bad_words": words}, {"bad_words_ids": words}),
        ({"ignore_eos": True, "bad_words": [f"w{w[0]}" for w in words[:2]]}, {"bad_words_ids": words[:2]}),
        ({"ignore_eos": True, "allowed_token_ids": allowed}, {"suppress_tokens": others}),
        ({"ignore_eos": True, "suppress_tokens": others}, {"suppress_tokens": others}),
        (
            {"ignore_eos": True, "begin_suppress_tokens": [o[0] for o in plain], "suppress_tokens": [plain[0][1]]},
            {"begin_suppress_tokens": [o[0] for o in plain], "suppress_tokens": [plain[0][1]]},
        ),
        ({"ignore_eos": True, "logit_bias": bias}, {"sequence_bias": [[[t], b] for t, b in bias.items()]}),
        (
            {"min_new_tokens": 7, "logit_bias": early},
            {"min_new_tokens": 7, "eos_token_id": EOS, "sequence_bias": [[[EOS], 9.0]]},
        ),
        (
            {"ignore_eos": True, "repetition_penalty": 1.2, "bad_words": words, "allowed_token_ids": allowed},
            {"repetition_penalty": 1.2, "bad_words_ids": words, "suppress_tokens": others},
        ),
    ]
    found: list[tuple[dict[str, Any], list[list[int]]]] = [({"ignore_eos": True}, plain)]
    for ours, theirs in settings:
        ids = generate(folder, prompts, **theirs)
        found.append((ours, [cut(output) for output in ids] if "eos_token_id" in theirs else ids))
    return found


@pytest.mark.field(
    "repetition_penalty", "bad_words", "allowed_token_ids", "logit_bias", "min_new_tokens", "suppress_tokens",
    "begin_suppress_tokens",
)  # fmt: skip
@pytest.mark.parametrize("implementation", PATHS)
def test_greedy_generations_equal_transformers(
    folder: Path, prompts: list[list[int]], generations: list[tuple[dict[str, Any], Any]], implementation: str
) -> None:
    greedy = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    rows = [{"input_ids": prompt, **greedy, **ours} for ours, _ in generations for prompt in prompts]
    engine = engine_of(folder, implementation, repetition_penalty_scope="prompt+output")
    done = by_row(engine, rows)
    changed = 0
    plain = generations[0][1]
    for number, (ours, expected) in enumerate(generations):
        got = [list(c.output_ids or []) for c in done[number * len(prompts) : (number + 1) * len(prompts)]]
        assert got == expected, ours
        changed += got != plain
    assert changed == len(generations) - 1, "every setting changes the output"


def test_settings_of_the_model_are_defaults_of_rows(folder: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """As in transformers; a row's own values win."""
    plain = generate(folder, prompts)
    settings: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "bad_words_ids": words_that_bite(plain, prompts),
        "suppress_tokens": [plain[1][1]],
        "begin_suppress_tokens": [output[0] for output in plain[::2]],
    }
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": EOS}))
    greedy = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    own = {"repetition_penalty": 1.0, "bad_words": [], "suppress_tokens": [], "begin_suppress_tokens": []}
    rows = [{"input_ids": prompt, **greedy, **fields} for fields in ({}, own) for prompt in prompts]
    done = by_row(engine_of(model, repetition_penalty_scope="prompt+output"), rows)
    found = [list(completion.output_ids or []) for completion in done]
    assert found == [*generate(folder, prompts, **settings), *plain]


# Every position against the reference pipeline


def drawn_fields(rng: Random, i: int) -> dict[str, Any]:
    """Random fields that process or filter logits."""
    fields: dict[str, Any] = {}
    options: list[Any] = [
        lambda: {"repetition_penalty": rng.choice([0.5, 1.2, 1.9])},
        lambda: {"frequency_penalty": rng.choice([-0.7, 0.4, 2.0])},
        lambda: {"presence_penalty": rng.choice([-1.0, 0.3, 1.5])},
        lambda: {"logit_bias": {str(t): rng.uniform(-6, 6) for t in rng.sample(range(VOCAB), rng.choice([1, 50]))}},
        lambda: {"bad_words": [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))] for _ in range(60)]},
        lambda: {"allowed_token_ids": rng.sample(range(VOCAB), rng.choice([3, 30, 200]))},
        lambda: {name: rng.sample(range(VOCAB), 9) for name in ("suppress_tokens", "begin_suppress_tokens")},
        lambda: {"min_new_tokens": rng.randint(1, NEW_TOKENS), "logit_bias": {str(EOS): 6.0}},
    ]
    for option in rng.sample(options, rng.randint(0, 4)):
        fields |= option()
    filters = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}]
    fields |= {"temperature": 0} if i % 3 == 0 else {"temperature": rng.choice([0.6, 1.0, 1.5]), **rng.choice(filters)}
    return fields | {"seed": i, "max_new_tokens": NEW_TOKENS, "ignore_eos": i % 2 == 0}


def mixed_rows(prompts: list[list[int]], count: int, seed: int) -> list[dict[str, Any]]:
    rng = Random(seed)
    rows = []
    for i in range(count):
        fields = drawn_fields(rng, i)
        ids = rng.sample(range(VOCAB), i % 4)
        fields |= {"return_logprob": True, "top_logprobs_num": i % 5, "token_ids_logprob": ids}
        rows.append({"id": str(i), "input_ids": prompts[i % len(prompts)], **fields})
    return rows


def params_of(row: dict[str, Any]) -> SamplingParams:
    fields = {name: value for name, value in row.items() if name not in ("id", "input_ids")}
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    return SamplingParams(**fields)


@pytest.mark.field(
    "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "allowed_token_ids",
    "min_new_tokens", "return_logprob", "top_logprobs_num", "token_ids_logprob", "seed",
)  # fmt: skip
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_every_position_follows_the_pipeline(
    folder: Path, prompts: list[list[int]], implementation: str, mode: str
) -> None:
    scope = "output" if (implementation == "native") == (mode == "raw") else "prompt+output"
    rows = mixed_rows(prompts, 40, seed=3)
    engine = engine_of(folder, implementation, repetition_penalty_scope=scope, logprobs_mode=mode)
    oracle = Oracle(folder)
    for row, done in zip(rows, by_row(engine, rows), strict=True):
        params = params_of(row)
        stops = [] if params.ignore_eos else [EOS]
        output = list(done.output_ids or [])
        positions = oracle.positions(row["input_ids"], output, params, scope=scope, stops=stops)
        for i, position in enumerate(positions):
            assert position.token == expected_token(position.values, params, i), (row, i)
        expected = np.array([getattr(position, mode) for position in positions])  # [C, V]
        assert_logprobs(done, expected, params)


def expected_token(values: np.ndarray, params: SamplingParams, position: int) -> int:
    """The token that a row with this seed must sample."""
    key = row_keys(torch.tensor([params.seed]), torch.tensor([0]), torch.tensor([position]))
    return sample_reference(values, params.temperature, params.top_k, params.top_p, params.min_p, int(key))


def assert_logprobs(done: Completion, expected: np.ndarray, params: SamplingParams) -> None:
    count, k = len(expected), params.top_logprobs_num
    rows = np.arange(count)
    np.testing.assert_allclose(done.output_logprobs, expected[rows, done.output_ids], atol=TOLERANCE, rtol=0)
    assert done.cumulative_logprob == pytest.approx(float(np.sum(done.output_logprobs, dtype=np.float64)))
    if k:
        ids = np.array(done.output_top_ids).reshape(count, k)
        best = -np.sort(-expected, axis=1)[:, :k]
        np.testing.assert_allclose(np.take_along_axis(expected, ids, 1), best, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(np.reshape(done.output_top_logprobs, (count, k)), best, atol=TOLERANCE, rtol=0)
    else:
        assert done.output_top_ids is None
    named = list(params.token_ids_logprob)
    if named:
        np.testing.assert_allclose(done.output_ids_logprobs, expected[:, named].ravel(), atol=TOLERANCE, rtol=0)
    else:
        assert done.output_ids_logprobs is None


# Rows in any batch, and rows whose masks leave few tokens or none


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
    options: dict[str, Any] = {"repetition_penalty_scope": "prompt+output", "logit_processor": {"push": push}}
    engine = engine_of(folder, implementation, logprobs_mode=mode, **options)
    rows = rows_of(prompts, 24)
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
    assert np.array_equal(done[0].output_logprobs, [0.0])
    assert np.array_equal(done[2].output_logprobs, [0.0, 0.0])


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
    rows = [
        {"input_ids": [i + 3, 7], "temperature": 0, "ignore_eos": True, "max_new_tokens": 1, **named} for i in range(4)
    ]
    rows[0] |= {"allowed_token_ids": [5, 6]}
    done = list(engine.generate(rows, ordered=True))
    assert [c.error.code if c.error else None for c in done] == [ErrorCode.NAN_LOGITS] * 2 + [None] * 2
