"""The report of a run, as JSON and as tables.

The JSON file has `toy`, `hardware`, `versions`, `commit`, `date`, `flash` (the library), `seconds` by stage, `rates`
(measured bytes and operations per second), `checks` and `figures` (one a line), `withheld` (what did not run, with the
reason), `measures` (whole jobs: tokens per second, slowdowns, start-up) and `profiles` (the time of a decode step by
kernel), `tuning` (a `fragment` for chips.toml and the measured times) and `exit_code`. Times of checks are in seconds,
those of figures in microseconds; errors are largest absolute differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.gpu.device import Gpu, Timing

FAILURES = ("fail", "missing", "unreached")
"""Statuses of checks that count as failures; the others are `pass` and `absent` (an optional library)."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one comparison of one case."""

    stage: str
    op: str
    case: str
    what: str
    dtype: str
    shape: Mapping[str, int]
    status: str
    error: float | None = None
    plain: float | None = None
    """Error of the plain low-precision operation."""
    bound: float | None = None
    note: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured time with its floor."""

    op: str
    what: str
    shape: Mapping[str, Any]
    timing: Timing
    toy: bool
    bytes: int = 0
    flops: int = 0
    floor_us: float | None = None
    floor_by: str = ""
    """The rate that sets the floor: "bandwidth" or "matmul"."""
    share: float | None = None
    """Floor divided by the median time."""
    against: Mapping[str, float] = field(default_factory=dict)
    """Name -> microseconds of other operations at this shape."""
    checked: bool = True
    """Whether the parity stage ran in the same run."""

    @property
    def ratios(self) -> dict[str, float]:
        """Name -> median time divided by that of `against`."""
        return {name: self.timing.p50 / time for name, time in self.against.items()}


@dataclass(frozen=True, slots=True)
class Measure:
    """One measured quantity of a whole job, with its goal."""

    workload: str
    model: str
    """Name of the shape; empty if it does not matter."""
    figure: str
    """Name of the quantity, as in `goals.GOALS` if it has a goal."""
    value: float
    unit: str
    engine: str = "batchgen"
    version: str = ""
    floor: float | None = None
    """Best value that the device's nominal rates allow if transfers and products overlap fully, in `unit`."""
    serial_floor: float | None = None
    """Best value if they do not overlap."""
    share: float | None = None
    """Share of the serial floor that is reached."""
    goal: float | None = None
    moonshot: float | None = None
    predicted: float | None = None
    """Value expected before the measurement."""
    factor: float = 1.0
    """The part of the workload that was run in the time available; 1: all of it."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    toy: bool = False
    checked: bool = True
    """Whether the engine stage ran and no check failed in the same run."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The time of a steady decode step, by kernel."""

    workload: str
    model: str
    rows: int
    steps: int
    step_ms: float
    """Wall time of a step, measured without the profiler."""
    host_ms: float
    """Time of a step in which the host does not wait for the device."""
    busy_share: float | None
    """Share of the profiled time in which the device ran a kernel; None on a CPU."""
    launches_per_step: float
    kernels: list[dict[str, Any]]
    """The kernels with the longest times: name, microseconds a step, calls a step, share of the device's busy time."""
    toy: bool = False


def figure(
    gpu: Gpu, op: str, what: str, shape: Mapping[str, Any], timing: Timing, *, bytes: int = 0, flops: int = 0
) -> Figure:
    """A figure with the floor from the device's measured rates, for `bytes` moved and `flops` operations."""
    floors = {}
    if bytes and gpu.memory_rate:
        floors["bandwidth"] = bytes / gpu.memory_rate * 1e6
    if flops and gpu.matmul_rate:
        floors["matmul"] = flops / gpu.matmul_rate * 1e6
    made = Figure(op, what, dict(shape), timing, gpu.toy, bytes, flops)
    if not floors:
        return made
    by, floor = max(floors.items(), key=lambda item: item[1])
    return replace(made, floor_us=floor, floor_by=by, share=floor / timing.p50)


@dataclass
class Report:
    """Everything that a run found."""

    toy: bool
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    date: str
    stages: list[str]
    flash: str = ""
    """The flash library that was used, or the reason for none."""
    seconds: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    withheld: list[str] = field(default_factory=list)
    """Cases and stages that did not run, with the reason."""
    tuning: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0

    def failed(self) -> list[Check]:
        """Checks that failed, were missing or were not reached."""
        return [check for check in self.checks if check.status in FAILURES]

    def text(self) -> str:
        """The report as JSON, with a line per check and figure."""
        whole = asdict(self)
        for found, made in zip(whole["figures"], self.figures, strict=True):
            found["ratios"] = made.ratios
        lines = [f"{json.dumps(key)}: {_listed(value)}" for key, value in whole.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def write(self, target: Path) -> Path:
        """Write to the file `target`, or into the folder `target` under a name made of device, date and commit."""
        if target.is_dir() or not target.suffix:
            target.mkdir(parents=True, exist_ok=True)
            device = str(self.hardware.get("name", "unknown")).replace(" ", "-").lower()
            name = f"{device}-{self.date[:10]}-{self.commit}"
            target = target / f"{'toy-' if self.toy else ''}{name}.json"
        target.write_text(self.text(), encoding="utf-8")
        return target

    def table(self) -> str:
        """Summary tables as text, for the terminal."""
        lines = [
            *self._heading(),
            *self._checks_by_op(),
            *self._figure_lines(),
            *self._measure_lines(),
            *self._profile_lines(),
        ]
        lines += [f"flash: {self.flash}"] if self.flash else []
        lines += [f"not measured: {reason}" for reason in self.withheld]
        lines += ["", self.tuning["fragment"]] if self.tuning else []
        lines.append("stages: " + ", ".join(f"{name} {taken:.0f} s" for name, taken in self.seconds.items()))
        return "\n".join(lines)

    def _heading(self) -> list[str]:
        words = [str(self.hardware.get("name", "?")), *(f"{k} {v}" for k, v in self.versions.items()), self.commit]
        heading = [" | ".join(words)]
        if self.toy:
            heading.append("TOY RUN on a CPU: tests that the command works; its times mean nothing")
        return heading

    def _checks_by_op(self) -> list[str]:
        groups: dict[tuple[str, str, str], list[Check]] = {}
        for check in self.checks:
            groups.setdefault((check.stage, check.op, check.dtype), []).append(check)
        rows = [
            (*kind, str(len(checks)), str(sum(c.status == "pass" for c in checks)), _worst(checks))
            for kind, checks in groups.items()
        ]
        lines = _aligned("stage|op|dtype|checks|passed|worst error/bound", rows)
        others: dict[tuple[str, str, str, str], list[Check]] = {}
        for check in [c for c in self.checks if c.status != "pass"]:
            others.setdefault((check.status, check.stage, check.op, _why(check)), []).append(check)
        for (status, stage, _, why), alike in others.items():
            more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
            lines.append(f"{status.upper()} {stage} {alike[0].case} {alike[0].what}{more}: {why}")
        noted = [check for check in self.checks if check.status == "pass" and check.note]
        lines += [f"note: {check.stage} {check.case} {check.what}: {check.note}" for check in noted]
        return lines

    def _figure_lines(self) -> list[str]:
        rows = [
            (
                *(x.op, x.what, " ".join(f"{k}={v}" for k, v in x.shape.items())),
                *(f"{time:.1f}" for time in (x.timing.p50, x.timing.p20, x.timing.p80)),
                *(_given(x.floor_us, ".1f"), _given(x.share, ".0%")),
                ", ".join(f"{ratio:.2f} x {name}" for name, ratio in x.ratios.items()),
            )
            for x in self.figures
        ]
        return _aligned("op|what|shape|median us|p20|p80|floor us|share|against", rows)

    def _measure_lines(self) -> list[str]:
        rows = [
            (
                *(x.workload, x.model, x.engine, x.figure, _given(x.value), x.unit),
                *(_given(x.serial_floor), _given(x.share, ".0%"), _given(x.goal), _given(x.factor, ".3g")),
            )
            for x in self.measures
        ]
        return _aligned("workload|model|engine|figure|value|unit|serial floor|share|goal|part", rows)

    def _profile_lines(self) -> list[str]:
        lines = []
        for x in self.profiles:
            busy = "unknown" if x.busy_share is None else f"{x.busy_share:.1%}"
            lines.append(
                f"profile {x.model}, {x.rows} rows: {x.step_ms:.2f} ms a step, host {x.host_ms:.2f} ms, "
                f"device busy {busy}, {x.launches_per_step:.1f} launches a step"
            )
            lines += [
                f"  {k['us_per_step']:9.1f} us {k['share']:6.1%} {k['calls_per_step']:7.1f} x {k['name']}"
                for k in x.kernels
            ]
        return lines


def _listed(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
    return json.dumps(value)


def _worst(checks: Iterable[Check]) -> str:
    ratios = [c.error / c.bound for c in checks if c.error is not None and c.bound]
    return f"{max(ratios):.2f}" if ratios else ""


def _why(check: Check) -> str:
    if check.error is None:
        return check.note
    return f"error {check.error:.3g}, bound {check.bound:.3g}{'; ' if check.note else ''}{check.note}"


def _given(value: float | None, how: str = ",.4g") -> str:
    return "" if value is None else format(value, how)


def _aligned(names: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table, under the names of its columns; none without rows."""
    if not rows:
        return []
    table = [tuple(names.split("|")), *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
