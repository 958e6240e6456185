"""The conformance page: each field of a row with the test files that cover it.

Tests name fields with `@pytest.mark.field("name", ...)`; the marks are read from the source, no test is imported.
`tests.docs.generated` writes the page.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from batchgen.request.fields.declared import FIELDS
from batchgen.request.fields.params import SamplingParams

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"

ENVELOPE = ("sampling_params", "method", "url", "body")
"""Keys of a row that contain fields but are not fields."""
NAMES = tuple(dict.fromkeys([*(field.name for field in FIELDS), *ENVELOPE]))
"""Names that a test may be tagged with, each a row of the table."""

EVERY_FIELD = "request/test_every_field.py"
"""Test file that runs wrong values of every sampling field through every entrance, without tags."""

_DEFAULTS = {
    "id": "`row-<index>`",
    "max_new_tokens": "128; 16 in `/v1/completions`; to the context's end in `/v1/chat/completions`",
    "temperature": "the model's, then 1.0",
    "top_p": "the model's, then 1.0",
    "top_k": "the model's, then -1",
    "min_p": "the model's, then 0.0",
    "add_generation_prompt": "true",
    "continue_final_message": "false",
    "logprobs": "false",
    "top_logprobs": "0",
    "return_hidden_states": "false",
}
"""Defaults that `SamplingParams` does not define."""


def unsupported() -> frozenset[str]:
    """Names of fields that are rejected with an error."""
    return frozenset(field.name for field in FIELDS if not field.supported)


def refused() -> str:
    """Table of the refused fields, with what to do instead."""
    lines = [f"| `{field.name}` | {field.remedy} |" for field in FIELDS if not field.supported]
    return "\n".join(["| field | instead |", "|---|---|", *lines, ""])


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


_INTRO = """# Conformance

Every field of a row with its default and the tests that prove it.

The table is generated from the tests' marks. Files are below `tests/`. A field that is refused by name has tests of its
refusal.

"""


def page() -> str:
    """The whole page as Markdown."""
    lines = ["| field | default | tests |", "|---|---|---|"]
    return _INTRO + "\n".join([*lines, *(_row(name) for name in NAMES)]) + "\n"


def _row(name: str) -> str:
    aliases = dict.fromkeys(alias for field in FIELDS if field.name == name for alias in field.aliases)
    spelled = f"`{name}`" + (f" ({', '.join(f'`{alias}`' for alias in aliases)})" if aliases else "")
    files = ", ".join(map(_file, tagged().get(name, ())))
    if name in unsupported():
        return f"| {spelled} | | refused by name: {files} |"
    return f"| {spelled} | {_default(name)} | {files} |"


def _file(file: str) -> str:
    return f"`{file}`"


def _default(name: str) -> str:
    if name in _DEFAULTS:
        return _DEFAULTS[name]
    default: Any = {item.name: item.default for item in fields(SamplingParams)}.get(name)
    return "" if default is None or default is MISSING or default == () else json.dumps(default)
