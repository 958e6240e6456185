"""Requests straight into an engine, past the parsing and tokenising of rows."""

from __future__ import annotations

from batchgen.engine.engine import Engine
from batchgen.params import SamplingParams
from batchgen.request import Completion, RequestTable

__all__ = ["finish"]


def finish(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    """Run requests to their end; results in their order, the samples of one after the other."""
    table = RequestTable()
    for i, (ids, params) in enumerate(requests):
        assert params.max_new_tokens is not None
        table.append(i, 0, ids, params, i, params.max_new_tokens)
    groups = list(engine.start(table).loop.run())
    return [c for group in sorted(groups, key=lambda group: group[0].row_index) for c in group]
