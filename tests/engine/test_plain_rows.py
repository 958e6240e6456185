"""What rows that use no special field pay for those that could: counted, call by call, in steps of plain rows only."""

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
"""Steps that are counted: all rows decode, none begins or ends, or begins a page."""

PLAIN = (
    "engine/batch.py", "engine/collector.py", "engine/decode_table.py", "engine/halving.py", "engine/loop.py",
    "engine/row_table.py", "engine/sampler.py", "engine/step.py",
    "kernels/activation.py", "kernels/attention.py", "kernels/attention_plan.py", "kernels/device.py",
    "kernels/heads.py", "kernels/layouts.py", "kernels/linear.py", "kernels/noise.py",
    "kernels/norm.py", "kernels/pooled.py", "kernels/rope.py", "kernels/sampling.py", "kernels/top.py",
    "models/base.py", "models/native.py",
)  # fmt: skip
"""Modules that a plain step runs, besides those of `plan/`."""

KERNEL_CALLS = 7.1
"""Calls of kernels' functions for each row of a step. Of all others there is none, nor a line that runs for a row."""
STEP_CALLS = {"greedy": 177.0, "drawn": 227.0}
"""Those that do not depend on the number of rows, at that commit."""
FLAGS = 8
"""How many flags a step may ask instead."""
DEVICE_CALLS = 32
"""A step is issued and read apart, and goes to the device and back through its door; it is tried
whole before it is tried in parts."""
COLUMN_CALLS = 28
"""Columns tell their length by a call, as lists do not; they stand for all calls that each row took. A clock is read
twice."""
WANTED_CALLS = 2
"""A step asks whether all of its tokens are drawn from, and its model whether the others end early."""
COMPILED_CALLS = 232
"""All of a step where the layers are one compiled call, however many rows there are."""
LAYERS, LAYER_CALLS = 3, 5
"""Each of a layer's four products asks whether there is an adapter; keys and values are stored by a call of their
own, which a GPU does together with the rotation."""

ADDRESS_CALLS = 4
"""Compiled, a layer is pointers."""


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
    special: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Run so many rows; `switch` is told when the steps that count begin and when they have ended.

    `ends`: tokens of one of the rows, if it is not as long as the others. `special`: what all of them ask for besides.
    """
    step = 0

    def between_steps() -> bool:
        nonlocal step
        step += 1
        if step in (FIRST, LAST):
            switch(step == FIRST)
        return False

    plain: dict[str, Any] = {"temperature": temperature, "max_new_tokens": LAST + 10, "ignore_eos": True, **special}
    asked = [{"id": str(i), "input_ids": [3 + i, 7, 9 + i % 3], **plain} for i in range(rows)]
    if ends is not None:
        asked[3]["max_new_tokens"] = ends
    run: Callable[..., Any] = Loop.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "run", lambda self, stop=None: run(self, between_steps))
        assert len(list(engine.generate(asked))) == rows
    assert step > LAST


def count_calls(engine: Engine, rows: int, temperature: float) -> Counter[tuple[str, str]]:
    """(file, function) -> calls of our functions a step."""
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
    special: Mapping[str, Any] = MappingProxyType({}),
) -> Counter[tuple[str, int]]:
    """(file, line) -> how often it runs in all steps that count; a loop's, once in each round. Kernels left aside."""
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
        while frame is not None:  # those that are running already, the loop's own among them
            frame.f_trace = trace if on and frame.f_code.co_filename.startswith(ROOT) else None
            frame = frame.f_back

    run_counted(engine, rows, temperature, switch, ends, special)
    return lines


LOGPROBS: list[dict[str, Any]] = [
    {"return_logprob": True},
    {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [3, 9]},
]


@pytest.mark.parametrize("special", [{}, *LOGPROBS], ids=lambda fields: "-".join(fields) or "plain")
@pytest.mark.parametrize("ends", [None, (FIRST + LAST) // 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_steady_step_runs_no_line_for_a_row(
    engine: Engine, temperature: float, ends: int | None, special: dict[str, Any]
) -> None:
    """A row that ends costs what it costs, others nothing, with logprobs or without.

    Planning, layout, drawing, reading and stops run the same lines as often for 16 rows as for 128."""
    before = sys.gettrace()
    try:
        few, many = (count_lines(engine, rows, temperature, ends, special) for rows in (FEW, MANY))
    finally:
        sys.settrace(before)
    assert few.total() > 100 * (LAST - FIRST)
    differ = {line: (few[line], many[line]) for line in few | many if few[line] != many[line]}
    sought = {file for file, _ in differ}  # a row's place is found by halving
    assert sought <= ({"plan/running.py"} if ends is not None else set()), differ
    assert len(differ) <= 1


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_plain_steps_call_nothing_for_special_fields(engine: Engine, kind: str) -> None:
    few = count_calls(engine, FEW, 0.0 if kind == "greedy" else 1.0)
    many = count_calls(engine, MANY, 0.0 if kind == "greedy" else 1.0)
    special = {key for key in few.keys() | many.keys() if not key[0].startswith("plan/") and key[0] not in PLAIN}
    assert all(few[key] == many[key] <= 1 for key in special), "a step may ask once whether there is such a row"
    assert sum(many[key] for key in special) <= FLAGS
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
    """One call computes all layers; only addresses of their memory are gathered one by one."""
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
def test_compiled_steps_call_nothing_for_a_row(folder: Path, temperature: float) -> None:
    """Kernels included."""
    compiled = Engine(str(folder), dtype="float32", attention="compiled", max_num_seqs=2 * MANY)
    few, many = (count_calls(compiled, rows, temperature) for rows in (FEW, MANY))
    assert few == many
    assert few.total() <= COMPILED_CALLS


@pytest.mark.parametrize(
    ("special", "file"),
    [({"frequency_penalty": 1}, "kernels/counts.py"), ({"return_logprob": True}, "kernels/logprobs.py")],
)
def test_a_special_row_is_noticed(engine: Engine, special: dict[str, Any], file: str) -> None:
    """The count sees what it is to see."""
    plain: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True, "input_ids": [5, 6]}
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        seen.add(frame.f_code.co_filename.removeprefix(ROOT))

    for row in (plain, plain | special):
        seen.clear()
        sys.setprofile(profile)
        list(engine.generate([row]))
        sys.setprofile(None)
        assert (file in seen) == (row is not plain)
