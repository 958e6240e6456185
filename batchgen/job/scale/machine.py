"""Machine files of `batchgen plan`: a kind of device, described by its rates or measured by a run on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal

import numpy as np
import torch

from batchgen.config.definitions import check_keys, read_definition
from batchgen.config.units import parse_size
from batchgen.errors import UsageError
from batchgen.job.display.eta import Rates
from batchgen.models.base import ModelSpec
from batchgen.plan.length_predictor import Lengths
from batchgen.plan.step_costs import Costs
from batchgen.request.foreign_text import ForeignTextError, read_json_file, typed

_NUMBER: Final = (int, float, NoneType)
_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "name": (str, NoneType),
    "device": (str, NoneType),
    "measured": (str, NoneType),
    "memory": (str, NoneType),
    "currency": (str, NoneType),
    "tflops": _NUMBER,
    "memory_gb_per_second": _NUMBER,
    "step_ms": _NUMBER,
    "row_ms": _NUMBER,
    "start_seconds": _NUMBER,
    "load_gb_per_second": _NUMBER,
    "price_per_hour": _NUMBER,
    "doubt": _NUMBER,
}
_RATES: Final = ("tflops", "memory_gb_per_second", "step_ms")
_MAY_BE_ZERO: Final = ("step_ms", "row_ms", "start_seconds", "price_per_hour", "doubt")
_ROW_SECONDS: Final = 2e-4
_START_SECONDS: Final = {"cpu": 4.0, "cuda": 20.0}
_LOAD_BYTES: Final = 2e9
"""Bytes of weights that are read in a second."""
_DESCRIBED, _MEASURED, _SIMILAR = 0.3, 0.09, 0.2
"""Standard deviation of the speed of a described machine; of one that was measured with the job's model; with
another one."""
_ROWS_MEASURED: Final = 1000
"""Rows from which on their cost outside the model is that of a run: fewer hide what a job of any size takes."""
_COSTS: Final = 6


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of device."""

    name: str
    device: Literal["cpu", "cuda"]
    memory: int | None
    """Bytes of a device; None: those of the machine that plans."""
    rates: Callable[[ModelSpec], Rates]
    costs: Costs
    """Relative to those of the rates."""
    doubt: Callable[[ModelSpec], float]
    """Standard deviation of its speed with a model, relative to it."""
    row_seconds: float
    """Of reading, planning and writing a row."""
    start_seconds: float
    """From the command to the first step, without reading weights."""
    load_bytes: float
    """Bytes of weights that are read in a second."""
    price_per_hour: float | None
    """Of a device."""
    currency: str
    lengths: Lengths | None
    """Of outputs that the measured run has seen."""


def read_machine(path: Path) -> Machine:
    """Read a TOML file, or the report of a run (`run --report FILE.json`).

    Raises:
        UsageError: the file cannot be read or is wrong, or the run measured nothing.
    """
    where = f"--machine: {path}"
    try:
        if path.suffix == ".json":
            return _machine({}, _measured(path), path.stem)
        table = read_definition(path, "--machine: ", "")
        check_keys(table, _KINDS, where)
        typed(table, _KINDS)
        report = None if table.get("measured") is None else _measured(path.parent / table["measured"])
        return _machine(table, report, path.stem)
    except OSError as problem:
        raise UsageError(f"{where}: cannot read {problem.filename}: {problem.strerror}") from None
    except ForeignTextError as problem:
        raise UsageError(f"{where} {problem}") from None


def _machine(table: Mapping[str, Any], report: Mapping[str, Any] | None, name: str) -> Machine:
    numbers = {key: float(value) for key, value in table.items() if isinstance(value, int | float)}
    for key, value in numbers.items():
        if not isfinite(value) or value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
            least = "at least 0" if key in _MAY_BE_ZERO else "above 0"
            raise ForeignTextError(f"has {value:g} as `{key}`, which must be {least}")
    measured = {} if report is None else report["measured"]
    if measured and (both := [key for key in (*_RATES, "device") if key in table]):
        raise ForeignTextError(f"has `{both[0]}` and `measured`, which says it; keep one of them")
    device = measured.get("device", table.get("device", "cuda"))
    if device not in _START_SECONDS:
        raise ForeignTextError(f"has {json.dumps(device)} as `device`, which must be cpu or cuda")
    if device == "cuda" and not measured and "memory" not in table:
        raise ForeignTextError('has no `memory`, the size of a device\'s, such as "80GiB"')
    start, row = _START_SECONDS[device], _ROW_SECONDS
    if report is not None:
        seconds, rows = report["seconds"], report["rows"]
        start = seconds.get("starting", 0.0) + seconds.get("loading", 0.0)
        if rows >= _ROWS_MEASURED:
            row = sum(seconds.get(phase, 0.0) for phase in ("reading", "planning", "writing")) / rows
    lengths = Lengths(**measured["lengths"]) if measured else None

    def rates(spec: ModelSpec) -> Rates:
        if measured:
            return Rates(**measured["rates"])
        guess = Rates.guessed(spec, torch.get_num_threads())
        return Rates(
            1e12 * numbers["tflops"] if "tflops" in numbers else guess.flops,
            1e9 * numbers["memory_gb_per_second"] if "memory_gb_per_second" in numbers else guess.bandwidth,
            1e-3 * numbers["step_ms"] if "step_ms" in numbers else guess.step,
        )

    def doubt(spec: ModelSpec) -> float:
        if "doubt" in numbers or not measured:
            return numbers.get("doubt", _DESCRIBED)
        own = str(spec.dtype).removeprefix("torch."), spec.parameters
        return _MEASURED if (measured["dtype"], measured["parameters"]) == own else _SIMILAR

    return Machine(
        name=table.get("name", name),
        device=device,
        memory=_size(table["memory"]) if "memory" in table else measured.get("memory"),
        rates=rates,
        costs=Costs(**measured["costs"]) if measured else Costs([1.0] * _COSTS, np.zeros((_COSTS, _COSTS)).tolist()),
        doubt=doubt,
        row_seconds=1e-3 * numbers["row_ms"] if "row_ms" in numbers else row,
        start_seconds=numbers.get("start_seconds", start),
        load_bytes=1e9 * numbers["load_gb_per_second"] if "load_gb_per_second" in numbers else _LOAD_BYTES,
        price_per_hour=numbers.get("price_per_hour"),
        currency=table.get("currency", "USD"),
        lengths=lengths if lengths is not None and lengths.finished else None,
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as problem:
        raise ForeignTextError(f"has a wrong `memory`: it {problem}") from None


def _measured(path: Path) -> dict[str, Any]:
    """The report of a run that measured its machine."""
    report = typed(read_json_file(path), {"measured": dict, "seconds": dict, "rows": int})
    if not report["measured"]:
        raise ForeignTextError(
            f"names the report {path.name} of a run that measured nothing: it was too short, or done by others"
        )
    measured = typed(
        report["measured"],
        {"device": str, "memory": int, "dtype": str, "parameters": int, "rates": dict, "costs": dict, "lengths": dict},
    )
    typed(measured["rates"], dict.fromkeys(Rates.__slots__, float))
    typed(measured["lengths"], dict.fromkeys(Lengths.__slots__, float))
    costs = typed(measured["costs"], {"factors": list, "covariance": list})
    try:
        shapes = np.shape(np.array(costs["factors"], float)), np.shape(np.array(costs["covariance"], float))
    except ValueError:
        shapes = (), ()
    if shapes != ((_COSTS,), (_COSTS, _COSTS)):
        raise ForeignTextError("has other costs than a run measures")
    return report
