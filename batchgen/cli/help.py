"""`batchgen help` and `batchgen models`: the documentation pages, and how each model type runs, in a terminal."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from batchgen.cli.flags import completer
from batchgen.cli.grouped_command import GroupedCommand
from batchgen.config.run_config import GROUPS, OPTIONS
from batchgen.errors import UsageError
from batchgen.job.display.pager import paged
from batchgen.request.fields.other_systems import ANSWERS, FLAGS_OF_OTHERS, NAMES, snake_case
from batchgen.request.printable import unescaped

_GROUPS: Final = {
    "First steps": ("install", "input", "output", "errors", "resume", "check"),
    "What a row can ask for": (
        "fields", "sampling", "stops", "chat", "media", "reasoning", "tools", "constraints", "logprobs", "scoring",
        "embeddings", "hidden-states", "streaming", "processors", "lora", "other-systems",
    ),
    "Jobs and results": (
        "configuration", "sharding", "offload", "report", "export", "verify", "reliability", "deterministic", "python",
        "ray", "evaluation", "reference", "security",
    ),
    "How it works": (
        "models", "kernels", "planning", "architecture", "benchmarks", "limits", "glossary",
    ),
    "Working on batchgen": ("contributing", "gpu-check"),
}  # fmt: skip
TOPICS: Final = tuple(topic for topics in _GROUPS.values() for topic in topics)
"""Name of each page, in the order of the list that `batchgen help` prints."""
_FOR_DEVELOPERS: Final = {*_GROUPS["Working on batchgen"], "architecture"}
_LINK: Final = re.compile(r"\[([^\]]+)\]\((?:([\w-]+)\.md)?(?:#[\w-]+)?\)")
"""A link to a page, or to a heading of the same page."""
_LISTING: Final = re.compile(r"^.* <!-- (commands|flags|names) -->\n", re.M)
"""A line of a page that says which command prints a list: this one prints the list in its place."""
_PAGES: Final = Path(__file__).parents[1] / "docs"
_WIDEST: Final = 110
"""Columns of a page in a wide terminal."""
_MOST_HITS: Final = 12
"""Sections that a search lists."""


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("models", cls=GroupedCommand)(show_models)
    app.command("help", cls=GroupedCommand)(show_help)


def page_path(topic: str) -> Path:
    """The Markdown file of a topic."""
    return _PAGES / f"{topic}.md"


def summary_of(topic: str) -> str:
    """The first sentence of a topic's page."""
    lines = page_path(topic).read_text(encoding="utf-8").splitlines()
    return next(line for line in lines[1:] if line.strip())


def show_help(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC|WORD...",
            show_default=False,
            help="Page to read, or words to search the pages for; none: list the pages. Example: resume",
            autocompletion=completer(TOPICS),
        ),
    ] = None,
) -> None:
    """Read the documentation: its topics, one page, or what the pages say about a word.

    Example: batchgen help constraints
    """
    if words and (len(words) > 1 or words[0] not in TOPICS):
        found = _search(words)
        paged(found) if sys.stdout.isatty() else typer.echo(found, nl=False)
        return
    text = _contents()
    if words:
        root = context.find_root().command
        text = _LISTING.sub(lambda line: _listed(line[1], root), page_path(words[0]).read_text(encoding="utf-8"))
    if sys.stdout.isatty():
        _show_markdown(text, is_page=bool(words))
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
    intro = (
        "`batchgen help TOPIC` shows a page, `batchgen help WORD` searches them; `batchgen COMMAND --help` lists a "
        "command's options.\n\n"
    )
    return "# batchgen help\n\n" + intro + "\n".join(sections)


def _spoken(link: re.Match[str]) -> str:
    """The text of a link, with the command that shows the page it leads to."""
    return f"{link[1]} (`batchgen help {link[2]}`)" if link[2] else link[1]


def _show_markdown(text: str, is_page: bool) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console = Console(width=min(console.width, _WIDEST))
    with console.capture() as captured:
        console.print(Markdown(_LINK.sub(_spoken, text), hyperlinks=False))
    if is_page:
        paged(captured.get())
    else:
        unescaped(sys.stdout).write(captured.get())


def _search(words: Sequence[str]) -> str:
    """The sections of all pages that contain every one of the words, the likeliest first, each with a line of it.

    Raises:
        UsageError: no page and no option contains them.
    """
    wanted = [word.lower() for word in words]
    hits = [
        (_score(wanted, topic, title, text), topic, title, text)
        for topic in TOPICS
        for title, text in _sections(page_path(topic).read_text(encoding="utf-8"))
        if all(word in text.lower() for word in wanted)
    ]
    hits.sort(key=lambda hit: hit[0], reverse=True)
    options = [f"{option.flag} {option.help}".lower() for option in OPTIONS]
    count = sum(all(word in option for word in wanted) for option in options)
    if not hits and not count:
        near = get_close_matches(words[0], TOPICS, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise UsageError(f"no page has `{' '.join(words)}`.{hint} `batchgen help` lists the topics.")
    width = min(shutil.get_terminal_size().columns, _WIDEST) - 5
    lines = []
    for _, topic, title, text in hits[:_MOST_HITS]:
        lines += [f"{topic}: {title}", f"    {_line_about(wanted, text, width)}"]
    if len(hits) > _MOST_HITS:
        lines.append(f"... and {len(hits) - _MOST_HITS} more sections: add a word to find fewer")
    if hits:
        lines.append("Read a page: batchgen help " + lines[0].partition(":")[0])
    if count:
        lines.append(f"Options about it, {count}: batchgen run --help {max(words, key=len)}")
    return "\n".join(lines) + "\n"


def _score(words: Sequence[str], topic: str, title: str, text: str) -> int:
    """How likely a section is what a reader looks for: pages and headings of the name first, then how often it says so.

    Pages for those who work on the code come last.
    """
    named = sum(8 * (word in topic) + 4 * (word in title.lower()) for word in words)
    return named + min(sum(map(_prose(text).lower().count, words)), 6) - 8 * (topic in _FOR_DEVELOPERS)


def _prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def _sections(page: str) -> Iterator[tuple[str, str]]:
    """(heading, text with it) of each section of a page in Markdown."""
    fences = re.split(r"(^```.*?^```$)", page, flags=re.M | re.S)  # a comment of a shell is not a heading
    hidden = "".join(part.replace("#", "\0") if part.startswith("```") else part for part in fences)
    for section in filter(str.strip, re.split(r"^(?=#+ )", hidden, flags=re.M)):
        yield section.split("\n", 1)[0].strip("# "), section.replace("\0", "#")


def _line_about(words: Sequence[str], text: str, width: int) -> str:
    """The line of a section that has most of the words, one of its prose if there is one, cut to `width`."""
    text = _LINK.sub(r"\1", text)
    lines = [line.strip("|-* ") for line in [*_prose(text).splitlines()[1:], *text.splitlines()[1:]]]
    line = max(lines, key=lambda line: sum(word in line.lower() for word in words), default="")
    at = min((line.lower().find(word) for word in words if word in line.lower()), default=0)
    first = 0 if len(line) <= width else line.rfind(" ", 0, max(at - width // 2, 0)) + 1
    cut = textwrap.shorten(line[first:], width - 4, placeholder=" ...")
    return f"... {cut}" if first else cut


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
