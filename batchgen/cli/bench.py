"""The command `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from batchgen.bench.config import OPTIONS, WORKLOADS_HELP
from batchgen.cli.flags import GroupedCommand, gather

_FROM_HELP = (
    "Compare and draw the results of earlier runs, read from their JSON lines, without measuring. "
    "Example: --from figures.jsonl"
)
_CONFIG_HELP = (
    "TOML file of workloads and options, which flags override. Example: --config configs/bench/runs/cpu-135m.toml"
)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("bench", cls=GroupedCommand)(gather(bench, "options", _parameters()))


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


def _parameters() -> dict[str, Any]:
    """Name of each parameter -> its annotation, from which Typer makes its flag."""
    workloads = typer.Argument(metavar="WORKLOAD", show_default=False, help=WORKLOADS_HELP)
    parameters: dict[str, Any] = {"workloads": Annotated[list[str] | None, workloads]}
    for option in OPTIONS:
        if option.name == "timeout":
            parameters["figures"] = Annotated[Path | None, _option("--from", "FILE", _FROM_HELP)]
        flag = _option(option.flag, option.metavar, option.help, option.minimum)
        parameters[option.name] = Annotated[option.value_type | None, flag]
    return {**parameters, "config": Annotated[Path | None, _option("--config", "FILE", _CONFIG_HELP)]}


def _option(flag: str, metavar: str, text: str, minimum: int | None = None) -> Any:
    return typer.Option(flag, min=minimum, metavar=metavar, show_default=False, help=text)
