"""Figures: medians with ranges, ratios of interleaved repeats and shares of the floors; one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from batchgen.bench.peers import OURS
from batchgen.bench.process import Generated

if TYPE_CHECKING:  # they import torch, which drawing stored figures does not need
    from batchgen.bench.floors import FloorWork
    from batchgen.bench.rates import MatmulRate

RATE: Final = "output_tokens_per_second"
CPU_RATE: Final = "output_tokens_per_cpu_second"
SLOWDOWN: Final = "slowdown"
"""Slowdown of special rows against the same rows without fields and adapters, repeat by repeat, in wall-clock time."""
CPU_SLOWDOWN: Final = "slowdown_by_cpu_time"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of one or more values."""
        return Spread(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Context:
    """Machine, commit and versions of a measurement."""

    cpu: str
    commit: str | None
    repeat: int
    matmul: MatmulRate
    """Highest rate measured during the run."""
    bandwidth: float
    """Memory bandwidth in bytes/s."""
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    """ISO 8601, UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value with its context. Defaults are for lines of older versions, which lack some fields."""

    workload: str
    engine: str
    version: str = ""
    dtype: str = ""
    device: str = ""
    model: str = ""
    metric: str
    value: float
    """Median of the repeats."""
    unit: str = ""
    min: float
    max: float
    repeat: int = 0
    setting: Mapping[str, int] = field(default_factory=dict)
    """The engine's fastest setting; empty if it has none."""
    ratio: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Other engine -> median, min and max of this engine's value divided by its value, repeat by repeat."""
    floor_share: float | None = None
    """Time of the arithmetic floor divided by the measured time, by the clock of `metric`; None if the metric is not
    a rate."""
    floor_tokens_per_second: float | None = None
    """Rate at the arithmetic floor."""
    floors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """"overlap" and "serial", the floors with memory and attention (`floors.py`) -> tokens_per_second, share."""
    counted: Mapping[str, int] = field(default_factory=dict)
    agreement: float = 0.0
    """Share of checked rows whose first id equals the reference's, in this dtype."""
    rows_equal: float = 1.0
    """Share of checked rows whose ids all equal the reference's, in float32."""
    threads: int = 0
    gemm_gflops: float = 0.0
    gemm_form: str = ""
    """Implementation, dtype and size that reached `gemm_gflops`."""
    bandwidth_gbytes: float = 0.0
    cpu: str = ""
    commit: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    def to_json(self) -> str:
        """One JSON line."""
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Measured:
    """All repeats of one engine on one workload."""

    name: str
    version: str
    dtype: str
    device: str
    threads: int
    setting: Mapping[str, int]
    agreement: float
    passes: list[Generated] = field(default_factory=list)
    plain_passes: list[Generated] = field(default_factory=list)
    """Passes of the same rows without fields and adapters, one before each pass; empty if the rows are not special."""
    rows_equal: float = 1.0

    def rates(self, clock: str) -> list[float]:
        """Generated tokens per second by `clock` ("seconds" or "cpu_seconds"), one for each repeat."""
        return [p.tokens / getattr(p, clock) for p in self.passes]

    def slowdowns(self, clock: str) -> list[float]:
        """Per cent by which the rate of special rows is below that of plain rows, one for each repeat."""
        plain = replace(self, passes=self.plain_passes).rates(clock)
        return [100.0 * (1.0 - mine / other) for mine, other in zip(self.rates(clock), plain, strict=True)]


@dataclass(frozen=True, slots=True)
class _Clock:
    """A clock, and the metrics by it."""

    name: str
    rate: str
    slowdown: str
    unit: str
    """Unit of the rate."""


_CLOCKS: Final = (
    _Clock("seconds", RATE, SLOWDOWN, "tokens/s"),
    # Processor time is meaningful even on a machine that runs other programs.
    _Clock("cpu_seconds", CPU_RATE, CPU_SLOWDOWN, "tokens/CPU-s"),
)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Spread of the quotients of paired measurements."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def ours_over(rate: Figure, figures: Sequence[Figure]) -> Spread | None:
    """Batchgen's value divided by a peer's, repeat by repeat in the run that measured both.

    Args:
        rate: the peer's figure.
        figures: figures of one or several runs. If batchgen's figure is of another run, the inverse of the peer's ratio
            is taken.

    Returns:
        None for batchgen itself, and for a peer measured without it.
    """
    if rate.engine == OURS:
        return None
    measured = rate.model, rate.workload, rate.metric, rate.date
    for ours in figures:
        here = ours.model, ours.workload, ours.metric, ours.date
        if ours.engine == OURS and here == measured and rate.engine in ours.ratio:
            return Spread(**ours.ratio[rate.engine])
    inverse = rate.ratio.get(OURS)
    return None if inverse is None else Spread(1 / inverse["median"], 1 / inverse["max"], 1 / inverse["min"])


def workload_figures(
    workload: str, model: str, measured: Sequence[Measured], work: FloorWork, context: Context
) -> list[Figure]:
    """Figures of every engine on one workload: its rates, and the slowdown of its special rows."""
    floors = work.seconds(context.matmul.flops, context.bandwidth)
    figures = []
    for engine in measured:
        for clock in _CLOCKS:
            # Processor time sums over threads, so its floor is the wall-clock floor times their number.
            threads = engine.threads if clock.name == "cpu_seconds" else 1
            rates = engine.rates(clock.name)
            spread = Spread.of(rates)
            least = {name: seconds * threads / work.output_tokens for name, seconds in floors.items()}
            shares = {name: {"tokens_per_second": 1 / s, "share": spread.median * s} for name, s in least.items()}
            arithmetic = shares.pop("arithmetic")
            figure = Figure(
                **_about(workload, model, engine, work, context),
                metric=clock.rate,
                value=spread.median,
                unit=clock.unit,
                min=spread.min,
                max=spread.max,
                ratio={o.name: asdict(ratios(rates, o.rates(clock.name))) for o in measured if o is not engine},
                floor_share=arithmetic["share"],
                floor_tokens_per_second=arithmetic["tokens_per_second"],
                floors=shares,
            )
            figures.append(figure)
            if engine.plain_passes:
                figures.append(_slowdown(figure, clock.slowdown, engine.slowdowns(clock.name)))
    return figures


def _about(workload: str, model: str, engine: Measured, work: FloorWork, context: Context) -> dict[str, Any]:
    """The fields of a figure that all metrics of an engine on a workload have in common."""
    return {
        "workload": workload,
        "engine": engine.name,
        "version": engine.version,
        "dtype": engine.dtype,
        "device": engine.device,
        "model": model,
        "repeat": context.repeat,
        "setting": engine.setting,
        "counted": {
            "prompt_tokens": work.prompt_tokens,
            "distinct_prompt_tokens": work.distinct_prompt_tokens,
            "output_tokens": work.output_tokens,
            **engine.passes[-1].counted,
        },
        "agreement": engine.agreement,
        "rows_equal": engine.rows_equal,
        "threads": engine.threads,
        "gemm_gflops": context.matmul.flops / 1e9,
        "gemm_form": context.matmul.form,
        "bandwidth_gbytes": context.bandwidth / 1e9,
        "cpu": context.cpu,
        "commit": context.commit,
        "versions": context.versions,
        "date": context.date,
    }


def _slowdown(rate: Figure, metric: str, slowdowns: Sequence[float]) -> Figure:
    """The slowdown figure that accompanies a rate of special rows."""
    spread = Spread.of(slowdowns)
    about = {"value": spread.median, "min": spread.min, "max": spread.max, "metric": metric, "unit": "%"}
    return replace(rate, **about, ratio={}, floor_share=None, floor_tokens_per_second=None, floors={})  # type: ignore[arg-type]
