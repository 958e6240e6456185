"""`batchgen help` and `batchgen models`: the documentation pages, and how each model type runs, in a terminal."""

from __future__ import annotations

import inspect
import os
import re
import sys
from contextlib import redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from batchgen.cli.flags import GroupedCommand
from batchgen.config.run_config import GROUPS
from batchgen.errors import UsageError
from batchgen.request.fields.other_systems import ANSWERS, FLAGS_OF_OTHERS, NAMES, snake_case
from batchgen.request.printable import unescaped

_GROUPS: Final = {
    "First steps": ("install", "input", "output", "errors", "resume", "check"),
    "What a row can ask for": (
        "fields", "sampling", "stops", "chat", "media", "reasoning", "tools", "constraints", "logprobs", "scoring",
        "embeddings", "hidden-states", "streaming", "processors", "lora", "other-systems",
    ),
    "Jobs and results": (
        "configuration", "sharding", "report", "export", "verify", "reliability", "deterministic", "python", "ray",
        "evaluation", "reference", "security",
    ),
    "How it works": (
        "models", "kernels", "planning", "architecture", "benchmarks", "limits", "glossary",
    ),
    "Working on batchgen": ("contributing", "gpu-check"),
}  # fmt: skip
TOPICS: Final = tuple(topic for topics in _GROUPS.values() for topic in topics)
"""Name of each page, in the order of the list that `batchgen help` prints."""
_LINK: Final = re.compile(r"\[([^\]]+)\]\((?:([\w-]+)\.md)?(?:#[\w-]+)?\)")
"""A link to a page, or to a heading of the same page."""
_LISTING: Final = re.compile(r"^.* <!-- (commands|flags|names) -->\n", re.M)
"""A line of a page that says which command prints a list: this one prints the list in its place."""
_PAGES: Final = Path(__file__).parents[1] / "docs"
_WIDEST: Final = 110
"""Columns of a page in a wide terminal."""


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("models", cls=GroupedCommand)(show_models)
    app.command("help", cls=GroupedCommand)(show_help)


def page_path(topic: str) -> Path:
    """The Markdown file of a topic.

    Raises:
        UsageError: there is no such topic; the message names the nearest one.
    """
    if topic not in TOPICS:
        near = get_close_matches(topic, TOPICS, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise UsageError(f"there is no help topic `{topic}`.{hint} `batchgen help` lists the topics.")
    return _PAGES / f"{topic}.md"


def summary_of(topic: str) -> str:
    """The first sentence of a topic's page."""
    lines = page_path(topic).read_text(encoding="utf-8").splitlines()
    return next(line for line in lines[1:] if line.strip())


def show_help(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", show_default=False, help="Page to read; none: list them. Example: resume"),
    ] = None,
) -> None:
    """Read the documentation: its topics, or one page.

    Example: batchgen help constraints
    """
    text = _contents()
    if topic is not None:
        root = context.find_root().command
        text = _LISTING.sub(lambda line: _listed(line[1], root), page_path(topic).read_text(encoding="utf-8"))
    if sys.stdout.isatty():
        _show_markdown(text, paged=topic is not None)
    else:
        typer.echo(text, nl=False)


def show_models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", show_default=False, help="Part of a type's name; none: all. Example: qwen3"),
    ] = None,
) -> None:
    """List the model types of transformers, how each runs, or which computation is missing.

    Example: batchgen models llava
    """
    from batchgen.models.library.model_types import HEAD, model_types  # imports transformers, which is slow

    types = model_types(name or "")
    if not types:
        raise UsageError(f"no model type of transformers has `{name}` in its name; `batchgen models` lists them all.")
    widths = [max(map(len, column)) for column in zip(HEAD, *types, strict=True)]
    for row in (HEAD, *types):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _contents() -> str:
    """The list of topics as Markdown."""
    width = max(map(len, TOPICS))
    sections = [
        f"## {title}\n\n" + "".join(f"    {topic:<{width}}  {summary_of(topic)}\n" for topic in topics)
        for title, topics in _GROUPS.items()
    ]
    intro = "`batchgen help TOPIC` shows a page; `batchgen COMMAND --help` lists a command's options.\n\n"
    return "# batchgen help\n\n" + intro + "\n".join(sections)


def _spoken(link: re.Match[str]) -> str:
    """The text of a link, with the command that shows the page it leads to."""
    return f"{link[1]} (`batchgen help {link[2]}`)" if link[2] else link[1]


def _show_markdown(text: str, paged: bool) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console = Console(width=min(console.width, _WIDEST))
    os.environ.setdefault("LESS", "-RFX")  # colours pass through; a page that fits the screen needs no pager
    page = Markdown(_LINK.sub(_spoken, text), hyperlinks=False)
    if paged:
        # The pager may write the page, which holds sequences for its colours, to standard output itself.
        with redirect_stdout(unescaped(sys.stdout)), console.pager(styles=True):
            console.print(page)
    else:
        console.print(page)


def _listed(name: str, root: Any) -> str:
    """A list in Markdown, by the name in a page; `root` is the command that has all others."""
    return _commands(root) if name == "commands" else _flags() if name == "flags" else _names()


def _commands(root: Any) -> str:
    """A section for each command; those with the options of `run` list only what it does not have."""
    context = typer.Context(root, info_name="batchgen")
    commands = {name: root.get_command(context, name) for name in root.list_commands(context)}
    of_run = {parameter.name for parameter in commands["run"].params}
    sections = [
        _section(name, command, of_run if name in ("check", "plan") else set()) for name, command in commands.items()
    ]
    return "\n".join(sections)


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


def _flags() -> str:
    """The flags of other systems as a table."""
    return _table("flag", [(f"`{flag}`", f"`{own}`") for flag, own in FLAGS_OF_OTHERS.items()])


def _names() -> str:
    """A table of names for each other system, those with the same outcome in one row."""
    return "\n".join(f"### {system}\n\n{_table('name', _outcomes(system))}" for system in NAMES)


def _table(head: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join([f"| {head} | here |", "|---|---|", *(f"| {name} | {here} |" for name, here in rows), ""])


def _outcomes(system: str) -> list[tuple[str, str]]:
    """(names, outcome): what runs first, then other names of fields, then what is refused, in the system's order."""
    by_outcome: dict[str, list[str]] = {}
    for name in NAMES[system]:
        by_outcome.setdefault(_outcome(name), []).append(f"`{name}`")
    rows = [(", ".join(names), outcome) for outcome, names in by_outcome.items()]
    return sorted(rows, key=lambda row: (row[1].startswith("refused"), not row[1].startswith("runs")))


def _outcome(name: str) -> str:
    from batchgen.request.fields.declared import LOOKUP  # imports numpy, which is slow

    place = next((place for place in LOOKUP if name in LOOKUP[place]), None)
    written = snake_case(name)
    if place is not None:
        field = LOOKUP[place][name]
        where = "" if place in ("row", "pairs", "params") else " in the body of an OpenAI line"
        if field.carried:
            return f"carried{where}"
        if not field.supported:
            return f"refused{where}, unless it asks for nothing: {field.remedy}"
        if where:
            return f"accepted{where}"
        return "runs" if name == field.name else f"another name of `{field.name}`"
    if name == "sampling_params":
        return "runs"
    if written in LOOKUP["row"]:
        return f"refused: write `{written}`"
    return f"refused: {ANSWERS[written].advice}"
