"""What `check` shows: progress while it reads and plans, and figures that are wrapped between words on a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.model import save_model
from tests.e2e.rows import write_lines
from tests.e2e.runner import run

WORDS = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def command(model: Path, tmp_path: Path) -> list[str]:
    rows = [{"text": f"{WORDS} {number}"} for number in range(300)] + [{"text": "a", "top_p": 7}]
    write_lines(tmp_path / "in.jsonl", rows)
    return ["check", "in.jsonl", "--model", str(model), "--max-errors", "9"]


@pytest.mark.parametrize("columns", [60, 80])
def test_lines_are_wrapped_between_words(command: list[str], tmp_path: Path, columns: int) -> None:
    env = {"COLUMNS": str(columns), "TERM": "xterm"}
    shown = run(command, tmp_path, env=env, terminal=True).stdout.splitlines()
    piped = run(command, tmp_path).stdout.splitlines()
    shown = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in shown]
    assert max(map(len, piped)) > columns >= max(map(len, shown))
    figures = ("steps", "time", "memory", "KV cache")  # which differ between two runs, or not, by machine
    piped = _joined(piped)  # the errors
    assert [word for line in piped if not line.startswith(figures) for word in line.split()] == [
        word for line in _joined(shown) if not line.startswith(figures) for word in line.split()
    ]


def _joined(lines: list[str]) -> list[str]:
    """Lines with those that go on from them."""
    found: list[str] = []
    for line in lines:
        if found and (line.startswith(" " * 16) or (line.startswith("  | ") and found[-1].startswith("  | "))):
            found[-1] += " " + line.removeprefix("  | ").strip()
        else:
            found.append(line)
    return found


def test_rows_with_the_same_error_are_one_line(model: Path, tmp_path: Path) -> None:
    rows = [{"text": "a", "top_p": 7}, {"text": "b"}] * 7 + [{"text": "a", "top_p": 8}, {"text": "c", "top_p": 7}]
    write_lines(tmp_path / "in.jsonl", rows)
    words = ["check", "in.jsonl", "--model", model, "--report", "report.json"]
    lines = run(words, tmp_path).stdout.splitlines()
    at = lines.index("errors          invalid_field 9")
    why = "invalid_field: in.jsonl, line"
    assert lines[at + 1 : at + 3] == [
        f"{'':16}8 rows (0, 2, 4, 6, 8, ...), the first with id 'row-0': {why} 1: `top_p` must be in (0, 1], got 7",
        f"{'':16}row 14 (id 'row-14'): {why} 15: `top_p` must be in (0, 1], got 8",
    ]
    causes = json.loads((tmp_path / "report.json").read_text())["error_causes"]
    assert [(cause["rows"], cause["first_rows"]) for cause in causes] == [(8, [0, 2, 4, 6, 8]), (1, [14])]


def test_a_prompt_never_passes_for_a_figure(model: Path, tmp_path: Path) -> None:
    text = "one\nrows            9 (ok 9)\n" + "two " * 40
    write_lines(tmp_path / "in.jsonl", [{"text": text}])
    for terminal in (False, True):
        shown = run(["check", "in.jsonl", "--model", model], tmp_path, env={"COLUMNS": "60"}, terminal=terminal).stdout
        shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
        prompt = shown.partition("first prompt, as the model sees it:\n")[2].splitlines()
        assert all(line.startswith("  | ") for line in prompt)
        assert " ".join(line[4:] for line in prompt).split() == f"<s>{text}".split()
        assert not terminal or max(map(len, prompt)) <= 60


def test_progress_is_shown_while_rows_are_read_and_planned(command: list[str], tmp_path: Path) -> None:
    done = run([*command, "--progress", "json", "--json"], tmp_path)
    states = [json.loads(line) for line in done.stderr.splitlines()]
    assert [state["phase"] for state in states if "phase" in state] == ["starting", "reading", "planning"]
    last = states[-1]
    assert (last["rows"], last["rows_done"], last["rows_error"]) == (301, 301, 1)
    assert json.loads(done.stdout)["rows"] == 301
    assert "phase" not in run([*command, "--progress", "none"], tmp_path).stderr
