"""The timeline of a run keeps every token, in a bounded number of samples, however long the run is."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from batchgen.data.store.timeline import Timeline, joined

MOST, MOST_OF_JOB = 256, 512


def recorded(steps: Sequence[tuple[float, int, int]], running: int = 3) -> dict[str, Any]:
    """The record of steps of (seconds, generated tokens, computed prompt tokens)."""
    now = output = prompt = 0.0
    timeline = Timeline(clock=lambda: now)
    timeline.add(0, 0, 0, 0.0)
    for seconds, generated, computed in steps:
        now, output, prompt = now + seconds, output + generated, prompt + computed
        timeline.add(int(output), int(prompt), running, 0.5)
    timeline.add(int(output), int(prompt), running, 0.5, ends=True)
    record = timeline.record()
    assert record is not None
    return record


@pytest.mark.parametrize(("count", "longest"), [(1, 0.01), (7, 3.0), (300, 0.05), (2000, 5.0), (50, 4000.0)])
def test_no_token_is_lost(count: int, longest: float) -> None:
    rng = random.Random(count)
    steps = [(rng.uniform(0, longest), rng.randrange(100), rng.randrange(9)) for _ in range(count)]
    record = recorded(steps)
    assert sum(record["output_tokens"]) == pytest.approx(sum(step[1] for step in steps), abs=0.2)
    assert sum(record["prompt_tokens"]) == pytest.approx(sum(step[2] for step in steps), abs=0.2)
    assert len(record["output_tokens"]) <= MOST
    assert record["end"] == pytest.approx(sum(step[0] for step in steps), abs=1e-3)
    assert (len(record["output_tokens"]) - 1) * record["seconds"] <= record["end"] + 1e-3
    assert sum(record["running_seconds"]) == pytest.approx(3 * record["end"], abs=0.2)
    assert record["running_seconds"][:-1] == pytest.approx(
        [3 * record["seconds"]] * (len(record["output_tokens"]) - 1), abs=1e-3
    )
    assert sum(record["kv_use_seconds"]) == pytest.approx(record["end"] / 2, abs=0.2)


def test_a_long_step_is_spread_over_its_time() -> None:
    record = recorded([(1.0, 160, 0), (1.0, 0, 16)])
    assert record["output_tokens"] == [10] * 16 + [0] * 16
    assert record["prompt_tokens"][:17] == [0] * 16 + [1.0]


def test_a_counter_that_begins_again_adds_nothing() -> None:
    times = iter(range(9))
    timeline = Timeline(clock=lambda: next(times))
    for tokens in (0, 50, 20, 25):
        timeline.add(tokens, 0, 1, 0.0)
    record = timeline.record()
    assert record is not None
    assert sum(record["output_tokens"]) == pytest.approx(55, abs=0.1)


def test_nothing_is_recorded_without_a_step() -> None:
    assert Timeline().record() is None


def test_joined_records_are_bounded_and_in_order() -> None:
    records = [{**recorded([(0.05, 3, 1)] * 400), "began": 100.0 - number} for number in range(7)]
    found = joined(json.loads(json.dumps(records)))
    assert [run["began"] for run in found] == [94.0 + number for number in range(7)]
    assert sum(len(run["output_tokens"]) for run in found) <= MOST_OF_JOB
    assert [sum(run["output_tokens"]) for run in found] == pytest.approx([1200] * 7)
    assert [sum(run["running_seconds"]) for run in found] == pytest.approx([60] * 7)
    assert len(joined({**records[0], "began": number} for number in range(2000))) == MOST_OF_JOB


def test_of_one_run_the_last_record_counts() -> None:
    first, second = (recorded([(1.0, tokens, 0)]) | {"began": 5.0} for tokens in (3, 8))
    assert joined([first, second]) == joined([second])


@pytest.mark.parametrize(
    "change",
    [
        {"began": "now"},
        {"seconds": None},
        {"running_seconds": [1]},
        {"kv_use_seconds": "x"},
        {"slowest": [[1]]},
        {"end": float("nan")},
    ],
)
def test_other_values_are_left_out(change: dict[str, Any]) -> None:
    good = recorded([(1.0, 5, 5)])
    assert joined([{**good, **change}, None, 7, [good]]) == []
