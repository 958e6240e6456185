"""The commands `init` and `doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from batchgen.cli.grouped_command import GroupedCommand
from batchgen.config.units import STDIN
from batchgen.errors import DeviceError
from batchgen.request.printable import json_printable


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("init", cls=GroupedCommand)(init)
    app.command("doctor", cls=GroupedCommand)(doctor)


def init() -> None:
    """Write a batchgen.toml with every option, commented out, to the current folder.

    A file of that name is kept.

    Example: batchgen init
    """
    from batchgen.config.example_file import write_example  # not needed by --help

    typer.echo(f"{write_example(Path.cwd()).name} is written: remove the # before an option to set it")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout. Example: --json")] = False,
) -> None:
    """Look at this machine: can jobs run here, on what, how fast, and what is missing.

    Runs a small job with the demonstration model, and measures. Exit code 0: jobs can run; 7: they cannot.

    Example: batchgen doctor
    """
    from batchgen.bench.doctor import examine, figures  # imports torch, which is slow
    from batchgen.job.display.console import SafeConsole
    from batchgen.job.display.figures import print_figures
    from batchgen.job.summary import write_report

    report = examine()
    if as_json:
        write_report(json_printable(json.dumps(asdict(report), indent=2, ensure_ascii=False)), STDIN)
    else:
        print_figures(figures(report), SafeConsole())
    if not report.ready:
        raise typer.Exit(DeviceError.exit_code)
