"""Runs requests in an engine without parsing and tokenising rows."""

from __future__ import annotations

from batchgen.engine.engine import Engine
from batchgen.request.completion import Completion
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable


def finish(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    """Run requests to their end; returns completions in input order, samples in order of their index."""
    table = RequestTable()
    for i, (ids, params) in enumerate(requests):
        assert params.max_new_tokens is not None
        table.append(i, 0, ids, params, i, params.max_new_tokens)
    groups = list(engine.start(table).loop.run())
    return [c for group in sorted(groups, key=lambda group: group[0].row_index) for c in group]
