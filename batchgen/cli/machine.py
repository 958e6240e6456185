"""The commands about a machine: `init`, `doctor` and `bench`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from batchgen.bench.config import OPTIONS
from batchgen.cli.flags import gather, option_parameters
from batchgen.cli.grouped_command import GroupedCommand
from batchgen.config.units import STDIN
from batchgen.errors import DeviceError
from batchgen.request.printable import json_printable

_FROM_HELP = (
    "Compare and draw the results of earlier runs, read from their JSON lines, without measuring. "
    "Example: --from figures.jsonl"
)
_CONFIG_HELP = (
    "TOML file of workloads and options, which flags override. Example: --config configs/bench/runs/cpu-135m.toml"
)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("init", cls=GroupedCommand)(init)
    app.command("doctor", cls=GroupedCommand)(doctor)
    argument = typer.Argument(metavar="WORKLOAD", show_default=False, help=OPTIONS[0].help)
    parameters = {
        "workloads": Annotated[list[str] | None, argument],
        **{parameter.name: parameter.annotation for parameter in option_parameters(OPTIONS[1:])},
        "figures": Annotated[Path | None, _file("--from", _FROM_HELP)],
        "config": Annotated[Path | None, _file("--config", _CONFIG_HELP)],
    }
    app.command("bench", cls=GroupedCommand)(gather(bench, "options", parameters))


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


def bench(options: dict[str, Any]) -> None:
    """Benchmark workloads, alone and against other engines.

    Prints one JSON line per result, with shares of the machine's floor.
    Greedy token ids are compared first; an engine that generates other ids has no results. The exit code is 1 if
    batchgen or every peer that ran fails. Peers that do not support a field of a workload are not run.

    Example: batchgen bench shared-prefix --peers transformers --repeat 5 > figures.jsonl
    """
    from batchgen.bench.command import run_given  # not needed by --help
    from batchgen.job.display.console import SafeConsole

    figures, config = options.pop("figures"), options.pop("config")
    run_given(options, figures, config, typer.echo, SafeConsole(stderr=True))


def _file(flag: str, text: str) -> Any:
    return typer.Option(flag, metavar="FILE", show_default=False, help=text, rich_help_panel="Options")
