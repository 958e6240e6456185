"""The README's table of GPU figures, made from the newest file in `figures/`: `python -m tests.gpu.table [--write]`.

Without a file it is the line that says so. Figures of a toy, of a run whose proofs did not hold or were not asked for,
and of other devices than the goals' own are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.goals import GOALS, Goal

__all__ = ["BEGIN", "END", "FIGURES", "markdown", "newest", "unmeasured", "write"]

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).parent / "figures"
README = ROOT / "README.md"
BEGIN, END = "<!-- gpu table begins -->\n", "<!-- gpu table ends -->\n"

_NAMES = {
    ("w-nano", "output_tokens_per_second"): "256 unlike prompts (`w-nano`), output tokens/s",
    (
        "w-prefix",
        "output_tokens_per_second",
    ): "4,096 prompts after one prefix of 2,000 tokens (`w-prefix`), output tokens/s",
    ("w-tree", "output_tokens_per_second"): "a tree of prompts, 4 samples each (`w-tree`), output tokens/s",
    ("w-prefix", "times_flat"): "`w-prefix` against each row reading the cached prefix by itself",
    ("w-prefix", "times_unshared"): "`w-prefix` against prompts that share nothing",
    ("w-nano", "times_transformers-continuous"): "`w-nano` against transformers continuous batching",
    ("w-prefix", "times_transformers-continuous"): "`w-prefix` against transformers continuous batching",
    ("decode", "device_busy_share"): "device at work in decoding, 256 rows",
    ("slowdown", "logprobs"): "slowdown by top-20 logprobs on every row",
    ("slowdown", "states"): "slowdown by last-layer states of all output tokens (to memory)",
    ("slowdown", "constrained"): "slowdown by a JSON schema on every second row",
    ("slowdown", "sampled"): "slowdown by mixed sampling parameters against greedy rows",
    (
        "kernel",
        "paged_decode_bandwidth",
    ): "share of bandwidth of the decode kernel alone (256 rows, 1,024 positions, 8 heads of 128)",
    ("start", "seconds"): "start: a new process to the first token",
}


def newest(folder: Path = FIGURES, device: str = "H200") -> dict[str, Any] | None:
    """The latest report of a real run on the device that the goals are set for, complete or not."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    found = [r for r in reports if not r["toy"] and device in str(r["hardware"].get("name")) and r.get("measures")]
    return max(found, key=lambda report: str(report["date"]), default=None)


def markdown(report: Mapping[str, Any] | None) -> str:
    """The table, or the line that says that there is none."""
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
    """For as long as no run on such a device is stored."""
    return (
        f"**The goals on an H200 are unmeasured**: no run of the GPU check is stored. The {len(GOALS)} goals, with the "
        "moonshots and predictions beside them, stand in `tests/gpu/goals.py`.\n"
    )


def write() -> None:
    """Put the table between the markers of the README."""
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    README.write_text(f"{head}{BEGIN}{markdown(newest())}{END}{rest.split(END)[1]}", encoding="utf-8")


_Values = dict[tuple[str, str, str], Mapping[str, Any]]


def _values(report: Mapping[str, Any]) -> _Values:
    """Our own checked measures by workload, model and figure, the decode kernel's among them."""
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
        found["kernel", "", "paged_decode_bandwidth"] = {"value": 100 * max(kernels), "share": None, "factor": 1.0}
    return found


def _line(goal: Goal, measure: Mapping[str, Any] | None) -> str:
    value = share = part = ""
    if measure is None:
        value = "not measured"
    else:
        value = (
            f"**{_number(measure['value'], goal.unit)}**"
            if goal.met(measure["value"])
            else _number(measure["value"], goal.unit)
        )
        share = "" if measure["share"] is None else f"{measure['share']:.0%}"
        part = "all" if measure["factor"] == 1 else f"{measure['factor']:.2g}"
    aims = " | ".join(_number(x, goal.unit) for x in (goal.goal, goal.moonshot, goal.predicted))
    return f"| {_NAMES[goal.workload, goal.figure]} | {goal.model} | {value} | {share} | {part} | {aims} |"


def _peers(measures: Sequence[Mapping[str, Any]]) -> list[str]:
    """What other engines reached, on the part that they were run on."""
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


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        sys.stdout.write(markdown(newest()))
