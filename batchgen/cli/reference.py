"""Prints the command line reference as Markdown, from each command's `--help`: `python -m batchgen.cli.reference`."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout

from batchgen.cli.app import command_names, run_command

__all__ = ["reference"]

_WIDTH = "80"


def reference() -> str:
    """The help of every command, in code blocks under headings."""
    sections = [_section("batchgen", ["--help"])]
    sections += [_section(f"batchgen {name}", [name, "--help"]) for name in command_names()]
    return "\n".join(sections)


def _section(title: str, arguments: list[str]) -> str:
    text = io.StringIO()
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDTH
    try:
        with redirect_stdout(text):
            run_command(arguments)
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width
    lines = "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())
    return f"### `{title}`\n\n```text\n{lines}\n```\n"


if __name__ == "__main__":
    print(reference(), end="")
