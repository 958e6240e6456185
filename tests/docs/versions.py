"""Tables of the packages that pyproject.toml requires, for the page of installation."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
_WORDS = {">=": "{} or newer", "<": "below {}", "==": "{}"}
_ADDS = {
    "gpu": "Triton, for the kernels of a GPU",
    "sentencepiece": "models with `tokenizer.model` and no `tokenizer.json`",
    "gguf": "`--model file.gguf`",
    "report": "pictures of benchmark results (`batchgen bench --chart FILE`)",
    "media": "rows with images and sounds",
    "test": "the tests, with the readers and references that results are compared with",
    "fuzz": "the fuzzers by coverage",
}


def packages() -> str:
    """Table of the required packages with their versions."""
    lines = [f"| Python | {_versions(PROJECT['requires-python'])} |"]
    lines += [
        f"| {need.name} | {_versions(str(need.specifier))} |" for need in map(Requirement, PROJECT["dependencies"])
    ]
    return _table("package | version", lines)


def sets() -> str:
    """Table of the optional sets with their packages."""
    found = PROJECT["optional-dependencies"]
    return _table("set | for | packages", (f"| `{name}` | {_ADDS[name]} | {_names(found[name])} |" for name in found))


def _names(needs: Iterable[str]) -> str:
    return ", ".join(f"{need.name} {_versions(str(need.specifier))}" for need in map(Requirement, needs))


def _versions(specifier: str) -> str:
    parts = sorted(Requirement(f"x{specifier}").specifier, key=str, reverse=True)
    return ", ".join(_WORDS[part.operator].format(part.version) for part in parts)


def _table(head: str, lines: Iterable[str]) -> str:
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *lines, ""])
