"""Run records of merged files: what the records of the merged outputs say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_CLOCK = ("clock", "clock_text")


def summed_counts(footers: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Row counts of all outputs: the sums, or None if an output does not record one."""
    names = ("input_rows", "rows_skipped")
    counts: dict[str, list[Any]] = {name: [footer.get(name) for footer in footers] for name in names}
    return {name: None if None in found else sum(found) for name, found in counts.items()}


def grammar_backends(footers: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The grammar compilers of all outputs, if they record them."""
    recorded = [footer["grammar_backends"] for footer in footers if "grammar_backends" in footer]
    return {"grammar_backends": sorted({name for names in recorded for name in names})} if recorded else {}


def common_clock(footers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The time that all outputs saw; None where they differ. Nothing if none of them records it."""
    found = {name: [footer.get(name) for footer in footers] for name in _CLOCK if any(name in each for each in footers)}
    return {name: values[0] if all(value == values[0] for value in values) else None for name, values in found.items()}
