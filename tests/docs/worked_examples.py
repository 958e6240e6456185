"""Follows a worked example of a documentation page in a copy of the repository.

An example is a section of a page. Each of its steps is a line that names a file, and the fenced block below it:

- In `FILE`, after `LINE`: the block is inserted after the only line of the file that begins with LINE;
- In `FILE`, before `LINE`: likewise before that line;
- In `FILE`, in place of `LINE`: the block replaces that line;
- In the new file `FILE`: the block is the file.

White space in front of LINE does not count; a LINE with backticks is written between two of them. The block is written
as it is, with its indentation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_STEP = re.compile(
    r"^In (?:the new file `(?P<new>[^`\n]+)`|`(?P<file>[^`\n]+)`, (?P<how>after|before|in place of) "
    r"(?P<ticks>`+) ?(?P<line>.+?) ?(?P=ticks)):\n\n```\w*\n(?P<block>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One block of an example."""

    file: str
    how: str
    """`after`, `before` or `in place of` a line; empty: the file is new."""
    line: str
    block: str

    def apply(self, root: Path) -> None:
        """Write the block to its file below `root`.

        Raises:
            AssertionError: no line, or more than one, begins with `line`; or the new file exists.
        """
        path = root / self.file
        if not self.how:
            assert not path.exists(), f"{self.file} exists"
            path.write_text(self.block, encoding="utf-8")
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        found = [number for number, line in enumerate(lines) if line.lstrip().startswith(self.line)]
        assert len(found) == 1, f"{len(found)} lines of {self.file} begin with {self.line!r}"
        at = found[0]
        placed = {"after": [lines[at], self.block], "before": [self.block, lines[at]], "in place of": [self.block]}
        lines[at : at + 1] = placed[self.how]
        path.write_text("".join(lines), encoding="utf-8")


def steps_of(page: Path, heading: str) -> list[Step]:
    """The steps of the section `## heading` of a page, in order."""
    section = page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [
        Step(match["new"] or match["file"], match["how"] or "", (match["line"] or "").strip(), match["block"])
        for match in _STEP.finditer(section)
    ]


def copy_repository(folder: Path) -> None:
    """Copy the repository's package and tests to `folder`, with what is compiled of them."""
    for name in ("batchgen", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))  # half-written files
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("configs", "sample_data"):
        (folder / name).symlink_to(ROOT / name)


def follow(page: Path, heading: str, folder: Path) -> set[str]:
    """Apply an example in a copy of the repository and return the files that it touches."""
    steps = steps_of(page, heading)
    for step in steps:
        step.apply(folder)
    return {step.file for step in steps}


def run_in(folder: Path, *arguments: str) -> str:
    """Output of Python with `arguments` in a copy; it must exit with 0."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
