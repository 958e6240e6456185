"""The words that code, messages and documentation do without, and where one of them occurs.

`python -m tests.docs.words [PATH ...]` lists the places below the given files or folders (all of them by default).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("batchgen", "tests", "configs", "README.md")
_SUFFIXES = (".py", ".md", ".cpp", ".h", ".toml")

BANNED: dict[str, str] = {
    r"stands?|stood|standing": "exists, is stored, is written, is",
    r"beside|besides": "next to, with, in addition to",
    r"anew": "again",
    r"told": "given, receives, knows",
    r"whoever|nobody|somebody": "name who it is, or no one",
    r"takes? turns": "alternate",
    r"of (its|their) own": "own, separate",
    r"what (comes|came) of": "the result of",
    r"under way|underway": "running, in flight, in progress",
    r"doors?": "name the class or function",
    r"time and again": "repeatedly",
    r"(is|are|was|were) no": "is not a",
    r"rehears(e|es|ed|al|als|er)": "dummy run",
    r"halv(er|ing)": "split",
    r"(in|out)sides": "hooks",
    r"row tables?": "input batch",
    r"outlook": "page forecast",
    r"parked": "awaiting commit",
}
"""Pattern of whole words -> what to write instead."""

_PATTERN = re.compile(
    r"(?<![A-Za-z])(" + "|".join(f"(?:{words})" for words in BANNED) + r")(?![A-Za-z])", re.IGNORECASE
)
_ALLOWED = re.compile(
    r"stand-(alone|in)|standard|is no longer|there (is|are|was|were) no|is none|"
    r"lighthouse stood|nobody else had ever read",  # a text on which the loss of quantization is measured
    re.IGNORECASE,
)
_SPLIT = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_")
"""Between the words of an identifier."""


def found_in(text: str) -> Iterator[tuple[int, str]]:
    """(line number, word) of each occurrence in a file's text, identifiers taken apart into their words."""
    for number, line in enumerate(text.splitlines(), 1):
        plain = _ALLOWED.sub(lambda match: "x" * len(match[0]), line)
        for words in (plain, " ".join(_SPLIT.split(plain))):
            if match := _PATTERN.search(words):
                yield number, match[0]
                break


def source_files(places: tuple[str, ...] = FOLDERS) -> list[Path]:
    """Every file that people read, but for this one, its test, and the demonstration model's sentences."""
    found: list[Path] = []
    for place in places:
        path = ROOT / place
        found += [path] if path.is_file() else [p for p in path.rglob("*") if p.suffix in _SUFFIXES]
    here = Path(__file__).resolve()
    left_out = {here, here.with_name("test_words.py"), ROOT / "batchgen" / "demo" / "tasks.toml"}
    return sorted(p for p in found if p not in left_out and "__pycache__" not in p.parts)


def main() -> int:
    """Print each place, and how many there are."""
    count = 0
    for path in source_files(tuple(sys.argv[1:]) or FOLDERS):
        for number, word in found_in(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(ROOT)}:{number}: {word}")
            count += 1
    print(f"{count} places", file=sys.stderr)
    return bool(count)


if __name__ == "__main__":
    sys.exit(main())
