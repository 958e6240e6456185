"""Steps that are computed beside Python, by two threads, against steps that it waits for."""

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
from batchgen.engine import step_times
from batchgen.engine.step import Flight, StepRunner
from batchgen.kernels.cpu.background import background
from batchgen.kernels.cpu.library import loaded
from batchgen.models.native import NativeModel
from tests.e2e.mixed import VOCAB
from tests.e2e.same import Done, Key, assert_equal
from tests.e2e.test_out_of_memory import Short, on
from tests.kernels.cpu.products import with_threads

pytestmark = pytest.mark.skipif(not loaded(), reason="no compiled kernels here")

STEPS = {"page_size": 8, "max_num_seqs": 24, "max_tokens_per_step": 64}
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
"""What takes more than a draw from the model's logits."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with with_threads(2):
        yield


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many steps with draws were computed beside Python, and how many were waited for."""
    found: Counter[bool] = Counter()
    issue: Callable[..., Flight] = StepRunner.issue

    def counted(runner: StepRunner, *args: Any) -> Flight:
        flight = issue(runner, *args)
        if flight.draws is not None:
            found[flight.under_way] += 1
        return flight

    monkeypatch.setattr(StepRunner, "issue", counted)
    return found


def plain_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows that ask for tokens alone, in all ways of drawing and ending."""
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


def waiting(model: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], **options: Any) -> Done:
    """What an engine says that waits for each step."""
    with monkeypatch.context() as patch:
        patch.setattr(NativeModel, "recordable", lambda self: False)
        return Done.of(Engine(str(model), dtype="float32", **options), rows)


def assert_same(got: Done, want: Done, rows: list[dict[str, Any]]) -> None:
    assert got.completions.keys() == want.completions.keys()
    for row in rows:
        for key in [key for key in want.completions if key[0] == row["id"]]:
            assert_equal(got.completions[key], want.completions[key], row)
    assert {k: [e.text for e in v] for k, v in got.events.items()} == {
        k: [e.text for e in v] for k, v in want.events.items()
    }


@pytest.mark.parametrize("deterministic", [False, True])
def test_plain_rows_say_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch, steps: Counter[bool], deterministic: bool
) -> None:
    rows = plain_rows(300, seed=1)
    options = {**STEPS, "deterministic": deterministic}
    engine = Engine(str(model), dtype="float32", **options)
    engine.order, engine.admission = "tree", "free"
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 40)
    got = Done.of(engine, rows)
    assert not steps[False]
    assert steps[True] > 30
    assert engine.last_run is not None
    assert engine.last_run.scheduler.stats.preemptions > 0
    loop = engine.last_run.loop
    assert loop.state.overrun > 0, "rows that end by a token are in one step too many"
    assert loop.state.output_tokens == sum(len(c.output_ids or ()) for c in got.completions.values()) + sum(
        c.dropped_tokens or 0 for c in got.completions.values()
    )
    assert_same(got, waiting(model, monkeypatch, rows, **options), rows)


def test_rows_of_all_kinds_take_turns(model: Path, monkeypatch: pytest.MonkeyPatch, steps: Counter[bool]) -> None:
    """A step with a row that asks for more than tokens is waited for; the tokens before it were drawn beside."""
    rows = plain_rows(240, seed=2)
    for i, more in enumerate(MORE):
        rows[30 * i + 5] |= more
    engine = Engine(str(model), dtype="float32", **STEPS)
    engine.order = "tree"
    got = Done.of(engine, rows)
    assert steps[True] > 20
    assert steps[False] > 20
    assert_same(got, waiting(model, monkeypatch, rows, **STEPS), rows)


def test_fixed_lengths_cost_nothing(model: Path, steps: Counter[bool]) -> None:
    """Nobody is in a step too many who ends by its length."""
    rows = [{"id": str(i), "input_ids": [5 + i, 6], "max_new_tokens": 3 + i % 9, "ignore_eos": True} for i in range(60)]
    engine = Engine(str(model), dtype="float32", **STEPS)
    done = Done.of(engine, rows)
    assert engine.last_run is not None
    assert steps[True] > 0
    assert engine.last_run.loop.state.overrun == 0
    assert sum(len(c.output_ids or ()) for c in done.completions.values()) == sum(3 + i % 9 for i in range(60))


def test_times(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what passes between steps, half of the threads have computed, but before the first one and after the last."""
    engine = Engine(str(model), dtype="float32", **STEPS)
    ticks = count()
    monkeypatch.setattr(step_times, "perf_counter", lambda: float(next(ticks)))
    list(engine.generate([{"text": STEM, "max_new_tokens": 9, "ignore_eos": True}]))
    assert engine.last_run is not None
    times, steps = engine.last_run.loop.times, engine.last_run.loop.state.steps
    assert (times.compute, times.host, times.beside) == (9, 9, (9 - 1) / 2)
    assert steps == 10, "one plan has nothing to compute: that of the sample's end"


@pytest.mark.parametrize("where", ["forward", "head", "both"])
def test_memory_that_runs_out(model: Path, monkeypatch: pytest.MonkeyPatch, steps: Counter[bool], where: str) -> None:
    rows = plain_rows(80, seed=3)
    engine, random = Engine(str(model), dtype="float32", **STEPS), Random(0)
    short = {
        "forward": Short(engine.model, forward=lambda inputs: len(inputs.input_ids) > 1 and random.random() < 0.3),
        "head": Short(engine.model, head=lambda hidden: len(hidden) > 1 and random.random() < 0.3),
        "both": Short(
            engine.model,
            forward=lambda inputs: len(inputs.input_ids) > 1 and random.random() < 0.2,
            head=lambda hidden: len(hidden) > 1 and random.random() < 0.2,
            late=True,
        ),
    }[where]
    hurt = on(engine, short)
    got = Done.of(hurt, rows)
    assert short.failed > 5
    assert steps[True] > 10
    assert hurt.last_run is not None
    assert hurt.last_run.scheduler.stats.oom_retries == short.failed
    assert_same(got, waiting(model, monkeypatch, rows, **STEPS), rows)


def test_two_jobs_of_one_thread(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose steps follow on each other's heels, in the same working memory."""
    engine = Engine(str(model), dtype="float32", **STEPS)
    all_rows = plain_rows(60, seed=5), plain_rows(60, seed=6)
    jobs = [engine.generate(rows, on_event=lambda event: None) for rows in all_rows]
    found: list[dict[Key, Completion]] = [{}, {}]
    for turn in zip_longest(*jobs):
        for completions, done in zip(found, turn, strict=True):
            if done is not None:
                completions[done.id or "", 0, done.sample_index] = done
    for rows, completions in zip(all_rows, found, strict=True):
        assert_same(Done(completions, {}), replace(waiting(model, monkeypatch, rows, **STEPS), events={}), rows)


def test_an_abandoned_job_leaves_nothing_under_way(model: Path) -> None:
    engine = Engine(str(model), dtype="float32", **STEPS)
    job = engine.generate([{"text": f"{STEM}{i}", "max_new_tokens": 2 + i} for i in range(40)])
    next(job)
    assert background()._under_way is not None
    job.close()
    assert background()._under_way is None


def test_an_error_leaves_nothing_under_way(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(str(model), dtype="float32", **STEPS)
    running: list[bool] = []

    def fail(*given: Any) -> None:
        running.append(background()._under_way is not None)
        raise RuntimeError("gone")

    monkeypatch.setattr("batchgen.engine.finished.Finished.sample", fail)
    with pytest.raises(RuntimeError, match="gone"):
        list(engine.generate([{"text": f"{STEM}{i}", "max_new_tokens": 2 + i} for i in range(40)]))
    assert running == [True]
    assert background()._under_way is None


def test_one_thread_waits(model: Path, steps: Counter[bool]) -> None:
    """There would be nobody to compute meanwhile."""
    torch.set_num_threads(1)
    Done.of(Engine(str(model), dtype="float32", **STEPS), plain_rows(20, seed=7))
    assert not steps[True]
    assert steps[False] > 0
