"""Reads the fenced snippets of a documentation page and runs them in order in one folder.

The first line of a fence decides what happens to the block:

- a file name after the language: the block is written to that file;
- `sh`: run by bash, must exit with 0, or with N where `exit=N` is given;
- `console`: each line that begins with `$ ` is a command, the lines after it are its output, in which `...` matches any
  text;
- `python`: executed in the folder, must not raise;
- `json`: must be JSON;
- `needs=...`: cannot run here (a GPU, a network, other engines);
- anything else is shown only.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.docs.command_server import PYTHON

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_SECONDS = 180


@dataclass(frozen=True, slots=True)
class Snippet:
    """One fenced block of a page."""

    place: str
    """Page and line, for messages."""
    language: str
    words: tuple[str, ...]
    """Further words of the fence's first line."""
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block is written to."""
        return next((word for word in self.words if "=" not in word), None)

    @property
    def options(self) -> dict[str, str]:
        """Words of the form NAME=VALUE."""
        return dict(word.split("=", 1) for word in self.words if "=" in word)


def snippets_of(page: Path) -> list[Snippet]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, *words = match["info"].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Snippet(f"{page.name}:{line}", language, tuple(words), match["text"]))
    return found


def run_snippet(snippet: Snippet, folder: Path, environment: Mapping[str, str]) -> None:
    """Write, run or parse a block, as its first line asks.

    Raises:
        AssertionError: the result is not what the page shows.
    """
    if "needs" in snippet.options:
        return
    if snippet.file is not None:
        (folder / snippet.file).write_text(snippet.text, encoding="utf-8")
    elif snippet.language == "sh":
        done = _run(["bash", "-ec", snippet.text], folder, environment)
        expected = int(snippet.options.get("exit", 0))
        assert done.returncode == expected, f"{snippet.place} exits with {done.returncode}:\n{done.stdout}"
    elif snippet.language == "console":
        for command, output in _session(snippet.text):
            done = _run(["bash", "-c", command], folder, environment)
            assert _matches(output, done.stdout), f"{snippet.place}: `{command}` prints\n{done.stdout}\nnot\n{output}"
    elif snippet.language == "python":
        done = _run([PYTHON, snippet.text], folder, environment)
        assert done.returncode == 0, f"{snippet.place} fails:\n{done.stdout}"
    elif snippet.language == "json":
        json.loads(snippet.text)


def _run(words: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Both streams as one text, as a terminal shows them."""
    return subprocess.run(
        words,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )


def _session(text: str) -> list[tuple[str, str]]:
    """(command, its output) of a terminal session."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        else:
            command, output = found[-1]
            found[-1] = (command + "\n" + line, "") if command.endswith("\\") else (command, output + line + "\n")
    return found


def _matches(expected: str, printed: str) -> bool:
    """Whether the output is the expected one, where `...` is any text; white space at the ends of lines is ignored."""
    wanted, got = (re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip("\n") for text in (expected, printed))
    pattern = ".*".join(re.escape(part) for part in wanted.split("..."))
    return re.fullmatch(pattern, got, re.DOTALL) is not None
