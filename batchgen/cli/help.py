"""`batchgen help` and `batchgen models`: the documentation pages, and the table of model types, in a terminal."""

from __future__ import annotations

import os
import re
import sys
from contextlib import redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Final

import typer

from batchgen.cli.flags import GroupedCommand
from batchgen.errors import UsageError
from batchgen.request.printable import unescaped

_GROUPS: Final = {
    "First steps": ("install", "input", "output", "errors", "resume", "check"),
    "What a row can ask for": (
        "fields", "sampling", "stops", "chat", "media", "reasoning", "tools", "constraints", "logprobs", "scoring",
        "hidden-states", "streaming", "processors", "lora", "other-systems",
    ),
    "Jobs and results": (
        "configuration", "sharding", "export", "verify", "reliability", "deterministic", "python", "reference",
        "security",
    ),
    "How it works": (
        "models", "model-types", "kernels", "planning", "architecture", "benchmarks", "limits", "glossary",
    ),
    "Working on batchgen": ("contributing", "gpu-check", "conformance"),
}  # fmt: skip
TOPICS: Final = tuple(topic for topics in _GROUPS.values() for topic in topics)
"""Name of each page, in the order of the list that `batchgen help` prints."""
_LINK: Final = re.compile(r"\[([^\]]+)\]\((?:([\w-]+)\.md)?(?:#[\w-]+)?\)")
"""A link to a page, or to a heading of the same page."""
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
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", show_default=False, help="Page to read; none: list them. Example: resume"),
    ] = None,
) -> None:
    """Read the documentation: its topics, or one page.

    Example: batchgen help constraints
    """
    text = _contents() if topic is None else page_path(topic).read_text(encoding="utf-8")
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
    lines = page_path("model-types").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    head, *types = rows
    wanted = [row for row in types if (name or "").lower().replace("-", "_") in row[0].replace("-", "_")]
    if not wanted:
        raise UsageError(f"no model type of transformers has `{name}` in its name; `batchgen models` lists them all.")
    widths = [max(map(len, column)) for column in zip(head, *wanted, strict=True)]
    for row in (head, *wanted):
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
