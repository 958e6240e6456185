"""`batchgen run`."""

from __future__ import annotations

import typer

from batchgen.cli.flags import GroupedCommand, with_options
from batchgen.config import RunConfig

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("run", cls=GroupedCommand, no_args_is_help=True)(with_options(run))


def run(config: RunConfig) -> None:
    """Generate: files of prompts in, one Parquet file of results out. Resumes where an earlier run stopped.

    Options can also stand in BATCHGEN_* variables (BATCHGEN_MAX_NUM_SEQS=64) and TOML files (max_num_seqs = 64);
    flags win over variables, those over --config, that over ./batchgen.toml.

    Example: batchgen run prompts.jsonl -o results.parquet --model ./Qwen3-0.6B --temperature 0.7
    """
    from batchgen.arrow_memory import system_memory

    with system_memory():
        from batchgen.job.preflight import refuse_early

    refuse_early(config)
    if config.dry_run:
        from batchgen.job.check import check_job

        raise typer.Exit(check_job(config, as_json=False))
    from batchgen.engine.collector import QuietCollector
    from batchgen.job.signals import StopRequest, handle_signals
    from batchgen.openmp import brief_waits

    stop = StopRequest(config.max_time)
    with handle_signals(stop):  # told to stop while it imports, a job ends as at any other time
        # What modules make stays: looking through it time and again takes a tenth of the imports.
        with brief_waits(), QuietCollector():
            from batchgen.job.run import run_job  # torch: seconds that --help and a refusal must not pay
        summary = run_job(config, stop)
    from batchgen.job.summary import print_summary, write_report

    print_summary(summary)
    if config.report:
        write_report(summary, config.report)
