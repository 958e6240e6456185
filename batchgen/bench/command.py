"""Execution of `batchgen bench`. Imports torch only if engines run."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console

from batchgen.bench.config import ENGINELESS_WORKLOADS, OPTIONS, BenchConfig, bench_config
from batchgen.bench.figures import parse_figures, read_figures
from batchgen.bench.process import parse_peers
from batchgen.bench.show import check_chart, draw_stored, print_others, write_chart
from batchgen.errors import BatchgenError, Interrupted, UsageError

_WITHOUT_ENGINES: Final = ("workloads", "repeat", "plan_size", "chart")
"""Options that have an effect on workloads without engines."""
_OF_EMBED: Final = ("model", "peers", "dtype", "cpu_threads")
"""Options that have an effect on workload embed, too."""


def run_given(
    options: Mapping[str, Any], figures: Path | None, file: Path | None, emit: Callable[[str], None], console: Console
) -> None:
    """Run the options of a command line, or print and draw the figures of an earlier run.

    Args:
        options: field of `BenchConfig` -> its value; None or empty if it is not given.
        figures: file of the earlier run; only `chart` may be given with it.
        file: TOML file of options.
        emit: called with one JSON line per figure.
        console: stderr, for messages and tables.

    Raises:
        BatchgenError: as `run_command`, `draw_stored` and `bench_config`.
    """
    chosen = {name: value for name, value in options.items() if value is not None and value != []}
    if figures is not None and (file is not None or chosen.keys() - {"chart"}):
        raise UsageError(
            "--from draws the results in a file; it can be combined with --chart only, remove the other arguments"
        )
    config = bench_config(chosen, file)
    if figures is None:
        run_command(config, emit, console)
    else:
        draw_stored(figures, config.chart, console)


def run_command(config: BenchConfig, emit: Callable[[str], None], console: Console, start: Any = None) -> None:
    """Run the workloads of `config` and draw the chart; for the arguments see `run_given` and `run_bench`.

    Raises:
        BatchgenError: as `run_bench`, or a command that is measured fails; the chart cannot be drawn; or SIGTERM.
    """
    compared = tuple(name for name in config.workloads if name not in ENGINELESS_WORKLOADS)
    engines = bool(compared) or not config.workloads
    if config.chart is not None:
        check_chart(config.chart, bars=engines)
    _reject_unused_options(config, engines=engines)
    if compared:
        from batchgen.bench.workloads import find_workloads  # imports a tokenizer, which --from does not need

        find_workloads(compared)  # report a wrong name before measuring for minutes
    if engines and len(compared) < len(config.workloads):
        parse_peers(config.peers)
    if config.tuned is not None:
        read_figures(config.tuned, "--tuned")
    lines: list[str] = []

    def keep(line: str) -> None:
        lines.append(line)
        emit(line)

    ended = False
    try:
        with _interrupt_on_signals():
            for values in _engineless_lines(config):
                keep(json.dumps(values, ensure_ascii=False))
            print_others([json.loads(line) for line in lines], console)
            if engines:
                from batchgen.bench.run import run_bench  # imports torch, which the workloads above do not need

                run_bench(replace(config, workloads=compared), keep, console, start)
        ended = True
    finally:
        if config.chart is not None and lines:
            with nullcontext() if ended else suppress(BatchgenError):  # report the error that ended the run instead
                write_chart(config.chart, parse_figures("\n".join(lines), "figures of this run"))


def _engineless_lines(config: BenchConfig) -> Iterator[dict[str, Any]]:
    """JSON lines of the workloads on which no engines are compared."""
    if "plan" in config.workloads:
        from batchgen.bench.jobs.planning import PlanSize, plan_lines

        yield from plan_lines(PlanSize.parse(config.plan_size))
    if "startup" in config.workloads:
        from batchgen.bench.jobs.commands import startup_lines

        yield from startup_lines(config.repeat)
    if "job" in config.workloads:
        from batchgen.bench.jobs.commands import job_lines

        yield from job_lines(config.repeat)
    if "ids" in config.workloads:
        from batchgen.bench.jobs.commands import ids_lines

        yield from ids_lines(config.repeat)
    if "embed" in config.workloads:
        from batchgen.bench.jobs.embed import embed_lines

        yield from embed_lines(config)
    if "eta" in config.workloads:
        from batchgen.bench.jobs.eta import eta_lines

        yield from eta_lines(config.repeat)
    if "forecast" in config.workloads:
        from batchgen.bench.jobs.forecast import forecast_lines

        yield from forecast_lines()


def _reject_unused_options(config: BenchConfig, *, engines: bool) -> None:
    """Reject options that none of the workloads use.

    Raises:
        UsageError: such an option has a value other than its default.
    """
    used = (*_WITHOUT_ENGINES, *(_OF_EMBED if "embed" in config.workloads else ()))
    idle = [option for option in OPTIONS if not engines and option.name not in used]
    unused = {option.flag: (option.name, ", which run no engines") for option in idle}
    if "plan" not in config.workloads:
        unused["--plan-size"] = "plan_size", "; only workload plan uses it"
    elif set(config.workloads) == {"plan"}:
        unused["--repeat"] = "repeat", ", which is measured once"
    default = BenchConfig()
    for flag, (name, reason) in unused.items():
        if getattr(config, name) not in (getattr(default, name), "none"):
            measured = " and ".join(config.workloads) or "the default workloads"
            raise UsageError(f"{flag} has no effect on {measured}{reason}; leave it out")


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Raise an error at SIGTERM and SIGHUP, so that the run ends its processes and removes its temporary files.

    Raises:
        Interrupted: at the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ended: list[Interrupted] = []

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        ended.append(Interrupted(f"ended by {name}; the figures printed so far are valid", 128 + number))
        raise ended[0]

    ends = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in ends}
    try:
        yield
        if ended:  # raised where errors are ignored, as in a finalizer
            raise ended[0]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
