"""Seeds: a sampled row depends only on itself, the model and its seed: not on the shard, nor on a kill.

`--seed` changes the rows without one, and a recorded seed reproduces its samples.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

import pytest

from batchgen.engine.engine import Engine
from tests.e2e.rows import by_id, prompts, read, rows_of, write_lines
from tests.e2e.runner import parts_of, run, start

ROWS = 96
RESULT = ("output_ids", "text", "finish_reason", "stop_kind", "matched_stop", "seed")

Results = dict[str, tuple[Any, ...]]


def sampled_rows() -> list[dict[str, Any]]:
    """Sampled rows with ids, every other one with a `seed`; lengths and parameters differ."""
    rng = Random(3)
    rows: list[dict[str, Any]] = []
    for i, text in enumerate(prompts(ROWS, 3)):
        sampling = {"temperature": rng.choice([0.7, 1.0, 1.5]), "top_k": rng.choice([-1, 20]), "top_p": 0.95}
        row: dict[str, Any] = {"id": f"r{i}", "text": text, **sampling, "max_new_tokens": rng.randint(2, 30)}
        rows.append(row | ({"seed": i * 1_000_003} if i % 2 else {}))
    return rows


def results(engine: Engine, rows: list[dict[str, Any]]) -> Results:
    found: Results = {}
    for completion in engine.generate(rows, ordered=True):
        assert completion.error is None, completion.error
        assert completion.id is not None
        ids, *others = (getattr(completion, name) for name in RESULT)
        found[completion.id] = (list(ids or []), *others)
    return found


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Results:
    """The result of each row. tests/e2e/test_mixed.py shows that it does not depend on the batch."""
    found = results(engine, sampled_rows())
    assert len({tuple(ids) for ids, *_ in found.values()}) > ROWS // 2, "the rows must differ"
    for row in sampled_rows()[::12]:
        assert results(engine, [row]).items() <= found.items()
    return found


@pytest.fixture
def job(model: Path, tmp_path: Path) -> list[Any]:
    """Arguments of a job of the rows, without -o."""
    return ["run", write_lines(tmp_path / "in.jsonl", sampled_rows()), "--model", model, "--dtype", "float32"]


def by_row(path: Path) -> Results:
    return {name: tuple(row[column] for column in RESULT) for name, row in by_id(path).items()}


@pytest.mark.field("seed", "temperature")
def test_another_run_seed_changes_rows_without_a_seed(engine: Engine) -> None:
    """Every other row has a `seed`."""
    drawn = {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True}
    rows = [
        {"id": str(i), "text": text, **drawn, **({"seed": i} if i % 2 else {})} for i, text in enumerate(prompts(40, 3))
    ]
    other = Engine.from_parts(replace(engine.config, seed=1), engine.model, engine.tokenizer)
    before, after = ([*results(each, rows).values()] for each in (engine, other))
    assert before[1::2] == after[1::2], "rows with a `seed`"
    assert all(one[0] != another[0] for one, another in zip(before[::2], after[::2], strict=True))


@pytest.mark.field("n", "seed", "id")
def test_samples_differ_and_the_recorded_seed_reproduces_them(engine: Engine) -> None:
    row = {"id": "x", "text": "The quick", "temperature": 1.0, "top_k": -1, "top_p": 1.0, "max_new_tokens": 12}
    samples = list(engine.generate([row | {"n": 6}]))
    assert [c.sample_index for c in samples] == list(range(6))
    assert len({tuple(c.output_ids or ()) for c in samples}) == 6
    replayed = list(engine.generate([row | {"id": "y", "n": 6, "seed": samples[0].seed}]))
    assert [list(c.output_ids or ()) for c in replayed] == [list(c.output_ids or ()) for c in samples]


@pytest.mark.field("seed")
def test_a_killed_and_resumed_job_has_the_same_rows(job: list[Any], expected: Results, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    command = [*job, "-o", out, "--commit-every", "4", "--max-num-seqs", "4"]
    for parts in (2, 6):
        attempt = start(command, tmp_path)
        while attempt.alive and len(parts_of(out)) < parts:
            sleep(0.001)
        assert attempt.kill_after(0)
    run(command, tmp_path)
    assert by_row(out) == expected


def test_merged_shards_have_the_same_rows(job: list[Any], expected: Results, tmp_path: Path) -> None:
    for index in (2, 0, 1):
        run([*job, "-o", "shards", "--shard", f"{index}/3"], tmp_path)
    names = [f"part-{i:05d}-of-00003.parquet" for i in range(3)]
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == names
    assert not (tmp_path / "shards.work").exists()
    for index, name in enumerate(names):
        assert {row["row_index"] % 3 for row in rows_of(tmp_path / "shards" / name)} == {index}
    run(["merge", "shards", "-o", "merged.parquet"], tmp_path)
    assert by_row(tmp_path / "merged.parquet") == expected
    assert read(tmp_path / "merged.parquet")["row_index"].to_pylist() == list(range(ROWS))
