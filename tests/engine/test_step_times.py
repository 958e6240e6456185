"""`StepTimes`: all time is counted, with two clock readings per step."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from batchgen.engine import step_times
from batchgen.engine.engine import Engine
from batchgen.request.params import SamplingParams
from batchgen.request.table import RequestTable
from tests.engine.reference import save_word_tokenizer
from tests.models.tiny import VOCAB, save_tiny


def test_a_step_reads_the_clock_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path, num_hidden_layers=1)
    save_word_tokenizer(folder, VOCAB)
    engine = Engine(str(folder), dtype="float32")
    table = RequestTable()
    for i in range(5):
        params = SamplingParams(max_new_tokens=3 + i, temperature=0.0, ignore_eos=True)
        table.append(i, 0, [5 + i, 6], params, i, 3 + i)
    running = engine.start(table)
    ticks = count()
    monkeypatch.setattr(step_times, "perf_counter", lambda: float(next(ticks)))
    for _ in running.loop.run():
        pass
    steps, times = running.loop.state.steps, running.loop.times
    assert next(ticks) == 1 + 2 * steps
    assert (times.compute, times.host) == (steps, steps)
    assert running.loop.counts()["host_ms"] == 1000 * steps
