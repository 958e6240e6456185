"""Figures that an earlier run wrote, read back from their JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from batchgen.errors import UsageError
from batchgen.job.bench.figures import Figure

__all__ = ["LeftOut", "StoredFigures", "parse_figures", "read_figures"]

_NEEDED: Final = ("workload", "engine", "metric", "value")
_UNKNOWN: Final[dict[str, Any]] = {
    "str": "",
    "int": 0,
    "float": 0.0,
    "float | None": None,
    "str | None": None,
}
"""What a field of this type is where an older version did not write it; mappings are empty."""
_LEFT_OUT: Final = "left_out"
"""Metric of a line that has no value, but a reason."""
_SPREAD: Final = ("min", "max")
_TAKES: Final = {"str": "a text", "int": "a whole number", "float": "a number", "Mapping": "an object"}
"""By what the type of a figure's field begins with."""
_OLDER: Final = {"rows_equal": 1.0}
"""What was true of every figure before versions wrote it down."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A peer without figures."""

    model: str
    engine: str
    workload: str | None
    """None: of all workloads."""
    reason: str

    def line(self) -> str:
        """For a person."""
        return f"left out: {self.engine}{f' of {self.workload}' if self.workload else ''}: {self.reason}"

    def to_json(self) -> str:
        """One line beside those of figures."""
        values = {"workload": self.workload, "engine": self.engine, "model": self.model}
        return json.dumps({**values, "metric": _LEFT_OUT, "value": None, "reason": self.reason}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class StoredFigures:
    """What a file of figures holds."""

    figures: list[Figure]
    """Each engine's, on a workload and model; the last where a file holds several."""
    others: list[Mapping[str, Any]] = field(default_factory=list)
    """Lines of workloads that no engines are compared on, as they stand."""
    left_out: list[LeftOut] = field(default_factory=list)
    """Peers that a run had to do without, and that have no figures from another."""


def read_figures(path: Path, flag: str = "--from") -> StoredFigures:
    """Read a file of JSON lines, as `batchgen bench` prints them; `flag` named it, and errors name that.

    Raises:
        UsageError: it cannot be read, a line is not a JSON object, or there is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag}: {path} is not UTF-8 text") from None
    return parse_figures(text, f"{flag}: {path}")


def parse_figures(text: str, where: str) -> StoredFigures:
    """The figures of JSON lines; `where` they stand is said in errors.

    Raises:
        UsageError: a line is not a JSON object, a value of a figure is of another type, or there is none.
    """
    figures: dict[tuple[Any, ...], Figure] = {}
    absent: dict[tuple[Any, ...], LeftOut] = {}
    others: list[Mapping[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{where}, line {number} is not JSON ({error.msg}): it must be what `batchgen bench` prints"
            ) from None
        if not isinstance(values, dict):
            raise UsageError(f"{where}, line {number} is not a JSON object")
        if values.get("metric") == _LEFT_OUT:
            left = _left_out(values, f"{where}, line {number}")
            absent[left.model, left.engine, left.workload] = left
        elif all(name in values for name in _NEEDED):
            figure = _figure(values, f"{where}, line {number}")
            figures.pop(_key(figure), None)
            figures[_key(figure)] = figure
        else:
            others.append(values)
    if not figures and not others:
        raise UsageError(f"{where} holds no figure: it must be what `batchgen bench` prints")
    there = {(f.model, f.engine, name) for f in figures.values() for name in (f.workload, None)}
    return StoredFigures(list(figures.values()), others, [one for key, one in absent.items() if key not in there])


def _left_out(values: Mapping[str, Any], where: str) -> LeftOut:
    model, engine, workload = (values.get(name) for name in ("model", "engine", "workload"))
    if not isinstance(engine, str) or not isinstance(workload, str | None):
        raise UsageError(f"{where}: `left_out` needs an `engine`, and a `workload` or null")
    return LeftOut(str(model or ""), engine, workload, str(values.get("reason")))


def _key(figure: Figure) -> tuple[Any, ...]:
    return (figure.model, figure.workload, figure.engine, figure.dtype, figure.device, figure.threads, figure.metric)


def _figure(values: Mapping[str, Any], where: str) -> Figure:
    """A figure of this or an older version; keys of newer ones are left out."""
    made: dict[str, Any] = {}
    for known in fields(Figure):
        if known.name in values:
            made[known.name] = values[known.name]
        elif known.name in _SPREAD:
            made[known.name] = values["value"]
        elif known.name in _OLDER:
            made[known.name] = _OLDER[known.name]
        elif known.default is MISSING and known.default_factory is MISSING:
            made[known.name] = _UNKNOWN.get(str(known.type), {})
    for known in fields(Figure):
        if known.name in made and not _fits(str(known.type), made[known.name]):
            takes = next(told for start, told in _TAKES.items() if str(known.type).startswith(start))
            raise UsageError(f"{where}: `{known.name}` must be {takes}, got {made[known.name]!r}")
    for name, numbers in (("ratio", ("median", *_SPREAD)), ("floors", ("share",))):
        for key, one in made.get(name, {}).items():
            if not all(isinstance(one.get(number), int | float) and one[number] > 0 for number in numbers):
                raise UsageError(f"{where}: `{name}` of {key} must have {', '.join(numbers)} above 0, got {one!r}")
    return Figure(**made)


def _fits(kind: str, value: Any) -> bool:
    """Whether a value is of a type that a field of `Figure` is annotated with."""
    if kind.startswith("Mapping[str, Mapping"):
        return isinstance(value, dict) and all(isinstance(one, dict) for one in value.values())
    if kind.startswith("Mapping"):
        return isinstance(value, dict)
    if value is None:
        return kind.endswith("| None")
    if kind.startswith("str"):
        return isinstance(value, str)
    number = isinstance(value, int) or (kind.startswith("float") and isinstance(value, float) and math.isfinite(value))
    return number and not isinstance(value, bool)
