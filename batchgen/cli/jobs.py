"""The commands `run` and `check`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchgen.cli.flags import with_options
from batchgen.cli.grouped_command import GroupedCommand
from batchgen.config.run_config import RunConfig
from batchgen.config.units import STDIN

if TYPE_CHECKING:
    from batchgen.job.preflight import CheckedJob


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("run", cls=GroupedCommand, no_args_is_help=True)(with_options(run))
    app.command("check", cls=GroupedCommand, no_args_is_help=True)(with_options(check))
    app.command("plan", cls=GroupedCommand, no_args_is_help=True)(with_options(plan))


def run(config: RunConfig) -> None:
    """Run a job: files of prompts in, one Parquet file out.

    A run that was interrupted continues.

    Options can also be set by BATCHGEN_* variables (BATCHGEN_MAX_NUM_SEQS=64) and TOML files (max_num_seqs = 64).
    Flags override variables, variables override --config, and --config overrides ./batchgen.toml.

    Example: batchgen run prompts.jsonl -o results.parquet --model ./Qwen3-0.6B --temperature 0.7
    """
    from batchgen.job.stdout import stdout_of

    with stdout_of(config) as made:
        job = _preflight(made)
        if config.dry_run:
            raise typer.Exit(_check(job, as_json=False))
        _run(job, str(config.output))


def check(
    config: RunConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout. Example: --json")] = False,
) -> None:
    """Check every row of an input and print the plan.

    Nothing is computed or written. Has the options of `run`.

    Example: batchgen check prompts.jsonl --model ./Qwen3-0.6B
    """
    raise typer.Exit(_check(_preflight(config), as_json=as_json))


def plan(
    config: RunConfig,
    machine: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Kind of device: a TOML file (batchgen help planning), or the report of a run on one "
            "(run --report FILE.json). Example: --machine h100.toml",
        ),
    ],
    devices: Annotated[
        str,
        typer.Option(
            metavar="N,...", help="Numbers of devices, 1 to 1,000, separated by commas. Example: --devices 1,8,64"
        ),
    ] = "1,2,4,8,16,32,64,128,256,512,1000",
    output_tokens: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            metavar="MEAN",
            help="Mean tokens of answers that may end before their limit; default: as in the report of --machine. "
            "Example: --output-tokens 250",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout. Example: --json")] = False,
) -> None:
    """Predict time and cost of a job on 1 to 1,000 devices of a described kind, and what limits it.

    Nothing is computed or written. Has the options of `run`.

    Example: batchgen plan prompts.jsonl --model ./Qwen3-0.6B --machine h100.toml
    """
    from batchgen.job.display.progress import ProgressState, make_progress

    with make_progress(config.progress) as progress:
        progress.update(ProgressState("starting"))
        from batchgen.job.scale.forecast import for_machine, forecast_job, numbers_of  # imports torch, which is slow
        from batchgen.job.scale.machine import read_machine

        described = read_machine(machine)
        job = _preflight(for_machine(config, described))
        counts = numbers_of(devices)
        raise typer.Exit(forecast_job(job, described, counts, output_tokens, progress, as_json=as_json))


def _preflight(config: RunConfig) -> CheckedJob:
    from batchgen.library_settings import arrow_system_memory

    with arrow_system_memory():
        from batchgen.job.preflight import preflight

    return preflight(config)


def _check(job: CheckedJob, as_json: bool) -> int:
    from batchgen.job.display.progress import ProgressState, make_progress

    with make_progress(job.config.progress) as progress:
        progress.update(ProgressState("starting"))
        from batchgen.job.check import check_job  # imports torch, which is slow

        return check_job(job, progress, as_json=as_json)


def _run(job: CheckedJob, output: str) -> None:
    """Run a job. `output`: what the user names as its output."""
    from batchgen.engine.memory.gc_control import DeferredGC
    from batchgen.job.display.progress import ProgressState, make_progress
    from batchgen.job.finished import OpenedCommand
    from batchgen.job.signals import StopRequest, handle_signals
    from batchgen.library_settings import short_openmp_spins

    began, stop = time.monotonic(), StopRequest(job.config.max_time)
    # A signal during the imports stops the job as usual, and the display is open while they take their seconds.
    with handle_signals(stop), make_progress(job.config.progress) as progress:
        progress.update(ProgressState("starting"))
        command = OpenedCommand.of(job)
        summary = command.finished(progress.note, stop)
        if summary is None:
            # Objects created by imports live on, so collecting garbage meanwhile only slows them down.
            command.start_helpers()
            with short_openmp_spins(), DeferredGC() as collector:
                from batchgen.job.run import run_job  # imports torch, which is slow

                collector.freeze_all()  # they are old from now on, so that the next collection passes over them
            summary = run_job(command, stop, progress, began)
    from batchgen.job.summary import print_summary, write_report

    if output == STDIN:
        summary = replace(summary, output=output)
    print_summary(summary)
    if job.config.report:
        write_report(summary.to_json(), job.config.report, overwrite=job.config.existing == "overwrite")
