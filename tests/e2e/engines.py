"""Runs rows through an engine and compares what must not depend on the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen import Completion, Engine


def generate(engine: Engine, rows: Sequence[Mapping[str, Any]]) -> list[Completion]:
    """All samples in input order."""
    return list(engine.generate(rows, ordered=True))


def outcomes(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    """Fields of the completions that must not depend on the batch."""
    return [
        (
            c.error and (c.error.code, c.error.param),
            c.sample_index,
            c.finish_reason,
            c.stop_kind,
            c.matched_stop,
            c.matched_text,
            c.text,
            list(c.output_ids or []),
            c.dropped_tokens,
        )
        for c in completions
    ]
