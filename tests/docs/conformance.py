"""Each field of a row with the test files that cover it: `python -m tests.docs.conformance` prints them.

Tests name fields with `@pytest.mark.field("name", ...)`; the marks are read from the source, no test is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from batchgen.request.fields.declared import FIELDS

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"

ENVELOPE = ("sampling_params", "method", "url", "body")
"""Keys of a row that contain fields but are not fields."""
NAMES = tuple(dict.fromkeys([*(field.name for field in FIELDS), *ENVELOPE]))
"""Names that a test may be tagged with."""

EVERY_FIELD = "request/test_every_field.py"
"""Test file that runs wrong values of every sampling field through every entrance, without tags."""


def unsupported() -> frozenset[str]:
    """Names of fields that are rejected with an error."""
    return frozenset(field.name for field in FIELDS if not field.supported)


@cache
def tests_of() -> dict[str, list[str]]:
    """Field name -> the file, relative to `tests/`, of each test tagged by it.

    Raises:
        ValueError: a tag's argument is not a literal string.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.field(" in source:
            for name in _names(ast.parse(source), path):
                found.setdefault(name, []).append(str(path.relative_to(TESTS)))
    return found


def tagged() -> dict[str, tuple[str, ...]]:
    """Field name -> the test files that cover it: those of `tests_of`, and the one that covers all sampling fields."""
    files = {name: set(tests) for name, tests in tests_of().items()}
    for field in FIELDS:
        if "params" in field.places:
            files.setdefault(field.name, set()).add(EVERY_FIELD)
    return {name: tuple(sorted(found)) for name, found in files.items()}


def _names(tree: ast.AST, path: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.field":
            for argument in node.args:
                if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                    raise ValueError(f"{path}:{node.lineno}: a field tag must be a literal string")
                yield argument.value


def main() -> None:
    """Print a line for each field: whether it is refused by name, and its test files below `tests/`."""
    for name in NAMES:
        refused = "refused by name: " if name in unsupported() else ""
        print(f"{name:<30} {refused}{' '.join(tagged()[name])}")


if __name__ == "__main__":
    main()
