"""What `batchgen bench` does with its configuration. Torch is imported only where engines run."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any, Final

from rich.console import Console

from batchgen.errors import BatchgenError, Interrupted, UsageError
from batchgen.job.bench.chart import check_chart, draw_stored, write_chart
from batchgen.job.bench.config import ALONE, BenchConfig, bench_config
from batchgen.job.bench.peers import parse_peers
from batchgen.job.bench.stored import parse_figures, read_figures
from batchgen.job.bench.table import print_others

__all__ = ["bench_config", "draw_stored", "run_command"]

_OF_ENGINES: Final = {
    "--model": "model",
    "--peers": "peers",
    "--dtype": "dtype",
    "--peer-dtype": "peer_dtype",
    "--device": "device",
    "--cpu-threads": "threads",
    "--timeout": "timeout",
    "--tuned": "tuned",
}
"""Flags that say which engines run, and how -> fields of `BenchConfig`."""


def run_command(config: BenchConfig, emit: Callable[[str], None], console: Console, start: Any = None) -> None:
    """Measure what is asked for, and draw it.

    Args:
        config: what to measure.
        emit: takes a JSON line per figure.
        console: for remarks and tables.
        start: starts engines, as `run_bench` has it.

    Raises:
        BatchgenError: as `run_bench`, `run_plan_bench`, `run_startup_bench` and `run_job_bench`; the chart cannot be
            drawn; SIGTERM.
    """
    compared = tuple(name for name in config.workloads if name not in ALONE)
    engines = bool(compared) or not config.workloads
    if config.chart is not None:
        check_chart(config.chart, bars=engines)
    _refuse_idle_options(config, engines=engines)
    if compared:
        from batchgen.job.bench.definitions import find_workloads  # a tokenizer, which --from need not wait for

        find_workloads(compared)  # a wrong name is told before another workload takes its minutes
    if engines and len(compared) < len(config.workloads):
        parse_peers(config.peers)
    if config.tuned is not None:
        read_figures(config.tuned, "--tuned")
    lines: list[str] = []

    def keep(line: str) -> None:
        lines.append(line)
        emit(line)

    def draw() -> None:
        if config.chart is not None and lines:
            write_chart(config.chart, parse_figures("\n".join(lines), "figures of this run"))

    try:
        with _ended_by_signal():
            if "plan" in config.workloads:
                from batchgen.job.bench.planning import PlanSize, run_plan_bench

                run_plan_bench(PlanSize.parse(config.plan_size), keep)
            if "startup" in config.workloads:
                from batchgen.job.bench.startup import run_startup_bench

                run_startup_bench(config.repeat, keep)
            if "job" in config.workloads:
                from batchgen.job.bench.rows_cost import run_job_bench

                run_job_bench(config.repeat, keep)
            print_others([json.loads(line) for line in lines], console)
            if engines:
                from batchgen.job.bench.run import run_bench  # torch: seconds that the others need not pay

                run_bench(replace(config, workloads=compared), keep, console, start)
    except BaseException:
        with suppress(BatchgenError):  # what ended the run is told, not what became of its chart
            draw()
        raise
    draw()


def _refuse_idle_options(config: BenchConfig, *, engines: bool) -> None:
    """What is said of engines has no meaning where none are compared, and the planner is measured once."""
    idle = {} if engines else {flag: (name, ", which run no peers") for flag, name in _OF_ENGINES.items()}
    if "plan" not in config.workloads:
        idle["--plan-size"] = "plan_size", "; it is of the workload plan"
    elif set(config.workloads) == {"plan"}:
        idle["--repeat"] = "repeat", ", which is measured once"
    default = BenchConfig()
    for flag, (name, reason) in idle.items():
        if getattr(config, name) not in (getattr(default, name), "none"):
            measured = " and ".join(config.workloads) or "the default workloads"
            raise UsageError(f"{flag} has no meaning for {measured}{reason}; leave it out")


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Let SIGTERM end a run as an error does: its processes and its files of token ids go with it.

    Raises:
        Interrupted: at the signal.
    """
    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted("ended by SIGTERM; the figures printed so far stand", 128 + number)

    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
