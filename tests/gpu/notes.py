"""Tuning notes, one JSON object a line in `notes.jsonl`: a change, its predicted effect and its measured effect.

    {"date": "2027-01-31", "commit": "0123abc", "device": "NVIDIA H200", "figure": "w-nano 8b output_tokens_per_second",
     "change": "...", "before": 1.0, "predicted": 2.0, "after": 1.5, "unit": "tokens/s", "kept": true, "outcome": "..."}

The prediction is written before the run. `after` is null for a change that could not be measured; `outcome` then gives
the reason. Changes that were not kept are notes too.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

__all__ = ["NOTES", "Note", "load_notes"]

NOTES = Path(__file__).parent / "notes.jsonl"


@dataclass(frozen=True, slots=True)
class Note:
    """One change and its measurement."""

    date: str
    """ISO date."""
    commit: str
    """Commit that was measured."""
    device: str
    figure: str
    """The figure that the change should improve."""
    change: str
    before: float
    predicted: float
    after: float | None
    unit: str
    kept: bool
    outcome: str

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            ValueError: a field has a wrong type or value; the message names it.
        """
        for name in ("date", "commit", "device", "figure", "change", "unit", "outcome"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"`{name}` must be a text")
        date.fromisoformat(self.date)
        for name in ("before", "predicted", "after"):
            value = getattr(self, name)
            if value is None and name == "after":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"`{name}` must be a number")
        if not isinstance(self.kept, bool):
            raise ValueError("`kept` must be true or false")


def load_notes(path: Path = NOTES) -> list[Note]:
    """All notes, in order.

    Raises:
        ValueError: a line is not a valid note; the message has its number and the reason.
    """
    names = [field.name for field in fields(Note)]
    notes = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
            if not isinstance(values, dict) or sorted(values) != sorted(names):
                raise ValueError(f"takes exactly {', '.join(names)}")
            notes.append(Note(**values))
        except ValueError as error:
            raise ValueError(f"{path.name}:{number}: {error}") from None
    return notes
