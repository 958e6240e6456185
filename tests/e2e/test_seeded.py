"""A sampled row depends only on itself, the model and the run seed: not on the batch, its position or the shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from batchgen.engine.engine import Engine
from batchgen.request.completion import Completion
from tests.e2e.rows import prompts

ROWS = 96
RESULT = ("output_ids", "text", "finish_reason", "stop_kind", "matched_stop", "seed")


def sampled_rows() -> list[dict[str, Any]]:
    """Sampled rows with ids, every other one with a `seed`; lengths and parameters differ."""
    rng = Random(3)
    rows: list[dict[str, Any]] = []
    for i, text in enumerate(prompts(ROWS, 3)):
        sampling = {"temperature": rng.choice([0.7, 1.0, 1.5]), "top_k": rng.choice([-1, 20]), "top_p": 0.95}
        row: dict[str, Any] = {"id": f"r{i}", "text": text, **sampling, "max_new_tokens": rng.randint(2, 30)}
        rows.append(row | ({"seed": i * 1_000_003} if i % 2 else {}))
    return rows


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(str(model), dtype="float32")


def results(completions: Iterator[Completion]) -> dict[str, tuple[Any, ...]]:
    found = {}
    for c in completions:
        assert c.error is None, c.error
        assert c.id is not None
        found[c.id] = (list(c.output_ids or []), *(getattr(c, name) for name in RESULT[1:]))
    return found


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, tuple[Any, ...]]:
    """The result of each row run alone."""
    found: dict[str, tuple[Any, ...]] = {}
    for row in sampled_rows():
        found |= results(engine.generate([row]))
    assert len({tuple(ids) for ids, *_ in found.values()}) > ROWS // 2, "the rows must differ"
    return found


@pytest.mark.field("seed", "temperature")
def test_one_batch_equals_single_rows(engine: Engine, alone: dict[str, tuple[Any, ...]]) -> None:
    assert results(engine.generate(sampled_rows())) == alone


def test_shuffled_rows_equal_single_rows(engine: Engine, alone: dict[str, tuple[Any, ...]]) -> None:
    rows = sampled_rows()
    Random(4).shuffle(rows)
    assert results(engine.generate(rows)) == alone


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3},
        {"max_num_seqs": 7, "max_tokens_per_step": 9},
        {"page_size": 1},
        {"page_size": 5, "max_tokens_per_step": 300},
        {"dedup": False},
    ],
    ids=str,
)
def test_other_limits_equal_single_rows(
    engine: Engine, alone: dict[str, tuple[Any, ...]], options: dict[str, Any]
) -> None:
    other = Engine.from_parts(replace(engine.config, **options), engine.model, engine.tokenizer)
    assert results(other.generate(sampled_rows())) == alone


def test_preempted_rows_equal_rows_that_were_not(engine: Engine, alone: dict[str, tuple[Any, ...]]) -> None:
    """Long rows in a pool of 255 pages: some are preempted and recomputed."""
    rows = [row | {"max_new_tokens": 4 * row["max_new_tokens"]} for row in sampled_rows()]
    expected = results(engine.generate(rows))
    config = replace(engine.config, page_size=8, kv_memory=1 << 20, max_num_seqs=ROWS, max_tokens_per_step=128)
    small = Engine.from_parts(config, engine.model, engine.tokenizer)
    small.order, small.admission = "tree", "free"  # so that rows are preempted
    assert results(small.generate(rows)) == expected
    assert small.last_run is not None
    assert small.last_run.scheduler.stats.preemptions > 0
    for name, (ids, *_) in expected.items():
        assert ids[: len(alone[name][0])] == alone[name][0]


def test_another_run_seed_changes_rows_without_a_seed(engine: Engine, alone: dict[str, tuple[Any, ...]]) -> None:
    other = Engine.from_parts(replace(engine.config, seed=1), engine.model, engine.tokenizer)
    found = results(other.generate(sampled_rows()))
    assert all(found[f"r{i}"] == alone[f"r{i}"] for i in range(1, ROWS, 2)), "rows with a `seed`"
    assert sum(found[f"r{i}"][0] != alone[f"r{i}"][0] for i in range(0, ROWS, 2)) > ROWS // 2 - 5


@pytest.mark.field("n", "seed", "id")
def test_samples_differ_and_the_recorded_seed_reproduces_them(engine: Engine) -> None:
    row = {"id": "x", "text": "The quick", "temperature": 1.0, "top_k": -1, "top_p": 1.0, "max_new_tokens": 12}
    samples = list(engine.generate([row | {"n": 6}]))
    assert [c.sample_index for c in samples] == list(range(6))
    assert len({tuple(c.output_ids or ()) for c in samples}) == 6
    replayed = list(engine.generate([row | {"id": "y", "n": 6, "seed": samples[0].seed}]))
    assert [list(c.output_ids or ()) for c in replayed] == [list(c.output_ids or ()) for c in samples]
