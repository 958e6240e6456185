"""Custom logit processors: one call per step, their row views, and errors of single rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.engine import Engine
from batchgen.errors import ErrorCode
from batchgen.request.completion import Completion
from batchgen.request.fields.params import SamplingParams
from batchgen.request.processors import ProcessorRow
from tests.engine.pipeline import Oracle
from tests.engine.reference import save_with_words, shared_prefix_prompts
from tests.models.tiny import VOCAB

NEW_TOKENS = 6
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_words("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return shared_prefix_prompts(12, VOCAB, seed=2, longest=20)


def push(logits: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
    """Raises the logit of the id after the last one by the row's `by`, and lowers that of the first prompt id."""
    for i, row in enumerate(rows):
        last = (row.output_ids or row.prompt_ids)[-1]
        logits[i, (last + 1) % VOCAB] += row.params.get("by", 3.0)
        logits[i, row.prompt_ids[0]] -= 1.0
    return logits


def push_one(values: np.ndarray, prompt: Sequence[int], output: Sequence[int], by: float) -> np.ndarray:
    values = values.copy()
    values[((output or prompt)[-1] + 1) % VOCAB] += np.float32(by)
    values[prompt[0]] -= np.float32(1.0)
    return values


def touchy(logits: Tensor, rows: Sequence[ProcessorRow]) -> Any:
    """Fails as the first row with `do` requests, but only at that row's third token."""
    kind = next((row.params["do"] for row in rows if "do" in row.params and len(row.output_ids) == 2), None)
    at = next((i for i, row in enumerate(rows) if row.params.get("do") == kind), 0)
    if kind == "raise":
        logits.zero_()  # changes before an error must have no effect
        raise ValueError("cannot go on\nand on")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "shape":
        return logits[:, :-1]
    if kind == "dtype":
        return logits.double()
    if kind == "none":
        return None
    if kind in ("nan", "inf"):
        logits[at, 5] = float(kind)
    if kind == "mask":
        logits[at] = -torch.inf
    return logits


def engine_of(folder: Path, implementation: str = "native", **options: Any) -> Engine:
    named = {"push": push, "touchy": touchy}
    return Engine(str(folder), dtype="float32", model_impl=implementation, logit_processor=named, **options)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return engine_of(folder)


def generate(engine: Engine, rows: list[dict[str, Any]]) -> list[Completion]:
    return list(engine.generate(rows, ordered=True))


@pytest.mark.field("custom_logit_processor", "custom_params")
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_processor_runs_between_bias_and_masks(folder: Path, prompts: list[list[int]], implementation: str) -> None:
    logits_state = {"repetition_penalty": 1.4, "logit_bias": {"9": 2.0}, "bad_words": [[(prompts[0][-1] + 1) % VOCAB]]}
    rows = []
    for i, prompt in enumerate(prompts):
        named = {"custom_logit_processor": "push"} | ({"custom_params": {"by": float(i)}} if i % 2 else {})
        rows.append({"input_ids": prompt, **GREEDY, **named, **(logits_state if i % 3 == 0 else {})})
        rows.append({"input_ids": prompt, **GREEDY})
    oracle = Oracle(folder)
    changed = 0
    for row, done in zip(rows, generate(engine_of(folder, implementation), rows), strict=True):
        params = SamplingParams(**GREEDY, **({**logits_state, "logit_bias": {9: 2.0}} if "logit_bias" in row else {}))
        by = row.get("custom_params", {}).get("by", 3.0)
        processor = (lambda v, p, o, by=by: push_one(v, p, o, by)) if "custom_logit_processor" in row else None
        output = list(done.output_ids or [])
        for position in oracle.positions(row["input_ids"], output, params, processor=processor):
            assert position.token == position.values.argmax()
            changed += position.token != position.raw.argmax()
    assert changed > 20


@pytest.mark.field("custom_logit_processor", "custom_params")
def test_a_run_may_set_a_processor_for_all_rows(engine: Engine, prompts: list[list[int]]) -> None:
    base = [{"input_ids": prompt, **GREEDY} for prompt in prompts]
    for custom in ({"custom_params": {"by": 2.5}}, {}):
        named = {"custom_logit_processor": "push", **custom}
        params = SamplingParams(**named)  # type: ignore[arg-type]
        for_all = list(engine.generate(base, params, ordered=True))
        each = generate(engine, [row | named for row in base])
        assert [c.output_ids for c in for_all] == [c.output_ids for c in each]
    params = SamplingParams(custom_logit_processor="push", custom_params='{"by":2.5}')
    own = list(engine.generate([row | {"custom_params": {"by": 7.0}} for row in base], params, ordered=True))
    each = generate(engine, [row | {"custom_logit_processor": "push", "custom_params": {"by": 7.0}} for row in base])
    assert [c.output_ids for c in own] == [c.output_ids for c in each]


def test_masks_apply_after_processors(folder: Path, prompts: list[list[int]]) -> None:
    """A processor receives logits with biases and without masks, and cannot undo a mask."""

    def insist(logits: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        assert torch.isfinite(logits).all()
        for i, row in enumerate(rows):
            assert logits[i, 20] > 50
            logits[i, row.params["token"]] = 1000.0
        return logits

    engine = Engine(str(folder), dtype="float32", logit_processor={"insist": insist})
    named = {"custom_logit_processor": "insist", "custom_params": {"token": 40}}
    masks = {"logit_bias": {"20": 100}, "allowed_token_ids": list(range(100))}
    base = {"input_ids": prompts[0], **GREEDY, **named, **masks}
    rows = [{}, {"bad_words": [[40]]}, {"allowed_token_ids": [3, 20]}, {"stop_token_ids": [40], "min_new_tokens": 3}]
    free, word, allowed, minimum = generate(engine, [base | row for row in rows])
    assert list(free.output_ids or []) == [40] * NEW_TOKENS
    for done in (word, allowed):
        assert 40 not in (done.output_ids or [40])
    assert list(minimum.output_ids or []).index(40) == 3


def test_a_processor_is_called_once_per_step_for_its_rows(folder: Path, prompts: list[list[int]]) -> None:
    calls: list[list[tuple[int, int]]] = []

    def watch(logits: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        assert logits.dtype == torch.float32
        assert logits.shape == (len(rows), VOCAB)
        assert all(isinstance(ids, tuple) for row in rows for ids in (row.prompt_ids, row.output_ids))
        calls.append([(row.params["row"], len(row.output_ids)) for row in rows])
        return logits.clone()

    engine = Engine(str(folder), dtype="float32", logit_processor={"watch": watch})
    rows: list[dict[str, Any]] = [{"input_ids": p, **GREEDY} for p in prompts]
    for i in (1, 4, 5):
        rows[i] |= {"custom_logit_processor": "watch", "custom_params": {"row": i}}
    plain = generate(engine, [{"input_ids": p, **GREEDY} for p in prompts])
    assert not calls
    done = generate(engine, rows)
    assert [c.output_ids for c in done] == [c.output_ids for c in plain]
    assert len(calls) <= engine.last_run.loop.state.steps
    assert sorted(pair for call in calls for pair in call) == [(i, n) for i in (1, 4, 5) for n in range(NEW_TOKENS)]
    assert max(len(call) for call in calls) == 3


WRONG = {
    "raise": "ValueError: cannot go on",
    "exit": "SystemExit: 3",
    "shape": f"returned shape [1, {VOCAB - 1}], not [1, {VOCAB}]",
    "dtype": "returned torch.float64 on cpu",
    "none": "returned NoneType, not a tensor",
    "nan": "gave nan among the logits",
    "inf": "gave inf among the logits",
    "mask": "masked every token",
}


@pytest.mark.parametrize("kind", WRONG)
def test_only_rows_that_cause_an_error_fail(engine: Engine, prompts: list[list[int]], kind: str) -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": p, **GREEDY, **({"custom_logit_processor": "touchy"} if i % 3 else {})}
        for i, p in enumerate(prompts)
    ]
    without_errors = generate(engine, rows)
    rows[4] |= {"custom_params": {"do": kind}}
    done = generate(engine, rows)
    error = done[4].error
    assert (error.code, error.param) == (ErrorCode.PROCESSOR_ERROR, "custom_logit_processor")
    assert WRONG[kind] in error.message
    assert "\n" not in error.message
    assert done[4].output_ids is None
    for i, (now, before) in enumerate(zip(done, without_errors, strict=True)):
        assert i == 4 or now.output_ids == before.output_ids


def test_a_row_reports_the_error_of_its_first_failed_sample(folder: Path, prompts: list[list[int]]) -> None:
    """By sample index, not by time."""

    def fail(logits: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        for row in rows:
            if row.params and len(row.output_ids) == (4 if [*row.output_ids][:1] == [row.params["late"]] else 2):
                raise ValueError(f"after {list(row.output_ids)}")
        return logits

    engine = Engine(str(folder), dtype="float32", logit_processor={"fail": fail})
    row = {"input_ids": prompts[0], **GREEDY, "temperature": 1.0, "n": 4, "custom_logit_processor": "fail", "seed": 3}
    first, *others = ([*(done.output_ids or [])] for done in generate(engine, [row]))
    assert all(other[0] != first[0] for other in others)
    (done,) = generate(engine, [row | {"custom_params": {"late": first[0]}}])
    assert f"after {first[:4]}" in done.error.message


@pytest.mark.field("custom_logit_processor")
def test_an_unknown_processor_is_an_error(engine: Engine, folder: Path, prompts: list[list[int]]) -> None:
    row = {"input_ids": prompts[0], **GREEDY, "custom_logit_processor": "other"}
    (done,) = generate(engine, [row])
    assert done.error.code == ErrorCode.UNKNOWN_PROCESSOR
    assert "'other'" in done.error.message
    assert "push, touchy" in done.error.message
    (none,) = generate(Engine(str(folder), dtype="float32"), [row])
    assert "processors of this run are: none" in none.error.message


def test_identical_greedy_rows_share_one_generation(engine: Engine, folder: Path, prompts: list[list[int]]) -> None:
    def row(by: float) -> dict[str, Any]:
        return {"input_ids": prompts[0], **GREEDY, "custom_logit_processor": "push", "custom_params": {"by": by}}

    rows = [row(5), row(9), row(5), {"input_ids": prompts[0], **GREEDY}, row(9), row(5)]
    once = generate(engine, rows)
    each = generate(engine_of(folder, dedup=False), rows)
    assert [c.output_ids for c in once] == [c.output_ids for c in each]
    assert [c.dedup_of for c in once] == [None, None, 0, None, 1, 0]
    assert once[0].output_ids != once[3].output_ids
