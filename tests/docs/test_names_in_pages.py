"""The pages about the code name only files, classes and functions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "batchgen"
PAGES = [PACKAGE / "docs" / f"{name}.md" for name in ("architecture", "contributing", "planning")]
NOT_OURS = {"SIGINT", "TERM", "OUT", "PATH", "FRESH", "WAITING", "RESUMING", "RUNNING", "ENDED", "AWAITING_COMMIT"}


@cache
def defined() -> frozenset[str]:
    """Names of the package's classes, functions and variables."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return frozenset(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    examples = set(re.findall(r"In `([^`]+)`, a new file", text))
    for name in set(re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]*(?:\.py)?)`", text)) - examples:
        exists = (ROOT / name).exists() or any(PACKAGE.rglob(name.rstrip("/")))
        assert exists, f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_classes_and_functions_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`([A-Z][A-Za-z]+|[A-Z_]{3,})`", text):
        assert name in defined() | NOT_OURS, f"{page.name} names {name}"
