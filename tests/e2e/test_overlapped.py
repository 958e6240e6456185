"""Steps that two threads compute while Python plans the next one, compared with steps that Python waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, zip_longest
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from batchgen import Completion, Engine
from batchgen.engine.step import step_times
from batchgen.engine.step.model_runner import InFlightStep, ModelRunner
from batchgen.errors import OutputError
from batchgen.kernels.cpu.command_buffer import background_thread
from batchgen.kernels.cpu.library import loaded
from tests.e2e.mixed import VOCAB
from tests.e2e.same import Key, RunResult, assert_equal
from tests.e2e.test_out_of_memory import LowMemoryModel, engine_with
from tests.kernels.cpu.products import with_threads

pytestmark = pytest.mark.skipif(not loaded(), reason="no compiled kernels here")

STEPS = {"page_size": 8, "max_num_seqs": 24, "max_tokens_per_step": 64}
LATEST = 1 << 60
"""The number of a submission after all others."""
STEM = "The quick brown fox jumps over the lazy dog. "
MORE: tuple[dict[str, Any], ...] = (
    {"regex": "[a-f]{3,9}"},
    {"min_new_tokens": 4},
    {"logit_bias": {"7": 4, "9": -3}},
    {"bad_words": ["e ", "th"]},
    {"frequency_penalty": 1.1},
    {"return_logprob": True, "top_logprobs_num": 2},
    {"allowed_token_ids": list(range(20, 90))},
)
"""Fields of rows whose steps are waited for: they need more than the sampled token."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with with_threads(2):
        yield


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Number of sampling steps by whether they were overlapped with Python (True) or waited for (False)."""
    found: Counter[bool] = Counter()
    issue: Callable[..., InFlightStep] = ModelRunner.issue

    def counted(runner: ModelRunner, *args: Any) -> InFlightStep:
        in_flight = issue(runner, *args)
        if in_flight.tokens is not None:
            found[in_flight.pending] += 1
        return in_flight

    monkeypatch.setattr(ModelRunner, "issue", counted)
    return found


def plain_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows that need only tokens, with various sampling parameters and stops."""
    random = Random(seed)
    rows: list[dict[str, Any]] = []
    for i in range(count):
        text = str(random.randint(0, count // 2)) + STEM * random.randint(0, 2)
        row: dict[str, Any] = {"id": str(i), "text": text, "n": random.choice([1, 1, 1, 3])}
        row |= {"max_new_tokens": random.randint(1, 20), "temperature": random.choice([0, 0.7, 1.3]), "seed": i}
        row |= random.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"ignore_eos": True}])
        row |= random.choice([{}, {}, {"stop": ["e", "th"]}, {"stop_token_ids": random.sample(range(4, VOCAB), 30)}])
        row |= random.choice([{}, {}, {"stream": True}, {"stop_regex": "[aeiou]{2}"}])
        row |= {"temperature": 0.9} if row["n"] > 1 else {}
        rows.append(row)
    return rows


def waiting(model: Path, rows: list[dict[str, Any]], **options: Any) -> RunResult:
    """Results of an engine that waits for each step."""
    engine = Engine(str(model), dtype="float32", **options)
    assert engine.backend is not None
    engine.backend = replace(engine.backend, executors=())
    return RunResult.of(engine, rows)


def assert_same(got: RunResult, want: RunResult, rows: list[dict[str, Any]]) -> None:
    assert got.completions.keys() == want.completions.keys()
    for row in rows:
        for key in [key for key in want.completions if key[0] == row["id"]]:
            assert_equal(got.completions[key], want.completions[key], row)
    assert {k: [e.text for e in v] for k, v in got.events.items()} == {
        k: [e.text for e in v] for k, v in want.events.items()
    }


@pytest.mark.parametrize("deterministic", [False, True])
def test_plain_rows_have_equal_results(
    model: Path, monkeypatch: pytest.MonkeyPatch, steps: Counter[bool], deterministic: bool
) -> None:
    rows = plain_rows(90, seed=1)
    options = {**STEPS, "deterministic": deterministic}
    engine = Engine(str(model), dtype="float32", **options)
    engine.order, engine.admission = "tree", "free"
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 26)
    got = RunResult.of(engine, rows)
    assert not steps[False]
    assert steps[True] > 30
    assert engine.last_run is not None
    assert engine.last_run.scheduler.stats.preemptions > 0
    loop = engine.last_run.loop
    assert loop.state.discarded > 0, "rows that a token ends are computed in one more step"
    assert loop.state.output_tokens == sum(len(c.output_ids or ()) for c in got.completions.values()) + sum(
        c.dropped_tokens or 0 for c in got.completions.values()
    )
    assert_same(got, waiting(model, rows, **options), rows)


def test_overlapped_and_waited_steps_alternate(model: Path, steps: Counter[bool]) -> None:
    """Steps with a row that needs more than tokens are waited for, the other steps are overlapped."""
    rows = plain_rows(100, seed=2)
    for i, more in enumerate(MORE):
        rows[12 * i + 5] |= more
    engine = Engine(str(model), dtype="float32", **STEPS)
    engine.order = "tree"
    got = RunResult.of(engine, rows)
    assert steps[True] > 20
    assert steps[False] > 20
    assert_same(got, waiting(model, rows, **STEPS), rows)


def test_overlapped_time_is_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time between steps is overlapped, except before the first step and after the last."""
    engine = Engine(str(model), dtype="float32", **STEPS)
    ticks = count()
    monkeypatch.setattr(step_times, "perf_counter", lambda: float(next(ticks)))
    list(engine.generate([{"text": STEM, "max_new_tokens": 9, "ignore_eos": True}]))
    assert engine.last_run is not None
    times, steps = engine.last_run.loop.times, engine.last_run.loop.state.steps
    assert (times.compute, times.host, times.overlapped) == (9, 9, (9 - 1) / 2)
    assert steps == 10, "the last plan, which ends the sample, computes nothing"


def test_out_of_memory_in_overlapped_steps(model: Path, steps: Counter[bool]) -> None:
    rows = plain_rows(60, seed=3)
    engine, random = Engine(str(model), dtype="float32", **STEPS), Random(0)
    low = LowMemoryModel(
        engine.model,
        forward=lambda inputs: len(inputs.input_ids) > 1 and random.random() < 0.2,
        head=lambda hidden: len(hidden) > 1 and random.random() < 0.2,
        late=True,
    )
    failing = engine_with(engine, low)
    got = RunResult.of(failing, rows)
    assert low.failed > 5
    assert steps[True] > 10
    assert failing.last_run is not None
    assert failing.last_run.scheduler.stats.oom_retries == low.failed
    assert_same(got, waiting(model, rows, **STEPS), rows)


def test_two_interleaved_jobs_in_one_thread(model: Path) -> None:
    """Their steps alternate and share the working memory."""
    engine = Engine(str(model), dtype="float32", **STEPS)
    all_rows = plain_rows(30, seed=5), plain_rows(30, seed=6)
    jobs = [engine.generate(rows, on_event=lambda event: None) for rows in all_rows]
    found: list[dict[Key, Completion]] = [{}, {}]
    for turn in zip_longest(*jobs):
        for completions, done in zip(found, turn, strict=True):
            if done is not None:
                completions[done.id or "", 0, done.sample_index] = done
    for rows, completions in zip(all_rows, found, strict=True):
        assert_same(RunResult(completions, {}), replace(waiting(model, rows, **STEPS), events={}), rows)


@pytest.mark.parametrize("how", ["closed", "error"])
def test_a_job_that_ends_early_leaves_no_step_running(model: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    engine = Engine(str(model), dtype="float32", **STEPS)
    job = engine.generate([{"text": f"{STEM}{i}", "max_new_tokens": 2 + i} for i in range(40)])
    next(job)
    assert not background_thread().done(LATEST)
    if how == "closed":
        job.close()
    else:

        def full(*_: object) -> None:
            raise OutputError("the disk is full")

        monkeypatch.setattr("batchgen.engine.outputs.processor.OutputProcessor.finish_sample", full)
        with pytest.raises(OutputError):
            list(job)
    assert background_thread().done(LATEST)


def test_one_thread_overlaps_no_steps(model: Path, steps: Counter[bool]) -> None:
    """No second thread could compute in the background."""
    torch.set_num_threads(1)
    RunResult.of(Engine(str(model), dtype="float32", **STEPS), plain_rows(20, seed=7))
    assert not steps[True]
    assert steps[False] > 0
