"""Bytes of memory that each row of a large job needs, counted while it is planned."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from batchgen.data.row_shapes import RowShapes
from batchgen.data.spool import BlobSpool, TokenSpool
from batchgen.data.store.expected import ExpectedKeys
from batchgen.engine.workload import plan_workload
from batchgen.job.rows.ingest import RowTexts
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable

ROWS = 100_000


def bytes_per_row(make: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `make` returns, the bytes that it keeps and the most that it needs, each by row."""
    tracemalloc.start()
    try:
        made = make()
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return made, kept / ROWS, most / ROWS


def short_rows(tokens: TokenSpool, spool: BlobSpool) -> tuple[RequestTable, RowTexts, ExpectedKeys, RowShapes]:
    """Short rows with one prompt each, all different, as an input of 100,000 lines."""
    params = [SamplingParams(temperature=float(i), ignore_eos=True) for i in range(2)]
    table = RequestTable(tokens=tokens)
    texts, expected, shapes = RowTexts(spool), ExpectedKeys(), RowShapes()
    for row in range(ROWS):
        digits = [300 + int(digit) for digit in str(row * 7919 % ROWS)]
        table.append(row, 0, [500, 40, *digits, 70, 80], params[row % 2], hash(row * 1.5) & (2**63 - 1), 1 + row % 2)
        texts.add(row, orjson.dumps([f"request-{row}", None, None]))
        expected.add(row)
        shapes.add(row)
    return table, texts, expected, shapes


def test_bytes_of_a_row(tmp_path: Path) -> None:
    config = SchedulerConfig(1 << 22, 16, 256, 4096)
    with TokenSpool(tmp_path / "tokens") as tokens, BlobSpool(tmp_path / "texts") as texts:
        rows, kept, most = bytes_per_row(lambda: short_rows(tokens, texts))
        assert kept < 25, "rows that were read"
        workload, kept, most = bytes_per_row(lambda: plan_workload(rows[0]))
        assert kept < 42, "the prefix tree"
        assert most < 110, "building the prefix tree"
        planned = workload.tree, workload.samples, workload.max_tokens
        scheduler, kept, most = bytes_per_row(lambda: Scheduler(*planned, config, workload.kinds()))
        assert kept < 55, "the scheduler"
        assert most < 125, "ordering the rows"
        _, kept, most = bytes_per_row(scheduler.work_left)
        assert most < 65, "forecasting the work"
