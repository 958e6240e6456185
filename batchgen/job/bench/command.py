"""What `batchgen bench` does with its configuration. Torch is imported only where engines run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from rich.console import Console

from batchgen.job.bench.chart import check_chart, draw_stored, write_chart
from batchgen.job.bench.config import BenchConfig, bench_config
from batchgen.job.bench.stored import parse_figures

__all__ = ["bench_config", "draw_stored", "run_command"]

_ALONE: Final = ("plan", "startup")
"""Workloads on which no engines are compared."""


def run_command(config: BenchConfig, emit: Callable[[str], None], console: Console, start: Any = None) -> None:
    """Measure what is asked for, and draw it.

    Args:
        config: what to measure.
        emit: takes a JSON line per figure.
        console: for remarks and tables.
        start: starts engines, as `run_bench` has it.

    Raises:
        BatchgenError: as `run_bench`, `run_plan_bench` and `run_startup_bench`; the chart cannot be drawn.
    """
    if config.chart is not None:
        check_chart(config.chart)
    lines: list[str] = []

    def keep(line: str) -> None:
        lines.append(line)
        emit(line)

    if "plan" in config.workloads:
        from batchgen.job.bench.planning import PlanSize, run_plan_bench

        run_plan_bench(PlanSize.parse(config.plan_size), keep)
    if "startup" in config.workloads:
        from batchgen.job.bench.startup import run_startup_bench

        run_startup_bench(config.repeat, keep)
    compared = tuple(name for name in config.workloads if name not in _ALONE)
    if compared or not config.workloads:
        from batchgen.job.bench.run import run_bench  # torch: seconds that the others need not pay

        run_bench(replace(config, workloads=compared), keep, console, start)
    if config.chart is not None:
        found = parse_figures("\n".join(lines), "figures of this run")
        write_chart(config.chart, found)
