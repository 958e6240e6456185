"""Whether two runs of the same rows said the same."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from batchgen import Completion, Engine
from batchgen.request import Score, StateBlock, StreamEvent

__all__ = ["Done", "Key", "assert_close", "assert_equal", "compare"]

OF_THE_BATCH = frozenset({"row_index", "cached_tokens", "dedup_of", "error"})
"""What a completion says that is not the row's own: where it stood, and what it shared."""
TOLERANCE = 1e-4

Key = tuple[str, int, int]
"""A row's id, prompt and sample."""


@dataclass(frozen=True, slots=True)
class Done:
    """What came of some rows."""

    completions: dict[Key, Completion]
    events: dict[Key, list[StreamEvent]]
    """Of those with `stream`."""

    @staticmethod
    def of(engine: Engine, rows: list[dict[str, Any]]) -> Done:
        events: dict[Key, list[StreamEvent]] = {}

        def take(event: StreamEvent) -> None:
            key = (event.id or "", event.prompt_index, event.sample_index)
            events.setdefault(key, []).append(replace(event, row_index=0))

        found = {(c.id or "", c.prompt_index, c.sample_index): c for c in engine.generate(rows, on_event=take)}
        return Done(found, events)


def assert_equal(left: Completion, right: Completion, row: dict[str, Any]) -> None:
    """Equal in all that is the row's own: numbers within the tolerance, everything else exactly."""
    assert (left.error and left.error.code) == (right.error and right.error.code), (left.error, right.error, row)
    for field in fields(Completion):
        if field.name in OF_THE_BATCH:
            continue
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert_close(a, b, f"{field.name} of {row}")


def assert_close(a: Any, b: Any, what: str) -> None:
    """As `compare`, saying what differs."""
    try:
        compare(a, b)
    except AssertionError as error:
        raise AssertionError(f"{what}: {a!r} is not {b!r}: {error}") from None


def compare(a: Any, b: Any) -> None:
    """Numbers within the tolerance, everything else exactly."""
    a, b = (value.tolist() if isinstance(value, np.ndarray) else value for value in (a, b))
    if isinstance(a, StateBlock) and isinstance(b, StateBlock):
        np.testing.assert_allclose(a.values, b.values, atol=TOLERANCE * 10, rtol=1e-4)
        assert replace(a, values=b.values) == replace(b, values=b.values)
    elif isinstance(a, float) and isinstance(b, float):
        np.testing.assert_allclose(a, b, atol=TOLERANCE * 20, rtol=0)  # a sum over the row's tokens
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        assert len(a) == len(b)
        if any(isinstance(item, float) for item in a):
            numbers = [np.array([np.nan if item is None else item for item in some]) for some in (a, b)]
            np.testing.assert_allclose(*numbers, atol=TOLERANCE, rtol=0)
        elif any(isinstance(item, StateBlock | Score | dict) for item in a):
            for one, other in zip(a, b, strict=True):
                compare(one, other)
        else:
            assert list(a) == list(b)
    elif isinstance(a, Score) and isinstance(b, Score):
        np.testing.assert_allclose((a.sum, a.mean), (b.sum, b.mean), atol=TOLERANCE * 20, rtol=0)
        assert (a.tokens, a.is_greedy) == (b.tokens, b.is_greedy)
    elif isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys()
        for name in a:
            compare(a[name], b[name])
    else:
        assert a == b
