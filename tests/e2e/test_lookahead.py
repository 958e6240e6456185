"""The loop that reads each step when the next one is under way, against the one that waits: 1,000 random mixed rows.

The device computes on the CPU and is late: what is read before it is waited for is poison, and a source that is written
to while it is on its way is an error.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchgen import Engine
from tests.e2e.mixed import mixed_options, mixed_rows
from tests.e2e.same import Done, assert_equal
from tests.engine.fake_device import LateDevice

ROWS = 1000
PAGES = 64
"""So few that samples are preempted."""


def test_a_late_device_says_the_same(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed_rows(ROWS, seed=3)
    waiting = Engine(
        str(model),
        dtype="float32",
        page_size=8,
        max_num_seqs=48,
        max_tokens_per_step=96,
        **mixed_options(model, tmp_path),
    )
    ahead = Engine.from_parts(waiting.config, waiting.model, waiting.tokenizer)
    ahead.device = device = LateDevice(poison_uploads=True)
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: PAGES)
    want, got = Done.of(waiting, rows), Done.of(ahead, rows)
    assert waiting.last_run is not None
    assert ahead.last_run is not None
    for run in (waiting.last_run, ahead.last_run):
        assert run.scheduler.stats.preemptions > 0
    assert waiting.last_run.loop.state.overrun == 0 < ahead.last_run.loop.state.overrun
    assert waiting.last_run.loop.state.output_tokens == ahead.last_run.loop.state.output_tokens
    assert waiting.last_run.scheduler.stats.sampled_tokens == ahead.last_run.scheduler.stats.sampled_tokens
    assert device.counts.lateness().total() > 100
    assert got.completions.keys() == want.completions.keys()
    for row in rows:
        name = row.get("id") or row["custom_id"]
        keys = [key for key in want.completions if key[0] == name]
        for key in keys:
            assert_equal(got.completions[key], want.completions[key], row)
    assert got.events.keys() == want.events.keys()
    for key, events in want.events.items():
        assert [replace(e, logprob=None) for e in got.events[key]] == [replace(e, logprob=None) for e in events]
