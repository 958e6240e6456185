"""The command `bench`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from batchgen.bench.config import OPTIONS, WORKLOADS_HELP
from batchgen.cli.flags import GroupedCommand

_FROM_HELP = (
    "Compare and draw the results of earlier runs, read from their JSON lines, without measuring. "
    "Example: --from figures.jsonl"
)
_CONFIG_HELP = (
    "TOML file of workloads and options, which flags override. Example: --config configs/bench/runs/cpu-135m.toml"
)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("bench", cls=GroupedCommand)(bench)


def bench(**given: Any) -> None:
    """Benchmark workloads, alone and against other engines.

    Prints one JSON line per result, with shares of the machine's floor.
    Greedy token ids are compared first; an engine that generates other ids has no results. The exit code is 1 if
    batchgen or every peer that ran fails. Peers that do not support a field of a workload are not run.

    Example: batchgen bench shared-prefix --peers transformers --repeat 5 > figures.jsonl
    """
    from batchgen.bench.command import run_given  # not needed by --help
    from batchgen.job.console import SafeConsole

    figures, config = given.pop("figures"), given.pop("config")
    run_given(given, figures, config, typer.echo, SafeConsole(stderr=True))


def _parameters() -> list[inspect.Parameter]:
    """Parameters of the command, from which Typer makes its flags."""
    workloads = typer.Argument(metavar="WORKLOAD", show_default=False, help=WORKLOADS_HELP)
    made = [_parameter("workloads", list[str], workloads)]
    for option in OPTIONS:
        if option.name == "timeout":
            made.append(_parameter("figures", Path, _option("--from", "FILE", _FROM_HELP)))
        flag = _option(option.flag, option.metavar, option.help, option.minimum)
        made.append(_parameter(option.name, option.value_type, flag))
    return [*made, _parameter("config", Path, _option("--config", "FILE", _CONFIG_HELP))]


def _option(flag: str, metavar: str, text: str, minimum: int | None = None) -> Any:
    return typer.Option(flag, min=minimum, metavar=metavar, show_default=False, help=text)


def _parameter(name: str, value_type: Any, info: Any) -> inspect.Parameter:
    annotation = Annotated[value_type | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_PARAMETERS = _parameters()
bench.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
bench.__annotations__ = {parameter.name: parameter.annotation for parameter in _PARAMETERS}
