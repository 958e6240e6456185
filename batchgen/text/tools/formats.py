"""The formats of calls, read from `formats.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any, Final

from batchgen.text.calls import ToolFormat
from batchgen.text.tools.json_calls import JsonCalls, NamedCalls
from batchgen.text.tools.keyed_calls import GemmaCalls, PythonCalls, TagCalls

_KINDS: Final[Mapping[str, type[ToolFormat]]] = {
    "json": JsonCalls, "named": NamedCalls, "tags": TagCalls, "python": PythonCalls, "gemma": GemmaCalls,
}  # fmt: skip


def _formats(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, ToolFormat]:
    formats, others = dict[str, ToolFormat](), dict[str, tuple[str, ...]]()
    for name, table in tables.items():
        values = {**tables.get(table.get("like", ""), {}), **table}
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        values.pop("like", None)
        others[name] = values.pop("others", ())
        formats[name] = _KINDS[values.pop("kind")](**values)
    return {
        name: replace(each, others=tuple(formats[other] for other in others[name])) for name, each in formats.items()
    }


FORMATS: Final = _formats(tomllib.loads(files("batchgen.text.tools").joinpath("formats.toml").read_text("utf-8")))
"""Name -> format."""
