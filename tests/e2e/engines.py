"""Engines for tests that run the same rows natively, through transformers, and with preemption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen import Completion, Engine

__all__ = ["ENGINES", "build", "generate", "outcomes"]

ENGINES: dict[str, dict[str, Any]] = {
    "native": {},
    "transformers": {"model_impl": "transformers"},
    # A pool and steps so small that samples are preempted and recomputed.
    "preempted": {"kv_memory": 1 << 20, "page_size": 8, "max_tokens_per_step": 160},
}
"""Name -> options of the engine."""


def build(model: Path, name: str, **options: Any) -> Engine:
    engine = Engine(str(model), dtype="float32", **{**ENGINES[name], **options})
    if name == "preempted":
        engine.order, engine.admission = "tree", "free"
    return engine


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
