"""The command `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from batchgen.bench.config import OPTIONS
from batchgen.cli.flags import gather, option_parameters
from batchgen.cli.grouped_command import GroupedCommand

_FROM_HELP = (
    "Compare and draw the results of earlier runs, read from their JSON lines, without measuring. "
    "Example: --from figures.jsonl"
)
_CONFIG_HELP = (
    "TOML file of workloads and options, which flags override. Example: --config configs/bench/runs/cpu-135m.toml"
)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    argument = typer.Argument(metavar="WORKLOAD", show_default=False, help=OPTIONS[0].help)
    parameters = {
        "workloads": Annotated[list[str] | None, argument],
        **{parameter.name: parameter.annotation for parameter in option_parameters(OPTIONS[1:])},
        "figures": Annotated[Path | None, _file("--from", _FROM_HELP)],
        "config": Annotated[Path | None, _file("--config", _CONFIG_HELP)],
    }
    app.command("bench", cls=GroupedCommand)(gather(bench, "options", parameters))


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
