"""The table of GPU figures, made from stored reports, and the validation of tuning notes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.goals import GOALS, with_goal
from tests.gpu.notes import load_notes
from tests.gpu.report import Measure
from tests.gpu.table import markdown, newest, unmeasured

NOTE = {
    "date": "2027-01-31",
    "commit": "0123abc",
    "device": "toy",
    "figure": "start 0.6b seconds",
    "change": "nothing",
    "before": 2.0,
    "predicted": 1,
    "after": None,
    "unit": "s",
    "kept": False,
    "outcome": "no device",
}


def report(**changes: Any) -> dict[str, Any]:
    """A made-up report."""
    measures = [
        asdict(
            with_goal(Measure("w-nano", "8b", "output_tokens_per_second", 12.0, "tokens/s", share=0.5, checked=True))
        ),
        asdict(Measure("w-nano", "8b", "output_tokens_per_second", 4.0, "tokens/s", engine="other", version="1")),
        asdict(with_goal(Measure("start", "0.6b", "seconds", 1.0, "s", checked=True, factor=1.0))),
        asdict(with_goal(Measure("w-tree", "1b", "output_tokens_per_second", 7.0, "tokens/s", checked=False))),
    ]
    shape = {"rows": 256, "context": 1024, "heads": 32, "kv_heads": 8, "dim": 128}
    figures = [{"op": "triton", "what": "paged decode", "shape": shape, "share": 0.5, "checked": True}]
    made = {"toy": False, "hardware": {"name": "made-up H200"}, "versions": {"torch": "0"}, "commit": "0"}
    return {**made, "date": "2027-01-31T00:00:00", "measures": measures, "figures": figures, **changes}


def test_without_figures_the_table_is_a_line(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert "unmeasured" in markdown(None) == unmeasured()


def test_every_goal_has_a_line() -> None:
    lines = markdown(report()).splitlines()
    assert len([line for line in lines if line.startswith("| ") and "measured | of" not in line]) == len(GOALS)
    (nano,) = [line for line in lines if "`w-nano`), output" in line and "| 8b |" in line]
    assert "| 12 | 50% | all | 7,500 | 9,200 |" in nano
    (start,) = [line for line in lines if line.startswith("| start")]
    assert "| **1 s** |" in start, "a goal that is met is bold"
    (tree,) = [line for line in lines if "`w-tree`" in line]
    assert "not measured" in tree, "its run was not checked"
    (kernel,) = [line for line in lines if "decode kernel" in line]
    assert "| 50 % |" in kernel
    assert "other 1, w-nano 8b: 4 tokens/s on 1 of it." in lines


def test_newest_is_the_latest_real_run_on_the_goals_device(tmp_path: Path) -> None:
    runs = {
        "old": report(date="2027-01-01"),
        "new": report(date="2027-01-02"),
        "toy": report(date="2027-01-03", toy=True),
        "other": report(date="2027-01-04", hardware={"name": "A100"}),
        "kernels": report(date="2027-01-05", measures=[]),
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    found = newest(tmp_path)
    assert found is not None
    assert found["date"] == "2027-01-02"


def test_stored_notes_are_valid() -> None:
    load_notes()


def test_notes_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("\n".join(json.dumps({**NOTE, "after": after}) for after in (1.5, None)) + "\n")
    assert [note.after for note in load_notes(path)] == [1.5, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"date": "yesterday"}, "2: Invalid isoformat"),
        ({"before": "fast"}, "2: `before` must be a number"),
        ({"predicted": None}, "`predicted` must be a number"),
        ({"after": float("nan")}, "`after` must be a number"),
        ({"kept": 1}, "`kept` must be true or false"),
        ({"outcome": " "}, "`outcome` must be a text"),
        ({"more": 1}, "takes exactly date, commit"),
    ],
)
def test_an_invalid_note_is_reported_by_line_and_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(f"{json.dumps(NOTE)}\n{json.dumps({**NOTE, **changes})}\n")
    with pytest.raises(ValueError, match=message):
        load_notes(path)
