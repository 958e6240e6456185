"""What differs between two jobs, for messages: the values that their fingerprints were computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.request.printable import printable

INPUT_FILES = "input files"
"""Name of the input files' sizes and digests among these values."""
_SHOWN = 60
"""Most characters of a value."""


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names of the values that differ, options first."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return sorted(names, key=lambda name: (not name.startswith("--"), name))


def describe_changes(
    names: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any], inputs: Sequence[str] = ()
) -> str:
    """The named values, each as it was and as it is.

    Args:
        names: from `changes`.
        old: values of the earlier job.
        new: values of the later job.
        inputs: names of the later job's input files.
    """
    found = [
        _describe_inputs(old.get(name) or [], new.get(name) or [], inputs)
        if name == INPUT_FILES
        else f"{name} was {_shown(old.get(name))}, is {_shown(new.get(name))}"
        for name in names
    ]
    return "; ".join(found) or "the shard"


def _describe_inputs(old: Sequence[Any], new: Sequence[Any], inputs: Sequence[str]) -> str:
    if len(old) != len(new) or len(new) != len(inputs):
        return f"{len(old)} input files before, {len(new)} now"
    changed = [
        f"input file {printable(name)} had {was[0]:,} bytes (sha256 {was[1][:8]}), has {now[0]:,} ({now[1][:8]})"
        for name, was, now in zip(inputs, old, new, strict=True)
        if list(was) != list(now)
    ]
    return ", ".join(changed)


def _shown(value: Any) -> str:
    text = "not set" if value is None else printable(str(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
