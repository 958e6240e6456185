"""Figures: medians with their spread, ratios of interleaved pairs, shares of the floor; one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from batchgen.job.bench.floors import FloorWork
from batchgen.job.bench.process import Generated

__all__ = ["Context", "Figure", "Measured", "Spread", "ratios", "workload_figures"]


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
    gemm_flops: float
    """Best rate seen over the run, FLOP/s."""
    bandwidth: float
    """Bytes/s."""


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
    floor_share: float
    """Least time of the workload on this machine over the time taken (by `metric`'s clock)."""
    floor_tokens_per_second: float
    counted: Mapping[str, int]
    agreement: float
    """Share of the checked ids that equal the reference's, in this dtype."""
    threads: int
    gemm_gflops: float
    bandwidth_gbytes: float
    cpu: str
    commit: str | None

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

    def rates(self, clock: str) -> list[float]:
        """Generated tokens per second of `clock`, repeat by repeat."""
        return [p.tokens / getattr(p, clock) for p in self.passes]


_METRICS = (
    ("output_tokens_per_second", "tokens/s", "seconds"),
    # On a machine that does other things meanwhile, processor time says what the wall clock cannot.
    ("output_tokens_per_cpu_second", "tokens/CPU-s", "cpu_seconds"),
)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Spread of the quotients of measurements taken side by side."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def workload_figures(
    workload: str, model: str, measured: Sequence[Measured], work: FloorWork, context: Context
) -> list[Figure]:
    """Every engine's figures on one workload."""
    figures = []
    for engine in measured:
        for metric, unit, clock in _METRICS:
            rates = engine.rates(clock)
            spread = Spread.of(rates)
            # Processor time counts every thread's second, so its floor is that of one thread.
            threads = engine.threads if clock == "cpu_seconds" else 1
            floor_rate = work.output_tokens / (work.seconds(context.gemm_flops) * threads)
            others = [other for other in measured if other is not engine]
            figures.append(
                Figure(
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
                    ratio={other.name: asdict(ratios(rates, other.rates(clock))) for other in others},
                    floor_share=spread.median / floor_rate,
                    floor_tokens_per_second=floor_rate,
                    counted=_counted(engine, work),
                    agreement=engine.agreement,
                    threads=engine.threads,
                    gemm_gflops=context.gemm_flops / 1e9,
                    bandwidth_gbytes=context.bandwidth / 1e9,
                    cpu=context.cpu,
                    commit=context.commit,
                )
            )
    return figures


def _counted(engine: Measured, work: FloorWork) -> dict[str, int]:
    return {
        "prompt_tokens": work.prompt_tokens,
        "distinct_prompt_tokens": work.distinct_prompt_tokens,
        "output_tokens": work.output_tokens,
        **engine.passes[-1].counted,
    }
