"""A job of a model with recurrent layers, with every kind of row: killed and resumed in other batches, and sharded."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from tests.e2e.mixed import ADAPTERS, PROCESSOR, mixed_rows
from tests.e2e.model import save_model
from tests.e2e.rows import assert_same, read, write_lines
from tests.e2e.runner import parts_of, run, start
from tests.engine.test_hybrid import TYPES
from tests.models.adapters import KINDS, save_adapter


def test_rows_of_every_kind_are_killed_resumed_and_sharded(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", model_type="qwen3_next", num_hidden_layers=3, **TYPES["qwen3_next"])
    adapters = {name: save_adapter(model, tmp_path / name, seed=i, **KINDS[name]) for i, name in enumerate(ADAPTERS)}
    write_lines(tmp_path / "in.jsonl", mixed_rows(24, seed=6))
    named = [word for name, path in adapters.items() for word in ("--lora", f"{name}={path}")]
    processor = ["--logit-processor", f"{PROCESSOR}=tests.e2e.processors:boost", "--events", "events.jsonl"]
    command = ["run", "in.jsonl", "--model", model, "--dtype", "float32", *named, *processor]
    run([*command, "-o", "whole.parquet"], tmp_path)
    whole = read(tmp_path / "whole.parquet")
    assert whole["scores"].null_count < len(whole) > whole["constraint_ok"].null_count

    out = tmp_path / "out.parquet"
    small = ["--commit-every", "6", "--max-num-seqs", "4", "--max-tokens-per-step", "31", "--page-size", "8"]
    job = start([*command, *small, "-o", out], tmp_path)
    job.wait_for(lambda: len(parts_of(out)) >= 2)
    assert job.kill_after(0)
    report = run([*command, "-o", out, "--report", "-"], tmp_path).report
    assert report["rows_resumed"] > 3
    assert_same(read(out), whole, ignore=("cached_tokens",))
    states = [pq.read_table(tmp_path / f"{name}.hidden.parquet") for name in ("out", "whole")]
    assert_same(*(table.drop_columns("values") for table in states))
    assert len(states[0]) > 3

    for index in (1, 0):
        run([*command, "-o", "shards", "--shard", f"{index}/2"], tmp_path)
    run(["merge", "shards", "-o", "merged.parquet"], tmp_path)
    assert_same(read(tmp_path / "merged.parquet"), whole, ignore=("cached_tokens", "dedup_of"))
