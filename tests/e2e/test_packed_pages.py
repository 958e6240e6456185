"""A job that reuses packed copies of shared pages, compared with one that packs them again in each step.

Pages are freed and reallocated while the job runs.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from batchgen import Engine
from batchgen.kernels.cpu import attention, packed_pages
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.matmul import methods
from batchgen.kernels.cpu.packed_pages import PackedPages, PackedPool
from tests.e2e.mixed import VOCAB
from tests.e2e.same import RunResult, assert_equal
from tests.kernels.cpu.products import with_threads

pytestmark = pytest.mark.skipif(
    not loaded() or "dot" not in methods(torch.bfloat16), reason="this processor has no dot instruction for bfloat16"
)

PAGES = 60


def rows_of_groups(groups: int, seed: int) -> list[dict[str, Any]]:
    random = Random(seed)
    rows: list[dict[str, Any]] = []
    for group in range(groups):
        stem = [random.randrange(4, VOCAB) for _ in range(random.randint(50, 130))]
        for member in range(random.randint(4, 9)):
            ids = stem + [random.randrange(4, VOCAB) for _ in range(random.randint(1, 9))]
            row = {"id": f"{group}-{member}", "input_ids": ids, "max_new_tokens": random.randint(3, 30)}
            rows.append({**row, "temperature": random.choice([0, 0.9]), "seed": member, "return_logprob": True})
    return rows


def run(model: Path, rows: list[dict[str, Any]]) -> tuple[RunResult, PackedPages | None]:
    engine = Engine(str(model), dtype="bfloat16", page_size=16, max_num_seqs=24, max_tokens_per_step=96)
    engine.order = "tree"
    done = RunResult.of(engine, rows)
    assert engine.last_run is not None
    (pool,) = engine.last_run.pool.parts
    return done, pool.packed if isinstance(pool, PackedPool) else None


def test_reused_packed_pages_give_the_same_results(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a packed copy of a quarter of the pages."""
    pages = PAGES // 4
    monkeypatch.setattr(attention, "dots_are_faster", lambda: True)
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: PAGES)
    monkeypatch.setattr("batchgen.engine.engine.group_min_saving", lambda *_: 1)
    rows = rows_of_groups(12, seed=pages)
    with with_threads(2):
        monkeypatch.setattr(packed_pages, "dots_are_faster", lambda: False)
        want, without = run(model, rows)
        assert without is None
        monkeypatch.setattr(packed_pages, "dots_are_faster", lambda: True)
        monkeypatch.setattr(packed_pages, "PackedPages", lambda layers, _, size: PackedPages(layers, pages, size))
        got, packed = run(model, rows)
    assert got.completions.keys() == want.completions.keys()
    for row in rows:
        key = (row["id"], 0, 0)
        assert_equal(got.completions[key], want.completions[key], row)
        assert got.completions[key].output_ids == want.completions[key].output_ids
    assert packed is not None
    for stamps in packed.stamps:
        used = stamps[stamps > 0]
        assert np.unique(used).size > 3, "pages were reallocated and packed again"
        assert stamps.shape[1] == pages
