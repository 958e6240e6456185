"""Differences between two jobs, for messages: of the values that their fingerprints were computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.request.printable import printable

INPUT_FILES = "input files"
"""Name of the input files' sizes and digests among these values."""
WEIGHTS = "model weights"
"""Name of the digests of the weight files among these values."""
_FILES = {WEIGHTS: "the weights differ", "model adapters": "the adapters differ"}
"""Names of digests by file or adapter, and what to say of them."""
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
    texts = [
        _describe_inputs(old.get(name) or [], new.get(name) or [], inputs)
        if name == INPUT_FILES
        else _describe_files(_FILES[name], old.get(name) or {}, new.get(name) or {})
        if name in _FILES
        else f"{name} was {_shown(old.get(name))}, is {_shown(new.get(name))}"
        for name in names
    ]
    return "; ".join(texts) or "the shard"


def _describe_inputs(old: Sequence[Any], new: Sequence[Any], inputs: Sequence[str]) -> str:
    if len(old) != len(new) or len(new) != len(inputs):
        return f"{len(old)} input files before, {len(new)} now"
    changed = [
        f"input file {printable(name)} had {was[0]:,} bytes (sha256 {was[1][:8]}), has {now[0]:,} ({now[1][:8]})"
        for name, was, now in zip(inputs, old, new, strict=True)
        if list(was) != list(now)
    ]
    return ", ".join(changed)


def _describe_files(what: str, old: Mapping[str, str], new: Mapping[str, str]) -> str:
    if not old and what == _FILES[WEIGHTS]:
        return "the weights may differ (a version that did not hash them all computed the earlier rows)"
    differing = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
    name = differing[0]
    was, now = (f"sha256 {files[name][:8]}" if name in files else "not there" for files in (old, new))
    more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"{what} ({printable(name)} was {was}, is {now}{more})"


def _shown(value: Any) -> str:
    text = "not set" if value is None else printable(str(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
