"""The table of GPU figures in the documentation, made from the newest file in `figures/`.

Figures of toy runs, of other devices than that of the goals, and of runs whose checks failed or did not run are left
out. Without a file, one line says that nothing is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.goals import GOALS, Goal

FIGURES = Path(__file__).parent / "figures"

_RATE, _BANDWIDTH = "output_tokens_per_second", "paged_decode_bandwidth"
_NAMES = {
    ("w-nano", _RATE): "256 unlike prompts (`w-nano`), output tokens/s",
    ("w-prefix", _RATE): "4,096 prompts after one prefix of 2,000 tokens (`w-prefix`), output tokens/s",
    ("w-tree", _RATE): "a tree of prompts, 4 samples each (`w-tree`), output tokens/s",
    ("w-prefix", "times_flat"): "`w-prefix` against each row reading the cached prefix by itself",
    ("w-prefix", "times_unshared"): "`w-prefix` against prompts that share nothing",
    ("w-nano", "times_transformers-continuous"): "`w-nano` against transformers continuous batching",
    ("w-prefix", "times_transformers-continuous"): "`w-prefix` against transformers continuous batching",
    ("decode", "device_busy_share"): "device at work in decoding, 256 rows",
    ("slowdown", "logprobs"): "slowdown by top-20 logprobs on every row",
    ("slowdown", "states"): "slowdown by last-layer states of all output tokens (to memory)",
    ("slowdown", "constrained"): "slowdown by a JSON schema on every second row",
    ("slowdown", "sampled"): "slowdown by mixed sampling parameters against greedy rows",
    ("kernel", _BANDWIDTH): "share of bandwidth of the decode kernel alone (256 rows, 1,024 positions, 8 heads of 128)",
    ("start", "seconds"): "start: a new process to the first token",
}


def newest(folder: Path = FIGURES, device: str = "H200") -> dict[str, Any] | None:
    """The latest report of a real run on the goals' device; None without one."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    found = [r for r in reports if not r["toy"] and device in str(r["hardware"].get("name")) and r.get("measures")]
    return max(found, key=lambda report: str(report["date"]), default=None)


def markdown(report: Mapping[str, Any] | None) -> str:
    """The table as Markdown, or the line of `unmeasured`."""
    if report is None:
        return unmeasured()
    values = _values(report)
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    lines = [
        f"{report['hardware']['name']}, {versions}, commit {report['commit']}, {str(report['date'])[:10]}. Random "
        "weights at the real shapes, fixed output lengths; the floor is that of 4.3 TB/s and 790 TFLOP/s, one after "
        "the other.",
        "",
        "| | model | measured | of the floor | part run | goal | moonshot | predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(goal, values.get((goal.workload, goal.model, goal.figure))) for goal in GOALS]
    lines += ["", *_peers(report["measures"])]
    return "\n".join(lines).rstrip() + "\n"


def unmeasured() -> str:
    """The line that replaces the table while no run on the goals' device is stored."""
    return (
        f"**The goals on an H200 are unmeasured**: no run of the GPU check is stored. The {len(GOALS)} goals, with "
        "their moonshots and predictions, are in `tests/gpu/goals.py`.\n"
    )


_Values = dict[tuple[str, str, str], Mapping[str, Any]]


def _values(report: Mapping[str, Any]) -> _Values:
    """(workload, model, figure) -> checked measure of batchgen, including that of the decode kernel."""
    ours = (m for m in report["measures"] if m["engine"] == "batchgen" and m["checked"])
    found: _Values = {(m["workload"], m["model"], m["figure"]): m for m in ours}
    shape = {"rows": 256, "context": 1024, "kv_heads": 8, "dim": 128}
    kernels = [
        f["share"]
        for f in report["figures"]
        if (f["op"], f["what"]) == ("triton", "paged decode")
        and f["checked"]
        and f["share"]
        and shape.items() <= f["shape"].items()
    ]
    if kernels:
        found["kernel", "", _BANDWIDTH] = {"value": 100 * max(kernels), "share": None, "factor": 1.0}
    return found


def _line(goal: Goal, measure: Mapping[str, Any] | None) -> str:
    value, share, part = "not measured", "", ""
    if measure is not None:
        number = _number(measure["value"], goal.unit)
        value = f"**{number}**" if goal.met(measure["value"]) else number
        share = "" if measure["share"] is None else f"{measure['share']:.0%}"
        part = "all" if measure["factor"] == 1 else f"{measure['factor']:.2g}"
    aims = " | ".join(_number(x, goal.unit) for x in (goal.goal, goal.moonshot, goal.predicted))
    return f"| {_NAMES[goal.workload, goal.figure]} | {goal.model} | {value} | {share} | {part} | {aims} |"


def _peers(measures: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each measure of another engine, with the part of the workload that was run."""
    return [
        f"{m['engine']} {m['version']}, {m['workload']} {m['model']}: {m['value']:,.0f} tokens/s "
        f"on {m['factor']:.2g} of it."
        for m in measures
        if m["engine"] != "batchgen" and m["checked"]
    ]


def _number(value: float, unit: str) -> str:
    if unit == "tokens/s":
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return {"x": f"{text} x", "%": f"{text} %", "% slower": f"{text} %", "s": f"{text} s"}[unit]
