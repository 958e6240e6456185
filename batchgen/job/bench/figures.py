"""Figures: medians with their spread, ratios of interleaved pairs, shares of the floor; one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Final

from batchgen.job.bench.peers import OURS
from batchgen.job.bench.process import Generated

if TYPE_CHECKING:  # torch, which drawing stored figures does not need
    from batchgen.job.bench.floors import FloorWork
    from batchgen.job.bench.rates import Products

__all__ = [
    "CPU_RATE",
    "CPU_SLOWDOWN",
    "RATE",
    "SLOWDOWN",
    "Context",
    "Figure",
    "Measured",
    "Spread",
    "ours_over",
    "ratios",
    "workload_figures",
]

RATE: Final = "output_tokens_per_second"
CPU_RATE: Final = "output_tokens_per_cpu_second"
SLOWDOWN: Final = "slowdown"
"""Of rows that ask for more than tokens, against the same rows without: run by run, by the wall clock."""
CPU_SLOWDOWN: Final = "slowdown_by_cpu_time"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Context:
    """Where a figure was taken."""

    cpu: str
    commit: str | None
    repeat: int
    products: Products
    """The best seen over the run."""
    bandwidth: float
    """Bytes/s."""
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    """ISO 8601, UTC."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number with everything needed to read it."""

    workload: str
    engine: str
    version: str
    dtype: str
    device: str
    model: str
    metric: str
    value: float
    """The median of the repeats."""
    unit: str
    min: float
    max: float
    repeat: int
    setting: Mapping[str, int]
    """The engine's best setting, where it has any."""
    ratio: Mapping[str, Mapping[str, float]]
    """Peer -> median, min and max of this engine's value over the peer's, repeat by repeat."""
    floor_share: float | None
    """Least time of the workload's arithmetic on this machine over the time taken (by `metric`'s clock); None where
    the metric is no rate."""
    floor_tokens_per_second: float | None
    """Of the arithmetic floor."""
    floors: Mapping[str, Mapping[str, float]]
    """"overlap" and "serial", memory and attention included (`floors.py`) -> tokens_per_second, share."""
    counted: Mapping[str, int]
    agreement: float
    """Share of the checked rows whose first id is the reference's, in this dtype."""
    rows_equal: float
    """Share of the checked rows that have all of the reference's ids in float32."""
    threads: int
    gemm_gflops: float
    gemm_form: str
    """What reached it."""
    bandwidth_gbytes: float
    cpu: str
    commit: str | None
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    def to_json(self) -> str:
        """One line."""
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
    bare: list[Generated] = field(default_factory=list)
    """The same rows without what makes them special, run before each pass; empty where nothing does."""
    rows_equal: float = 1.0

    def rates(self, clock: str) -> list[float]:
        """Generated tokens per second of `clock`, repeat by repeat."""
        return [p.tokens / getattr(p, clock) for p in self.passes]

    def slowdowns(self, clock: str) -> list[float]:
        """Per cent of the rate that being special costs, repeat by repeat."""
        bare = [p.tokens / getattr(p, clock) for p in self.bare]
        return [100.0 * (1.0 - mine / other) for mine, other in zip(self.rates(clock), bare, strict=True)]


_METRICS = (
    (RATE, SLOWDOWN, "tokens/s", "seconds"),
    # On a machine that does other things meanwhile, processor time says what the wall clock cannot.
    (CPU_RATE, CPU_SLOWDOWN, "tokens/CPU-s", "cpu_seconds"),
)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Spread of the quotients of measurements taken side by side."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def ours_over(rate: Figure, figures: Sequence[Figure]) -> Spread | None:
    """Our value over a peer's, repeat by repeat in the call that measured both.

    Args:
        rate: the peer's figure.
        figures: of one call or several: ours may be of another one, where the peer's says the same backwards.

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
    back = rate.ratio.get(OURS)
    return None if back is None else Spread(1 / back["median"], 1 / back["max"], 1 / back["min"])


def workload_figures(
    workload: str, model: str, measured: Sequence[Measured], work: FloorWork, context: Context
) -> list[Figure]:
    """Every engine's figures on one workload: its rates, and what its special rows cost."""
    floors = work.seconds(context.products.flops, context.bandwidth)
    figures = []
    for engine in measured:
        for metric, slowdown, unit, clock in _METRICS:
            # Processor time counts every thread's second, so its floor is that of one thread.
            threads = engine.threads if clock == "cpu_seconds" else 1
            least = {name: seconds * threads / work.output_tokens for name, seconds in floors.items()}
            figure = _rate_figure(workload, model, (metric, unit, clock), engine, measured, least, work, context)
            figures.append(figure)
            if engine.bare:
                figures.append(_slowdown(figure, slowdown, engine.slowdowns(clock)))
    return figures


def _rate_figure(
    workload: str,
    model: str,
    kind: tuple[str, str, str],
    engine: Measured,
    measured: Sequence[Measured],
    least: Mapping[str, float],
    work: FloorWork,
    context: Context,
) -> Figure:
    """One engine by one clock; `kind` is metric, unit and clock, `least` seconds per token by floor."""
    metric, unit, clock = kind
    rates = engine.rates(clock)
    spread = Spread.of(rates)
    shares = {name: {"tokens_per_second": 1 / s, "share": spread.median * s} for name, s in least.items()}
    arithmetic = shares.pop("arithmetic")
    return Figure(
        workload=workload,
        engine=engine.name,
        version=engine.version,
        dtype=engine.dtype,
        device=engine.device,
        model=model,
        metric=metric,
        value=spread.median,
        unit=unit,
        min=spread.min,
        max=spread.max,
        repeat=context.repeat,
        setting=engine.setting,
        ratio={o.name: asdict(ratios(rates, o.rates(clock))) for o in measured if o is not engine},
        floor_share=arithmetic["share"],
        floor_tokens_per_second=arithmetic["tokens_per_second"],
        floors=shares,
        counted=_counted(engine, work),
        agreement=engine.agreement,
        rows_equal=engine.rows_equal,
        threads=engine.threads,
        gemm_gflops=context.products.flops / 1e9,
        gemm_form=context.products.form,
        bandwidth_gbytes=context.bandwidth / 1e9,
        cpu=context.cpu,
        commit=context.commit,
        versions=context.versions,
        date=context.date,
    )


def _slowdown(rate: Figure, metric: str, slowdowns: Sequence[float]) -> Figure:
    """Beside a rate of special rows: by how much they are slower."""
    spread = Spread.of(slowdowns)
    return replace(
        rate,
        metric=metric,
        unit="%",
        value=spread.median,
        min=spread.min,
        max=spread.max,
        ratio={},
        floor_share=None,
        floor_tokens_per_second=None,
        floors={},
    )


def _counted(engine: Measured, work: FloorWork) -> dict[str, int]:
    return {
        "prompt_tokens": work.prompt_tokens,
        "distinct_prompt_tokens": work.distinct_prompt_tokens,
        "output_tokens": work.output_tokens,
        **engine.passes[-1].counted,
    }
