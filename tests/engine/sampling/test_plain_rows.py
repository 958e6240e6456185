"""Python calls of steps with plain rows only: other fields must not cost them anything."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import pytest

import batchgen
from batchgen import Engine
from batchgen.engine import engine as engine_module
from batchgen.engine.loop import Loop
from batchgen.kernels.cpu.library import loaded, missing
from tests.engine.reference import save_word_tokenizer
from tests.models.tiny import VOCAB, save_tiny

ROOT = str(Path(batchgen.__file__).parent) + "/"
FEW, MANY = 16, 128
FIRST, LAST = 18, 28
"""Counted steps: all rows decode, and no row starts, ends or starts a page."""

PLAIN = (
    "engine/decode_table.py", "engine/gc_control.py", "engine/input_batch.py", "engine/loop.py",
    "engine/memory/oom.py", "engine/model_runner.py", "engine/sampling/sampler.py", "engine/step_batch.py",
    "kernels/activation.py", "kernels/attention/torch_attention.py",
    "kernels/device.py",
    "kernels/heads.py", "kernels/layouts.py", "kernels/linear.py", "kernels/noise.py",
    "kernels/norm.py", "kernels/pooled.py", "kernels/rope.py", "kernels/sampling.py", "kernels/top.py",
    "models/base.py", "models/native.py",
)  # fmt: skip
"""Modules that a plain step runs, in addition to those of `plan/`."""

KERNEL_CALLS = 7.1
"""Calls of kernel functions per row of a step. No other function may be called per row."""
STEP_CALLS = {"greedy": 177.0, "drawn": 227.0}
"""Calls per step that do not depend on the number of rows."""
FLAGS = 8
"""Calls that check whether any row uses another field."""
DEVICE_CALLS = 32
"""Calls for issuing and reading a step, for transfers, and for `OOMSplitter`."""
COLUMN_CALLS = 28
"""Calls for the lengths of columns, and two clock readings."""
WANTED_CALLS = 2
"""Checks whether the logits of all tokens are needed, and whether the model can skip tokens."""
COMPILED_CALLS = 232
"""Calls of a step in which all layers are one compiled call, for any number of rows."""
LAYERS, LAYER_CALLS = 3, 5
"""Calls per layer: one adapter check for each of the four linear layers, and one call that stores keys and values."""

ADDRESS_CALLS = 4
"""Calls per layer of a compiled step, for addresses."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny("llama", tmp_path_factory.mktemp("plain"), num_hidden_layers=LAYERS)
    save_word_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(str(folder), dtype="float32", attention="torch", max_num_seqs=2 * MANY)


def run_counted(
    engine: Engine,
    rows: int,
    temperature: float,
    switch: Callable[[bool], None],
    ends: int | None = None,
    extra_fields: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Run `rows` rows; calls `switch` with True before the counted steps and with False after them.

    `ends`: tokens of one row that ends earlier than the others. `extra_fields`: additional fields of all rows.
    """
    step = 0

    def between_steps() -> bool:
        nonlocal step
        step += 1
        if step in (FIRST, LAST):
            switch(step == FIRST)
        return False

    plain: dict[str, Any] = {
        "temperature": temperature,
        "max_new_tokens": LAST + 10,
        "ignore_eos": True,
        **extra_fields,
    }
    requested = [{"id": str(i), "input_ids": [3 + i, 7, 9 + i % 3], **plain} for i in range(rows)]
    if ends is not None:
        requested[3]["max_new_tokens"] = ends
    run: Callable[..., Any] = Loop.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "run", lambda self, stop=None: run(self, between_steps))
        assert len(list(engine.generate(requested))) == rows
    assert step > LAST


def count_calls(engine: Engine, rows: int, temperature: float) -> Counter[tuple[str, str]]:
    """(file, function) -> calls of batchgen's functions per step."""
    calls: Counter[tuple[str, str]] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls[frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_name] += 1

    run_counted(engine, rows, temperature, lambda on: sys.setprofile(profile if on else None))
    return Counter({key: calls[key] / (LAST - FIRST) for key in calls})  # type: ignore[misc]


def count_lines(
    engine: Engine,
    rows: int,
    temperature: float,
    ends: int | None = None,
    extra_fields: Mapping[str, Any] = MappingProxyType({}),
) -> Counter[tuple[str, int]]:
    """(file, line) -> number of runs in all counted steps, once per loop iteration, without kernels."""
    lines: Counter[tuple[str, int]] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename.removeprefix(ROOT)
        if file.startswith(("/", "<", "kernels/")):
            return None
        lines[file, frame.f_lineno] += event == "line"
        return trace

    def switch(on: bool) -> None:
        sys.settrace(trace if on else None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # frames that are already running, such as the loop's
            frame.f_trace = trace if on and frame.f_code.co_filename.startswith(ROOT) else None
            frame = frame.f_back

    run_counted(engine, rows, temperature, switch, ends, extra_fields)
    return lines


LOGPROBS: list[dict[str, Any]] = [
    {"return_logprob": True},
    {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [3, 9]},
]


@pytest.mark.parametrize("extra_fields", [{}, *LOGPROBS], ids=lambda fields: "-".join(fields) or "plain")
@pytest.mark.parametrize("ends", [None, (FIRST + LAST) // 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_steady_step_runs_no_line_per_row(
    engine: Engine, temperature: float, ends: int | None, extra_fields: dict[str, Any]
) -> None:
    """Planning, layout, sampling, reading and stops run the same lines as often for 16 rows as for 128.

    This holds with and without logprobs, and if one row ends."""
    before = sys.gettrace()
    try:
        few, many = (count_lines(engine, rows, temperature, ends, extra_fields) for rows in (FEW, MANY))
    finally:
        sys.settrace(before)
    assert few.total() > 100 * (LAST - FIRST)
    differ = {line: (few[line], many[line]) for line in few | many if few[line] != many[line]}
    sought = {file for file, _ in differ}  # an ending row's index is found by bisection
    assert sought <= ({"plan/running.py"} if ends is not None else set()), differ
    assert len(differ) <= 1


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_plain_steps_call_nothing_for_other_fields(engine: Engine, kind: str) -> None:
    few = count_calls(engine, FEW, 0.0 if kind == "greedy" else 1.0)
    many = count_calls(engine, MANY, 0.0 if kind == "greedy" else 1.0)
    others = {key for key in few.keys() | many.keys() if not key[0].startswith("plan/") and key[0] not in PLAIN}
    assert all(few[key] == many[key] <= 1 for key in others), "a step may check once whether any row uses a field"
    assert sum(many[key] for key in others) <= FLAGS
    assert {key: few[key] for key in few if not key[0].startswith("kernels/")} == {
        key: many[key] for key in many if not key[0].startswith("kernels/")
    }
    per_row = (sum(many.values()) - sum(few.values())) / (MANY - FEW)
    assert per_row <= KERNEL_CALLS
    most = STEP_CALLS[kind] + FLAGS + DEVICE_CALLS + COLUMN_CALLS + WANTED_CALLS + LAYERS * LAYER_CALLS
    assert round(sum(few.values()) - FEW * per_row, 6) <= most


@pytest.mark.skipif(not loaded(), reason=str(missing()))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_compiled_step_calls_as_much_for_any_number_of_rows_and_layers(
    tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call computes all layers; only the addresses of their memory are collected layer by layer."""
    monkeypatch.setattr(engine_module, "products_of", lambda config: "fixed")
    found = {}
    for layers in (LAYERS, 2 * LAYERS):
        folder = save_tiny("llama", tmp_path / str(layers), num_hidden_layers=layers)
        save_word_tokenizer(folder, VOCAB)
        engine = Engine(str(folder), dtype="float32", attention="compiled", max_num_seqs=2 * MANY)
        for rows in (FEW, MANY):
            found[layers, rows] = count_calls(engine, rows, temperature)
    for layers in (LAYERS, 2 * LAYERS):
        assert found[layers, FEW] == found[layers, MANY]
        assert found[layers, FEW]["kernels/cpu/decoder.py", "hidden"] == 1
    assert found[2 * LAYERS, FEW].total() - found[LAYERS, FEW].total() <= LAYERS * ADDRESS_CALLS


@pytest.mark.skipif(not loaded(), reason="no C++ compiler here")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_compiled_steps_call_nothing_per_row(folder: Path, temperature: float) -> None:
    """Also no kernel functions."""
    compiled = Engine(str(folder), dtype="float32", attention="compiled", max_num_seqs=2 * MANY)
    few, many = (count_calls(compiled, rows, temperature) for rows in (FEW, MANY))
    assert few == many
    assert few.total() <= COMPILED_CALLS


@pytest.mark.parametrize(
    ("extra_fields", "file"),
    [({"frequency_penalty": 1}, "kernels/counts.py"), ({"return_logprob": True}, "kernels/logprobs.py")],
)
def test_a_row_with_another_field_is_counted(engine: Engine, extra_fields: dict[str, Any], file: str) -> None:
    """The profile contains the functions of the field."""
    plain: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True, "input_ids": [5, 6]}
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        seen.add(frame.f_code.co_filename.removeprefix(ROOT))

    for row in (plain, plain | extra_fields):
        seen.clear()
        sys.setprofile(profile)
        list(engine.generate([row]))
        sys.setprofile(None)
        assert (file in seen) == (row is not plain)
