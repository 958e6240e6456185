"""Command line flags of a job, made from the option table."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from batchgen.config import resolve_config
from batchgen.errors import UsageError
from batchgen.option_kinds import BOOL, Option
from batchgen.options import GROUPS, OPTIONS

__all__ = ["GroupedCommand", "with_options"]

_INPUT_HELP = (
    "JSONL (also .gz, .zst), Parquet or .txt files, globs, or - for stdin: one input, in this order. "
    "Example: prompts.jsonl"
)


class GroupedCommand(TyperCommand):
    """A command whose help lists its options under the table's groups, whole at any width."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then the options of each group."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{group: [] for group in GROUPS}, "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels[getattr(parameter, "rich_help_panel", None) or kind].append(record)
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(config, ...)` a flag for each option, and call it with the resolved `batchgen.config.RunConfig`.

    Typer reads a function's signature, so the wrapper gets one made from the table; parameters of `command` other than
    `config` stay its own.
    """
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "config"]

    @wraps(command)
    def wrapper(**values: Any) -> None:
        extra = {parameter.name: values.pop(parameter.name) for parameter in own}
        command(resolve_config(_given(values), os.environ, Path.cwd()), **extra)

    inputs = _parameter("inputs", list[str], typer.Argument(metavar="INPUT", help=_INPUT_HELP))
    made = [parameter for option in OPTIONS for parameter in _parameters(option)]
    parameters = [inputs, *(p.replace(kind=p.KEYWORD_ONLY) for p in (*made, *own))]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapper.__wrapped__
    return wrapper


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line gave, by option name; the flags of a switch are folded into its option."""
    given: dict[str, Any] = {"inputs": tuple(values["inputs"])}
    for option in OPTIONS:
        if option.switches:
            chosen = [choice for choice in option.choices if values[_switch_name(option, choice)]]
            if len(chosen) > 1:
                raise UsageError(f"`--{chosen[0]}` and `--{chosen[1]}` exclude each other")
            given |= {option.name: chosen[0]} if chosen else {}
        elif values[option.name] not in (None, [], ()):
            given[option.name] = values[option.name]
    return given


def _parameters(option: Option) -> list[inspect.Parameter]:
    """One keyword parameter for an option; one for each flag of a switch."""
    if option.switches:
        return [
            _parameter(_switch_name(option, choice), bool, _info(option, (f"--{choice}",), text, None), False)
            for choice, text in zip(option.choices, option.help.split("\n"), strict=True)
        ]
    if option.kind is BOOL:
        info = _info(option, (f"{option.flag}/{option.negative}",), option.help, None)
        return [_parameter(option.name, bool | None, info, None)]
    value_type = list[str] | None if option.repeat else str | None
    info = _info(option, option.flags, _help(option), option.metavar)
    return [_parameter(option.name, value_type, info, None)]


def _info(option: Option, names: tuple[str, ...], text: str, metavar: str | None) -> Any:
    # Options that are not built stay known to the parser, so that they are refused by name.
    return typer.Option(
        *names, metavar=metavar, help=text, hidden=not option.built, rich_help_panel=option.group, show_default=False
    )


def _switch_name(option: Option, choice: str) -> str:
    return f"{option.name}_{choice.replace('-', '_')}"


def _help(option: Option) -> str:
    """The option's help with its default put before the example."""
    default = _shown_default(option)
    if default is None:
        return option.help
    text, example, rest = option.help.partition("Example: ")
    return f"{text}Default: {default}. {example}{rest}"


def _shown_default(option: Option) -> str | None:
    if option.default is None or option.default == () or option.kind is BOOL or option.switches:
        return None
    if option.name == "max_errors":
        return None  # the help says it in words
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def _parameter(name: str, value_type: Any, info: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        annotation=Annotated[value_type, info],
        default=default,
    )
