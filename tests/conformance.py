"""The README's conformance table: each field of the vocabulary beside the tests that prove it.

Tests name fields with `@pytest.mark.field("name", ...)`; the marks are read from the source, no test is imported.
`python -m tests.conformance` writes the table into README.md; `tests/test_conformance.py` holds it there.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from batchgen.fields import FIELDS
from batchgen.params import SamplingParams

__all__ = ["BEGIN", "END", "NAMES", "in_readme", "table", "tagged", "unbuilt"]

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
README = ROOT / "README.md"
BEGIN, END = "<!-- conformance begins -->", "<!-- conformance ends -->"

ENVELOPE = ("sampling_params", "method", "url", "body")
"""Keys of a row that hold fields, and are none."""
NAMES = tuple(dict.fromkeys([*(field.name for field in FIELDS), *ENVELOPE]))
"""Everything a test may be tagged with, one row of the table each."""

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
"""Where `SamplingParams` does not say it."""


def unbuilt() -> frozenset[str]:
    """Names of fields that are refused wherever they ask for something."""
    return frozenset(field.name for field in FIELDS if not field.built)


@cache
def tagged() -> dict[str, tuple[str, ...]]:
    """Field name -> the test files, relative to `tests/`, with a test tagged by it.

    Raises:
        ValueError: a tag's argument is no literal string.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.field(" not in source:
            continue
        for name in dict.fromkeys(_names(ast.parse(source), path)):
            found.setdefault(name, []).append(str(path.relative_to(TESTS)))
    return {name: tuple(files) for name, files in found.items()}


def _names(tree: ast.AST, path: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.field":
            for argument in node.args:
                if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                    raise ValueError(f"{path}:{node.lineno}: a field tag must be a literal string")
                yield argument.value


def table() -> str:
    """The table as Markdown."""
    lines = ["| field | default | tests |", "|---|---|---|"]
    return "\n".join([*lines, *(_row(name) for name in NAMES)]) + "\n"


def _row(name: str) -> str:
    aliases = dict.fromkeys(alias for field in FIELDS if field.name == name for alias in field.aliases)
    spelled = f"`{name}`" + (f" ({', '.join(f'`{alias}`' for alias in aliases)})" if aliases else "")
    proofs = ", ".join(map(_link, tagged().get(name, ())))
    if name in unbuilt():
        return f"| {spelled} | | refused by name: {proofs} |"
    return f"| {spelled} | {_default(name)} | {proofs} |"


def _link(file: str) -> str:
    return f"[{file.removesuffix('.py').replace('test_', '')}](tests/{file})"


def _default(name: str) -> str:
    if name in _DEFAULTS:
        return _DEFAULTS[name]
    default: Any = {item.name: item.default for item in fields(SamplingParams)}.get(name)
    return "" if default is None or default is MISSING or default == () else json.dumps(default)


def in_readme() -> str:
    """What stands between the markers."""
    text = README.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].lstrip("\n")


def main() -> None:
    """Put the table between the markers of README.md."""
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n{table()}{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
