"""The loop that reads each step when the next one is under way, against the one that waits: 1,000 random mixed rows.

The device computes on the CPU and is late: what is read before it is waited for is poison, and a source that is written
to while it is on its way is an error.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchgen import Completion, Engine, SamplingParams
from batchgen.engine.sampler import Draws, Sampled
from batchgen.engine.step import StepRunner
from batchgen.errors import DeviceError
from batchgen.request import RequestTable
from tests.e2e.mixed import mixed_options, mixed_rows
from tests.e2e.same import Done, assert_equal
from tests.engine.fake_device import LateDevice

ROWS = {"native": 1000, "transformers": 60}
PAGES = {"native": 64, "transformers": 34}
"""So few that samples of the native path are preempted."""


@pytest.mark.parametrize("path", ROWS)
def test_a_late_device_says_the_same(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    rows = mixed_rows(ROWS[path], seed=3)
    waiting = Engine(
        str(model),
        dtype="float32",
        model_impl=path,
        page_size=8,
        max_num_seqs=48,
        max_tokens_per_step=96,
        **mixed_options(model, tmp_path),
    )
    ahead = Engine.from_parts(waiting.config, waiting.model, waiting.tokenizer)
    ahead.device = device = LateDevice(poison_uploads=True)
    waiting.order = ahead.order = "tree"  # rows are to be preempted
    waiting.admission = ahead.admission = "free"
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: PAGES[path])
    want, got = Done.of(waiting, rows), Done.of(ahead, rows)
    assert waiting.last_run is not None
    assert ahead.last_run is not None
    for run in (waiting.last_run, ahead.last_run):
        assert run.scheduler.stats.preemptions > 0 or path == "transformers"
    assert waiting.last_run.loop.state.overrun == 0 < ahead.last_run.loop.state.overrun
    assert waiting.last_run.loop.state.output_tokens == ahead.last_run.loop.state.output_tokens
    assert waiting.last_run.scheduler.stats.sampled_tokens == ahead.last_run.scheduler.stats.sampled_tokens
    assert device.counts.lateness().total() > 50
    assert got.completions.keys() == want.completions.keys()
    for row in rows:
        name = row.get("id") or row["custom_id"]
        keys = [key for key in want.completions if key[0] == name]
        for key in keys:
            assert_equal(got.completions[key], want.completions[key], row)
    assert got.events.keys() == want.events.keys()
    for key, events in want.events.items():
        assert [replace(e, logprob=None) for e in got.events[key]] == [replace(e, logprob=None) for e in events]


def test_a_stop_leaves_no_step_unread(model: Path) -> None:
    """What had ended in the step that was under way is handed over; the rest is not, and says nothing twice."""
    engine = Engine(str(model), dtype="float32")
    rows = [{"id": str(i), "input_ids": [5 + i, 6], "max_new_tokens": 3 + i % 4, "temperature": 0} for i in range(12)]
    want = {c.id: c for c in engine.generate([{**row, "ignore_eos": True} for row in rows])}
    engine.device = LateDevice(poison_uploads=True)
    for steps in range(8):
        count = 0

        def stop(steps: int = steps) -> bool:
            nonlocal count
            count += 1
            return count > steps

        table = RequestTable()
        for i, row in enumerate(rows):
            params = SamplingParams(max_new_tokens=3 + i % 4, temperature=0.0, ignore_eos=True)
            table.append(i, 0, row["input_ids"], params, i, 3 + i % 4)
        done = [c for group in engine.start(table).loop.run(stop) for c in group]
        ended = sum(3 + i % 4 <= steps for i in range(12))
        assert len(done) == ended
        for completion in done:
            assert completion.output_ids == want[str(completion.row_index)].output_ids


def short_rows() -> RequestTable:
    """Rows of one to six tokens; the odd ones have a grammar, so that each step is read before the next one draws."""
    table = RequestTable()
    for i in range(12):
        regex = "[a-z ]*" if i % 2 else None
        params = SamplingParams(max_new_tokens=1 + i // 2, temperature=0.0, ignore_eos=True, regex=regex)
        table.append(i, 0, [5 + i, 6], params, i, 1 + i // 2)
    return table


@pytest.mark.parametrize("step", range(1, 6))
@pytest.mark.parametrize("kind", ["host", "late"])
def test_what_a_step_finished_outlives_the_next_one(
    model: Path, step: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(str(model), dtype="float32")
    if kind == "late":
        engine.device = LateDevice(poison_uploads=True)
    running = engine.start(short_rows())
    issue = StepRunner.issue

    def issue_or_fail(runner: StepRunner, *args: object) -> object:
        if running.scheduler.stats.steps > step:
            raise DeviceError("gone")
        return issue(runner, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(StepRunner, "issue", issue_or_fail)
    done: list[Completion] = []
    with pytest.raises(DeviceError, match="gone"):
        done.extend(completion for group in running.loop.run() for completion in group)
    drawn = {c.row_index for c in done}
    assert drawn == {i for i in range(12) if 1 + i // 2 <= step}
    assert len(drawn) == len(done)


def test_a_step_that_cannot_be_read_is_not_passed_over(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read while the next one is issued, which is tried anew where the device's memory does not suffice."""
    engine = Engine(str(model), dtype="float32")
    engine.device = LateDevice(poison_uploads=True)
    running = engine.start(short_rows())
    read = Draws.read

    def read_or_fail(draws: Draws) -> Sampled:
        if running.scheduler.stats.steps == 3:
            raise MemoryError
        return read(draws)

    monkeypatch.setattr(Draws, "read", read_or_fail)
    with pytest.raises(DeviceError, match="the host's memory ran out"):
        list(running.loop.run())
    assert running.loop._runner.halver.retries == 0
