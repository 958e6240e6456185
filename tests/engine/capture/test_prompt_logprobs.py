"""Prompt logprobs against eager logits in float32, for every start and K, in different batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.errors import ErrorCode
from batchgen.request.completion import Completion
from batchgen.request.fields.params import SamplingParams
from tests.engine.jobs import finish
from tests.engine.reference import eager_logprobs, save_with_words, shared_prefix_prompts
from tests.models.tiny import VOCAB

TOLERANCE = 1e-4
COUNT = 60
FIELDS = pytest.mark.field("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_logprob")


@pytest.fixture(scope="module", params=[("qwen3", "native"), ("gemma2", "transformers")])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(options of the model, prompts, [P, V] reference logprobs of each)."""
    model_type, implementation = request.param
    folder = tmp_path_factory.mktemp(model_type)
    save_with_words(model_type, folder)
    prompts = shared_prefix_prompts(COUNT, VOCAB, seed=3)
    options = {"model": str(folder), "model_impl": implementation, "dtype": "float32"}
    return options, prompts, eager_logprobs(folder, prompts)


def asked(rng: Random, length: int) -> SamplingParams:
    """Random parameters: some rows return no prompt logprobs, most have a random start, K and ids."""
    start = rng.choice([-1, 0, 0, 1, length - 1, length, rng.randint(0, length)])
    return SamplingParams(
        max_new_tokens=rng.choice([0, 0, 1, 4]),
        temperature=rng.choice([0.0, 1.0]),
        ignore_eos=True,
        n=rng.choice([1, 1, 2]),
        return_logprob=True,
        logprob_start_len=min(start, length),
        top_logprobs_num=rng.choice([0, 1, 5, VOCAB]),
        token_ids_logprob=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 3]))),
    )


def listed(values: Any) -> list[Any]:
    found: list[Any] = values.tolist()
    return found


def assert_prompt(done: Completion, ids: list[int], params: SamplingParams, reference: np.ndarray) -> None:
    """All `input_*` columns against the reference [P, V]."""
    assert done.error is None, done.error
    start, k, named = params.logprob_start_len, params.top_logprobs_num, params.token_ids_logprob
    if start < 0:
        assert done.input_logprobs is done.input_top_ids is done.input_ids_logprobs is None
        return
    size, missing = len(ids) - start, int(start == 0)
    rows = reference[max(start - 1, 0) : len(ids) - 1]
    logprobs = listed(done.input_logprobs)
    assert (len(logprobs), logprobs[:missing]) == (size, [None] * missing)
    np.testing.assert_allclose(logprobs[missing:], rows[np.arange(len(rows)), ids[start + missing :]], atol=TOLERANCE)
    if not k:
        assert done.input_top_ids is done.input_top_logprobs is None
    else:
        top_ids, top = listed(done.input_top_ids), listed(done.input_top_logprobs)
        assert (len(top_ids), len(top)) == (size * k, size * k)
        assert top_ids[: missing * k] == top[: missing * k] == [None] * missing * k
        top_ids, top = (np.array(x[missing * k :]).reshape(-1, k) for x in (top_ids, top))
        np.testing.assert_allclose(top, -np.sort(-rows, axis=-1)[:, :k], atol=TOLERANCE)
        np.testing.assert_allclose(top, np.take_along_axis(rows, top_ids, -1) if len(rows) else top, atol=TOLERANCE)
        assert all(len(set(row)) == k for row in top_ids.tolist())
    if not named:
        assert done.input_ids_logprobs is None
    else:
        found = listed(done.input_ids_logprobs)
        assert found[: missing * len(named)] == [None] * missing * len(named)
        expected = rows[:, list(named)].ravel()
        np.testing.assert_allclose(found[missing * len(named) :], expected, atol=TOLERANCE)


def run(engine: Engine, prompts: list[list[int]], wanted: list[SamplingParams], references: list[np.ndarray]) -> None:
    done = finish(engine, list(zip(prompts, wanted, strict=True)))
    assert len(done) == sum(p.n for p in wanted)
    for completion in done:
        i = completion.row_index
        assert_prompt(completion, prompts[i], wanted[i], references[i])


def scored(engine: Engine) -> int:
    """Number of positions scored by the engine's last job."""
    return engine.last_run.loop.prompts.buffers.positions


def distinct(prompts: list[list[int]], wanted: list[SamplingParams]) -> int:
    """Number of distinct prefixes whose next token is scored, from the least start of the rows that share them."""
    starts: dict[tuple[int, ...], int] = {}
    followed = set()
    for ids, params in zip(prompts, wanted, strict=True):
        if params.logprob_start_len >= 0:
            prefixes = [tuple(ids[:end]) for end in range(1, len(ids) + 1)]
            followed.update(prefixes[:-1])
            starts.update((p, min(starts.get(p, len(p) + 1), params.logprob_start_len)) for p in prefixes)
    return sum(len(prefix) >= starts[prefix] for prefix in followed)


@FIELDS
@pytest.mark.parametrize(
    "shape", [{"page_size": 4}, {"page_size": 1, "max_num_seqs": 3, "max_tokens_per_step": 7}], ids=str
)
def test_every_start_and_k(checkpoint, shape: dict[str, int]) -> None:
    options, prompts, references = checkpoint
    engine = Engine(**options, **shape)
    wanted = [asked(Random(i), len(ids)) for i, ids in enumerate(prompts)]
    run(engine, prompts, wanted, references)
    assert scored(engine) == distinct(prompts, wanted), "shared tokens are scored once"
    for i in range(0, COUNT, 15):
        run(engine, [prompts[i]], [wanted[i]], [references[i]])


@FIELDS
def test_in_a_pool_for_little_more_than_one_row(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are recomputed after an eviction or a preemption are not scored again."""
    options, prompts, references = checkpoint
    engine = Engine(**options, page_size=4)
    longest = max(map(len, prompts)) + 16
    engine.order, engine.admission = "tree", "free"  # rows are to be preempted
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: longest // 4 + 4)
    monkeypatch.setattr("batchgen.engine.capture.prompt_logprobs.LOGITS_BYTES", 3 * 4 * VOCAB)
    wanted = [replace(asked(Random(i), len(ids)), max_new_tokens=i % 16) for i, ids in enumerate(prompts)]
    run(engine, prompts, wanted, references)
    stats = engine.last_run.scheduler.stats
    assert stats.preemptions > 0
    assert stats.evicted_nodes > 0
    assert scored(engine) == distinct(prompts, wanted)
    assert engine.last_run.loop.prompts.buffers.nbytes == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_words("llama", tmp_path_factory.mktemp("llama"))


@FIELDS
def test_shared_tokens_are_scored_once(folder: Path) -> None:
    """All positions of the tree are scored, except the last one of prompts that no other prompt continues."""
    prompts = shared_prefix_prompts(200, VOCAB, seed=9)
    everything = SamplingParams(max_new_tokens=0, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    engine = Engine(str(folder), dtype="float32")
    rows = 0
    head = engine.model.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal rows
        rows += len(hidden)
        return head(hidden)

    engine.model.logits = counted  # type: ignore[method-assign]
    finish(engine, [(ids, everything) for ids in prompts])
    prefixes = {tuple(ids[:end]) for ids in prompts for end in range(1, len(ids))}
    assert scored(engine) == len(prefixes)
    ends = {tuple(ids) for ids in prompts}
    assert rows == len(prefixes) + len(ends), "plus one row per sampled token"


@FIELDS
def test_nan_logits_of_a_prompt_fail_the_rows_that_read_them(folder: Path) -> None:
    """Row 1 shares the bad position, row 2 starts after it, row 3 does not contain it."""
    engine = Engine(str(folder), dtype="float32")
    head = engine.model.logits
    bad = head(engine_states(engine, [3, 4, 5])[1:2])

    def with_nan(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        hit = (logits - bad).abs().amax(dim=-1) < 1e-4
        return torch.where(hit[:, None], torch.nan, logits)

    engine.model.logits = with_nan  # type: ignore[method-assign]
    whole = SamplingParams(max_new_tokens=1, temperature=0.0, return_logprob=True, logprob_start_len=0)
    prompts = [[3, 4, 5], [3, 4, 6, 7], [3, 4, 5, 6], [3, 8, 9]]
    wanted = [whole, whole, replace(whole, logprob_start_len=3), whole]
    done = finish(engine, list(zip(prompts, wanted, strict=True)))
    codes = [c.error.code if c.error is not None else None for c in done]
    assert codes == [ErrorCode.NAN_LOGITS, ErrorCode.NAN_LOGITS, None, None]


def engine_states(engine: Engine, ids: list[int]) -> torch.Tensor:
    """[P, H] final states of a prompt, recorded in a run."""
    kept: list[torch.Tensor] = []
    compute = engine.model.hidden

    def keeping(inputs: Any) -> torch.Tensor:
        kept.append(compute(replace(inputs, wanted=None)))
        return inputs.select(kept[-1])

    engine.model.hidden = keeping  # type: ignore[method-assign]
    finish(engine, [(ids, SamplingParams(max_new_tokens=1))])
    engine.model.hidden = compute  # type: ignore[method-assign]
    return kept[0]


@pytest.mark.field("return_text_in_logprobs")
def test_token_texts_are_decoded_separately(folder: Path) -> None:
    engine = Engine(str(folder), dtype="float32")
    some = SamplingParams(max_new_tokens=3, ignore_eos=True, return_logprob=True, return_text_in_logprobs=True)
    wanted = [some, replace(some, logprob_start_len=2), replace(some, logprob_start_len=0, max_new_tokens=0)]
    done = finish(engine, [([3, 4, 5, 6], params) for params in [*wanted, replace(some, max_new_tokens=0)]])
    for completion in done:
        assert completion.output_tokens_text == [f"w{token}" for token in completion.output_ids or ()]
    assert [c.completion_tokens for c in done] == [3, 3, 0, 0]
    assert [c.input_tokens_text for c in done] == [None, ["w5", "w6"], ["w3", "w4", "w5", "w6"], None]
