"""Compares the completions and events of two runs of the same rows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from batchgen import Completion, Engine
from batchgen.request.completion import Score, StateBlock, StreamEvent

BATCH_DEPENDENT = frozenset({"row_index", "cached_tokens", "dedup_of", "error"})
"""Fields of a completion that depend on the batch; of errors, the codes are compared."""
TOLERANCE = 1e-4

Key = tuple[str, int, int]
"""Row id, prompt index and sample index."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Completions and stream events of one run."""

    completions: dict[Key, Completion]
    events: dict[Key, list[StreamEvent]]
    """Events of the samples whose rows have `stream`."""

    @staticmethod
    def of(engine: Engine, rows: list[dict[str, Any]]) -> RunResult:
        events: dict[Key, list[StreamEvent]] = {}

        def collect(event: StreamEvent) -> None:
            key = (event.id or "", event.prompt_index, event.sample_index)
            events.setdefault(key, []).append(replace(event, row_index=0))

        found = {(c.id or "", c.prompt_index, c.sample_index): c for c in engine.generate(rows, on_event=collect)}
        return RunResult(found, events)


def assert_equal(left: Completion, right: Completion, row: dict[str, Any]) -> None:
    """Assert that the fields that do not depend on the batch are equal, numbers within the tolerance."""
    assert (left.error and left.error.code) == (right.error and right.error.code), (left.error, right.error, row)
    for field in fields(Completion):
        if field.name in BATCH_DEPENDENT:
            continue
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert_close(a, b, f"{field.name} of {row}")


def assert_close(a: Any, b: Any, what: str) -> None:
    """`compare`, with the name of the value in the error."""
    try:
        compare(a, b)
    except AssertionError as error:
        raise AssertionError(f"{what}: {a!r} is not {b!r}: {error}") from None


def compare(a: Any, b: Any) -> None:
    """Assert that two values are equal, numbers within the tolerance."""
    a, b = (value.tolist() if isinstance(value, np.ndarray) else value for value in (a, b))
    if isinstance(a, StateBlock) and isinstance(b, StateBlock):
        np.testing.assert_allclose(a.values, b.values, atol=TOLERANCE * 10, rtol=1e-4)
        assert replace(a, values=b.values) == replace(b, values=b.values)
    elif isinstance(a, float) and isinstance(b, float):
        np.testing.assert_allclose(a, b, atol=TOLERANCE * 20, rtol=0)  # may be a sum over the row's tokens
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
