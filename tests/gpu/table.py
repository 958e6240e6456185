"""The table of GPU figures in the documentation, made from the files in `figures/`.

Figures of toy runs and of other devices are left out, and those of runs without checks are marked. Without a file, one
line says that nothing is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.goals import GOALS, Goal, device_rates

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
    ("slowdown", "states"): "slowdown by last-layer states of all output tokens to Parquet",
    ("slowdown", "constrained"): "slowdown by a JSON schema on every second row",
    ("slowdown", "sampled"): "slowdown by mixed sampling parameters against greedy rows",
    (
        "kernel",
        _BANDWIDTH,
    ): "share of the rate of a copy, of the decode kernel alone (256 rows, 1,024 positions, 8 heads of 128)",
    ("start", "seconds"): "start: a new process to the first token",
}


def stored(folder: Path = FIGURES) -> list[dict[str, Any]]:
    """The reports of real runs with whole jobs on one device, oldest first: the goals' device, else the latest one."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    real = sorted((r for r in reports if not r["toy"] and r["measures"]), key=lambda r: (str(r["date"]), r["commit"]))
    devices = [str(report["hardware"]["name"]) for report in real]
    device = next((name for name in devices if GOALS[0].device in name), devices[-1] if devices else "")
    return [report for report, name in zip(real, devices, strict=True) if name == device]


def markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """The table as Markdown, of each figure's latest measurement; the line of `unmeasured` without reports."""
    if not reports:
        return unmeasured()
    last = reports[-1]
    versions = ", ".join(f"{name} {number}" for name, number in last["versions"].items())
    name = last["hardware"]["name"]
    rates = device_rates(name)
    floor = "" if rates is None else (
        f"; the floor is that of {rates.bandwidth / 1e12:.2g} TB/s and {rates.flops / 1e12:.0f} TFLOP/s, one after the "
        "other"
    )  # fmt: skip
    lines = [
        f"{name}, {versions}. Random weights at the real shapes, fixed output lengths{floor}. Goals, moonshots and "
        f"predictions are for an {GOALS[0].device}.",
        "",
        "| | model | measured | of the floor | part run | goal | moonshot | predicted | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    values: _Values = {}
    for report in reports:
        values |= _values(report)
    lines += [_line(goal, values.get((goal.workload, goal.model, goal.figure))) for goal in GOALS]
    if any(not measure["checked"] for measure in values.values()):
        lines += ["", "\\* The checks were run before, and not in the same run."]
    lines += ["", *(line for report in reports for line in _peers(report["measures"]))]
    return "\n".join(lines).rstrip() + "\n"


def unmeasured() -> str:
    """The line that replaces the table while no run is stored."""
    return (
        f"**The goals are unmeasured**: no run of the GPU check is stored. The {len(GOALS)} goals, with "
        "their moonshots and predictions, are in `tests/gpu/goals.py`.\n"
    )


_Values = dict[tuple[str, str, str], Mapping[str, Any]]


def _values(report: Mapping[str, Any]) -> _Values:
    """(workload, model, figure) -> measure of batchgen, including that of the decode kernel."""
    ours = ({**m, "commit": report["commit"]} for m in report["measures"] if m["engine"] == "batchgen")
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
        found["kernel", "", _BANDWIDTH] = {
            **{"value": 100 * max(kernels), "share": None, "factor": 1.0, "checked": True},
            "commit": report["commit"],
        }
    return found


def _line(goal: Goal, measure: Mapping[str, Any] | None) -> str:
    value, share, part, commit = "not measured", "", "", ""
    if measure is not None:
        number = _number(measure["value"], goal.unit)
        value = f"**{number}**" if goal.met(measure["value"]) else number
        value, commit = value + (r" \*" if not measure["checked"] else ""), measure["commit"]
        share = "" if measure["share"] is None else f"{measure['share']:.0%}"
        part = "all" if measure["factor"] == 1 else f"{measure['factor']:.2g}"
    aims = " | ".join(_number(x, goal.unit) for x in (goal.goal, goal.moonshot, goal.predicted))
    return f"| {_NAMES[goal.workload, goal.figure]} | {goal.model} | {value} | {share} | {part} | {aims} | {commit} |"


def _peers(measures: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each measure of another engine, with the part of the workload that was run."""
    return [
        f"{m['engine']} {m['version']}, {m['workload']} {m['model']}: {m['value']:,.0f} tokens/s "
        f"on {m['factor']:.2g} of it."
        for m in measures
        if m["engine"] != "batchgen"
    ]


def _number(value: float, unit: str) -> str:
    if unit == "tokens/s":
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return {"x": f"{text} x", "%": f"{text} %", "% slower": f"{text} %", "s": f"{text} s"}[unit]
