"""The command line reference as a page, made from the commands: `python -m batchgen.cli.reference`."""

from __future__ import annotations

import inspect
from typing import Any, Final

import typer
from typer.main import get_command

from batchgen.cli.app import app, command_names
from batchgen.config.run_config import GROUPS

_INTRO: Final = """# Command line reference

Every command with its arguments and options, generated from the program.

Options of `run` and `check` can also be set by environment variables and TOML files: see
[configuration](configuration.md). `batchgen COMMAND --help` prints the same texts.
"""
_EXIT_CODES: Final = """
Exit codes are listed under [stopping and resuming](resume.md).
"""


def reference() -> str:
    """The page: a section for each command; `check` lists only what `run` does not have."""
    context = typer.Context(get_command(app), info_name="batchgen")
    commands = {name: context.command.get_command(context, name) for name in command_names()}  # type: ignore[attr-defined]
    of_run = {parameter.name for parameter in commands["run"].params}
    sections = [_section(name, command, of_run if name == "check" else set()) for name, command in commands.items()]
    return _INTRO + _EXIT_CODES + "\n" + "\n".join(sections)


def _section(name: str, command: Any, known: set[str | None]) -> str:
    """One command: what it does, then its parameters by group, without those that are `known`."""
    groups: dict[str, list[str]] = {}
    for parameter in command.params:
        if parameter.name not in known and not getattr(parameter, "hidden", False) and parameter.name != "help":
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(_entry(parameter))
    arguments = " ".join(_metavar(p) for p in command.params if p.param_type_name == "argument")
    text = f"## batchgen {name}\n\n```text\nbatchgen {name} [OPTIONS] {arguments}".rstrip() + "\n```\n\n"
    text += inspect.cleandoc(command.help or "") + "\n"
    if known:
        text += "\nArguments and all other options are those of [`run`](#batchgen-run).\n"
    order = ["Arguments", *GROUPS, *groups]
    for title, entries in sorted(groups.items(), key=lambda group: order.index(group[0])):
        text += f"\n### {title}\n\n" if name == "run" else "\n"
        text += "\n".join(entries) + "\n"
    return text


def _entry(parameter: Any) -> str:
    """One list item: the spellings, the value, the help."""
    if parameter.param_type_name == "argument":
        spelled = _metavar(parameter)
    else:
        spelled = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if not parameter.is_flag:
            spelled += f" {_metavar(parameter)}"
    return f"- `{spelled}`: {parameter.help}"


def _metavar(parameter: Any) -> str:
    assert parameter.metavar, f"`{parameter.name}` needs a metavar"
    return str(parameter.metavar)


if __name__ == "__main__":
    print(reference(), end="")
