"""The loop that reads each step after the next one is issued, compared with one that waits: random mixed rows.

A fake device computes on the CPU and delays its copies: reading a copy before waiting for it gives poison values, and
writing to the source of a pending copy is an error.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchgen import Completion, Engine, SamplingParams
from batchgen.engine.step.model_runner import ModelRunner
from batchgen.engine.step.sampler import SampledTokens, StepSamples
from batchgen.errors import DeviceError
from batchgen.request.table.request_table import RequestTable
from tests.e2e.mixed import mixed_options, mixed_rows
from tests.e2e.same import RunResult, assert_equal
from tests.engine.fake_device import LateDevice

PAGES = 40
"""Pages of the pool: so few that samples are preempted."""


def test_lookahead_gives_the_same_results(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed_rows(120, seed=3)
    steps = {"page_size": 8, "max_num_seqs": 48, "max_tokens_per_step": 96}
    waiting = Engine(str(model), dtype="float32", **steps, **mixed_options(model, tmp_path))
    ahead = Engine.from_parts(waiting.config, waiting.model, waiting.tokenizer)
    ahead.device = device = LateDevice(poison_uploads=True)
    waiting.order = ahead.order = "tree"  # rows are to be preempted
    waiting.admission = ahead.admission = "free"
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: PAGES)
    want, got = RunResult.of(waiting, rows), RunResult.of(ahead, rows)
    assert waiting.last_run is not None
    assert ahead.last_run is not None
    for run in (waiting.last_run, ahead.last_run):
        assert run.scheduler.stats.preemptions > 0
    assert waiting.last_run.loop.state.discarded == 0 < ahead.last_run.loop.state.discarded
    assert waiting.last_run.loop.state.output_tokens == ahead.last_run.loop.state.output_tokens
    assert waiting.last_run.scheduler.stats.sampled_tokens == ahead.last_run.scheduler.stats.sampled_tokens
    assert device.counts.lateness().total() > 50
    assert got.completions.keys() == want.completions.keys()
    for row in rows:
        name = row.get("id") or row["custom_id"]
        for key in [key for key in want.completions if key[0] == name]:
            assert_equal(got.completions[key], want.completions[key], row)
    assert got.events.keys() == want.events.keys()
    for key, events in want.events.items():
        assert [replace(e, logprob=None) for e in got.events[key]] == [replace(e, logprob=None) for e in events]


def test_a_stopped_run_returns_the_samples_of_the_step_in_flight(model: Path) -> None:
    """Samples that end in that step are returned once; unfinished samples are not."""
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
    """Rows of one to six tokens; odd rows have a grammar, so that each step is read before the next one samples."""
    table = RequestTable()
    for i in range(12):
        regex = "[a-z ]*" if i % 2 else None
        params = SamplingParams(max_new_tokens=1 + i // 2, temperature=0.0, ignore_eos=True, regex=regex)
        table.append(i, 0, [5 + i, 6], params, i, 1 + i // 2)
    return table


@pytest.mark.parametrize(("step", "kind"), [(1, "late"), (2, "host"), (3, "late"), (4, "late"), (5, "host")])
def test_finished_samples_are_returned_when_the_next_step_fails(
    model: Path, step: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(str(model), dtype="float32")
    if kind == "late":
        engine.device = LateDevice(poison_uploads=True)
    running = engine.start(short_rows())
    issue = ModelRunner.issue

    def issue_or_fail(runner: ModelRunner, *args: object) -> object:
        if running.scheduler.stats.steps > step:
            raise DeviceError("gone")
        return issue(runner, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "issue", issue_or_fail)
    done: list[Completion] = []
    with pytest.raises(DeviceError, match="gone"):
        done.extend(completion for group in running.loop.run() for completion in group)
    rows = {c.row_index for c in done}
    assert rows == {i for i in range(12) if 1 + i // 2 <= step}
    assert len(rows) == len(done)


def test_a_step_that_cannot_be_read_ends_the_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read while the next step is issued; only a device out of memory is retried."""
    engine = Engine(str(model), dtype="float32")
    engine.device = LateDevice(poison_uploads=True)
    running = engine.start(short_rows())
    read = SampledTokens.read

    def read_or_fail(draws: SampledTokens) -> StepSamples:
        if running.scheduler.stats.steps == 3:
            raise MemoryError
        return read(draws)

    monkeypatch.setattr(SampledTokens, "read", read_or_fail)
    with pytest.raises(DeviceError, match="the host ran out of memory"):
        list(running.loop.run())
    assert running.loop._runner.oom_splitter.retries == 0
