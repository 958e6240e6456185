"""Figures: medians with ranges, ratios of interleaved repeats and shares of the floors; one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from batchgen.bench.process import OURS, Generated

if TYPE_CHECKING:  # imports torch, which drawing stored figures does not need
    from batchgen.bench.floors import FloorWork

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


_CLOCKS: Final = (
    ("seconds", RATE, SLOWDOWN, "tokens/s"),
    # Processor time is meaningful even on a machine that runs other programs.
    ("cpu_seconds", CPU_RATE, CPU_SLOWDOWN, "tokens/CPU-s"),
)
"""Clock of a pass, the metrics by it, and the unit of the rate."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All repeats of one engine on one workload."""

    about: Mapping[str, Any]
    """Fields of its figures: engine, version, dtype, device, threads, setting, agreement and rows_equal."""
    passes: list[Generated] = field(default_factory=list)
    plain_passes: list[Generated] = field(default_factory=list)
    """Passes of the same rows without fields and adapters, one before each pass; empty if the rows are not special."""

    @property
    def name(self) -> str:
        """Name of the engine."""
        return str(self.about["engine"])


def rates(passes: Sequence[Generated], clock: str) -> list[float]:
    """Generated tokens per second of each pass by `clock` ("seconds" or "cpu_seconds")."""
    return [one.tokens / getattr(one, clock) for one in passes]


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
    about: Mapping[str, Any], measured: Sequence[Measured], work: FloorWork, flops: float, bandwidth: float
) -> list[Figure]:
    """Figures of every engine on one workload: its rates, and the slowdown of its special rows.

    Args:
        about: fields that all figures have in common: workload, model, repeat, machine, versions, commit and date.
        measured: the engines.
        work: necessary work of the workload.
        flops: highest rate of matrix multiplication in FLOP/s.
        bandwidth: memory bandwidth in bytes/s.
    """
    floors, figures = work.seconds(flops, bandwidth), []
    for one in measured:
        for clock, metric, slowdown, unit in _CLOCKS:
            # Processor time sums over threads, so its floor is the wall-clock floor times their number.
            threads, mine = one.about["threads"] if clock == "cpu_seconds" else 1, rates(one.passes, clock)
            spread = Spread.of(mine)
            least = {name: seconds * threads / work.output_tokens for name, seconds in floors.items()}
            shares = {name: {"tokens_per_second": 1 / s, "share": spread.median * s} for name, s in least.items()}
            arithmetic = shares.pop("arithmetic")
            counted = {
                "prompt_tokens": work.prompt_tokens,
                "distinct_prompt_tokens": work.distinct_prompt_tokens,
                "output_tokens": work.output_tokens,
                **one.passes[-1].counted,
            }
            figure = Figure(
                **about, **one.about, metric=metric, unit=unit, counted=counted,
                value=spread.median, min=spread.min, max=spread.max,
                ratio={o.name: asdict(ratios(mine, rates(o.passes, clock))) for o in measured if o is not one},
                floor_share=arithmetic["share"], floor_tokens_per_second=arithmetic["tokens_per_second"], floors=shares,
            )  # fmt: skip
            figures.append(figure)
            if one.plain_passes:
                bare = rates(one.plain_passes, clock)
                spread = Spread.of([100.0 * (1.0 - a / b) for a, b in zip(mine, bare, strict=True)])
                slower = replace(figure, metric=slowdown, unit="%", value=spread.median, min=spread.min, max=spread.max)
                figures.append(replace(slower, ratio={}, floors={}, floor_share=None, floor_tokens_per_second=None))
    return figures
