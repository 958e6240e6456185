"""Command line flags that are declared as data: those of `run` and `check` come from the option table."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from batchgen.config.engine_config import INPUT
from batchgen.config.option_types import BOOL, Option
from batchgen.config.resolve import resolve_config
from batchgen.config.run_config import OPTIONS
from batchgen.errors import UsageError
from batchgen.request.fields.other_systems import FLAGS_OF_OTHERS


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line with the flags of other systems as those here, and a line about each."""
    words: list[str] = []
    notes: dict[str, None] = {}
    for place, word in enumerate(arguments):
        if word == "--":
            return [*words, *arguments[place:]], list(notes)
        flag, equals, value = word.partition("=")
        own = FLAGS_OF_OTHERS.get(flag, flag)
        if own != flag:
            notes[f"{flag} is read as {own}"] = None
        words.append(own + equals + value)
    return words, list(notes)


_INPUT_HELP = (
    "Input files in order: JSONL, JSON, CSV, TSV or .txt (also .gz, .zst), Parquet, folders, glob patterns, or - for "
    "stdin. Example: prompts.jsonl"
)
_INPUT_OPTION_HELP = "Input file, as INPUT; repeatable, and after all INPUTs in order. Example: -i prompts.jsonl"


def gather(command: Callable[..., None], into: str, options: Mapping[str, Any]) -> Callable[..., None]:
    """Replace the parameter `into` of `command` by options, whose values it then receives as a dict by name.

    Typer reads a function's signature, so the wrapper gets a signature in which the command's other parameters come
    first.

    Args:
        command: the function of a command.
        into: name of the parameter.
        options: name of each option -> its annotation; None is the default of all.
    """
    made = [_parameter(name, annotation, default=None) for name, annotation in options.items()]
    return _gathered(command, into, [], made, dict)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag for each option of the option table to `command(config, ...)`, called with the resolved `RunConfig`.

    Parameters of `command` other than `config` are kept.
    """
    inputs = _parameter(
        "inputs",
        Annotated[list[str] | None, typer.Argument(metavar="INPUT...", help=_INPUT_HELP, show_default=False)],
        None,
    )
    input_files = _parameter(
        "input_file",
        Annotated[
            list[str] | None,
            typer.Option(
                "--input-file",
                "-i",
                metavar="INPUT",
                help=_INPUT_OPTION_HELP,
                rich_help_panel=INPUT.title,
                show_default=False,
            ),
        ],
        None,
    )
    return _gathered(
        command,
        "config",
        [inputs, input_files, *option_parameters(OPTIONS)],
        [],
        lambda values: resolve_config(_given(values), os.environ, Path.cwd()),
    )


@cache
def option_parameters(options: Sequence[Option]) -> list[inspect.Parameter]:
    """The keyword parameters of options, from which Typer makes their flags."""
    return [parameter for option in options for parameter in _parameters(option)]


def _gathered(
    command: Callable[..., None],
    into: str,
    before: Sequence[inspect.Parameter],
    after: Sequence[inspect.Parameter],
    convert: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """`command` with parameters in place of `into`, before and after the others; `convert` makes its value of them."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != into]

    @wraps(command)
    def wrapper(**values: Any) -> None:
        kept = {parameter.name: values.pop(parameter.name) for parameter in own}
        command(**kept, **{into: convert(values)})

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*before, *own, *after)]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapper.__wrapped__
    return wrapper


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options set on the command line; the flags of a choice become the value of its option."""
    options: dict[str, Any] = {"inputs": (*(values["inputs"] or ()), *(values["input_file"] or ()))}
    for option in OPTIONS:
        if option.choice_flags:
            chosen = [choice for choice in option.choices if values[_switch_name(option, choice)]]
            if len(chosen) > 1:
                raise UsageError(f"`--{chosen[0]}` and `--{chosen[1]}` cannot be combined; keep one of them")
            options |= {option.name: chosen[0]} if chosen else {}
        elif values[option.name] not in (None, [], ()):
            options[option.name] = values[option.name]
    return options


def _parameters(option: Option) -> list[inspect.Parameter]:
    """Keyword parameters of an option: one, or one for each flag of a choice."""
    if option.choice_flags:
        return [
            _parameter(
                _switch_name(option, choice), Annotated[bool, _info(option, (f"--{choice}",), text, None)], False
            )
            for choice, text in zip(option.choices, option.help.split("\n"), strict=True)
        ]
    if option.value_type is BOOL:
        info = _info(option, (f"{option.flag}/{option.negative}",), option.help, None)
        return [_parameter(option.name, Annotated[bool | None, info], None)]
    value_type = list[str] | None if option.repeat else str | None
    info = _info(option, option.flags, _help(option), option.metavar)
    return [_parameter(option.name, Annotated[value_type, info], None)]


def _info(option: Option, names: tuple[str, ...], text: str, metavar: str | None) -> Any:
    return typer.Option(
        *names,
        metavar=metavar,
        help=text,
        rich_help_panel=option.group,
        show_default=False,
        autocompletion=completer(option.choices) if option.choices and metavar else None,
    )


def completer(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Completion of a value in the shell by one of the words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def _switch_name(option: Option, choice: str) -> str:
    return f"{option.name}_{choice.replace('-', '_')}"


def _help(option: Option) -> str:
    """Help text of an option with its default inserted before the example."""
    default = _shown_default(option)
    if default is None:
        return option.help
    text, example, rest = option.help.partition("Example: ")
    return f"{text}Default: {default}. {example}{rest}"


def _shown_default(option: Option) -> str | None:
    if option.default is None or option.default == () or option.value_type is BOOL or option.choice_flags:
        return None
    if option.name == "max_errors":
        return None  # the help text describes it
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
