"""Steady steps run as many lines of Python for many rows as for few."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import batchgen
from batchgen import Engine
from batchgen.engine.loop import Loop
from batchgen.kernels.cpu.library import loaded
from tests.engine.reference import save_with_words

ROOT = str(Path(batchgen.__file__).parent) + "/"
FEW, MANY = 16, 128
FIRST, LAST = 18, 28
"""Counted steps: all rows decode, and no row starts, ends or starts a page."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_words("llama", tmp_path_factory.mktemp("plain"), num_hidden_layers=1)


def count_lines(
    engine: Engine, rows: int, fields: dict[str, Any], ends: int | None, uncounted: tuple[str, ...]
) -> Counter[tuple[str, int]]:
    """(file, line) -> number of runs in all counted steps, once per loop iteration.

    `ends`: tokens of one row that ends earlier than the others. `uncounted`: starts of files that are not counted.
    """
    lines: Counter[tuple[str, int]] = Counter()
    step = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename.removeprefix(ROOT)
        if file.startswith(("/", "<", *uncounted)):
            return None
        lines[file, frame.f_lineno] += event == "line"
        return trace

    def between_steps() -> bool:
        nonlocal step
        step += 1
        if step in (FIRST, LAST):
            on = trace if step == FIRST else None
            sys.settrace(on)
            frame: FrameType | None = sys._getframe()
            while frame is not None:  # frames that are already running, such as the loop's
                frame.f_trace = on if frame.f_code.co_filename.startswith(ROOT) else None
                frame = frame.f_back
        return False

    common = {"max_new_tokens": LAST + 10, "ignore_eos": True, **fields}
    requested = [{"id": str(i), "input_ids": [3 + i, 7, 9 + i % 3], **common} for i in range(rows)]
    if ends is not None:
        requested[3]["max_new_tokens"] = ends
    run: Callable[..., Any] = Loop.run
    before = sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "run", lambda self, stop=None: run(self, between_steps))
        try:
            assert len(list(engine.generate(requested))) == rows
        finally:
            sys.settrace(before)
    assert step > LAST
    return lines


LOGPROBS = {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [3, 9]}


@pytest.mark.parametrize(
    ("attention", "fields", "ends"),
    [
        ("torch", {"temperature": 1.0, **LOGPROBS}, (FIRST + LAST) // 2),
        ("compiled", {"temperature": 0.0, **LOGPROBS}, None),
        ("compiled", {"temperature": 1.0}, None),
    ],
)
def test_a_steady_step_runs_no_line_per_row(
    folder: Path, attention: str, fields: dict[str, Any], ends: int | None
) -> None:
    """Planning, layout, sampling, reading and stops, and the kernels' own Python where they are compiled."""
    if attention == "compiled" and not loaded():
        pytest.skip("no compiled kernels here")
    engine = Engine(str(folder), dtype="float32", attention=attention, max_num_seqs=2 * MANY)
    uncounted = () if attention == "compiled" else ("kernels/",)
    few, many = (count_lines(engine, rows, fields, ends, uncounted) for rows in (FEW, MANY))
    assert few.total() > 100 * (LAST - FIRST)
    differ = {line: (few[line], many[line]) for line in few | many if few[line] != many[line]}
    sought = {file for file, _ in differ}  # an ending row's index is found by bisection
    assert sought <= ({"plan/running.py"} if ends is not None else set()), differ
    assert len(differ) <= 1


OTHER_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"frequency_penalty": 1}, "engine/sampling/penalty_counts.py"),
    ({"return_logprob": True}, "engine/step/logprobs.py"),
    ({"logit_bias": {"5": 1}}, "engine/sampling/logits_processor.py"),
    ({"return_hidden_states": {"tokens": "all"}}, "engine/capture/hidden_states.py"),
]


def test_steps_of_plain_rows_run_no_code_of_other_fields(folder: Path) -> None:
    """The code of a field runs in steps with rows that use it, and in no others."""
    engine = Engine(str(folder), dtype="float32", attention="torch")

    def files(fields: dict[str, Any]) -> set[str]:
        """Files that steps of rows with these fields run."""
        return {file for (file, _), runs in count_lines(engine, 2, fields, None, ()).items() if runs}

    plain = files({"temperature": 1.0})
    assert {"engine/loop.py", "kernels/sampling.py"} <= plain
    for fields, file in OTHER_FIELDS:
        assert file not in plain
        assert file in files({"temperature": 1.0, **fields}), fields
