"""`best_of` and `--stop-on-repeat`, through the engine and the command."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from batchgen import Completion, Engine
from tests.e2e.engines import generate, outcomes
from tests.e2e.rows import prompts, rows_of, write_lines
from tests.e2e.runner import run
from tests.engine.test_repetition import brute_force

DRAWN = {"temperature": 1.2, "top_k": -1, "top_p": 1.0}
SPAN = 4


def build(model: Path, preempted: bool, **options: Any) -> Engine:
    """An engine; `preempted`: with a pool and steps so small that samples are preempted and recomputed."""
    small = {"kv_memory": 1 << 20, "page_size": 8, "max_tokens_per_step": 160} if preempted else {}
    engine = Engine(str(model), dtype="float32", **small, **options)
    if preempted:
        engine.order, engine.admission = "tree", "free"
    return engine


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "preempted"])
def engine(request: pytest.FixtureRequest, model: Path) -> Engine:
    return build(model, request.param)


def best_of_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i, text in enumerate(prompts(60, 4)):
        row = {"id": str(i), "text": text, **DRAWN, "max_new_tokens": 4 + i % 60, "seed": i, "n": 1 + i % 3}
        if i % 5:
            row["best_of"] = row["n"] + i % 4
        rows.append(row)
    return rows


def chosen(samples: list[Completion], keep: int) -> tuple[list[list[int]], int]:
    """(token ids of the `keep` samples with the highest mean logprob, best first; number of tokens of the others)"""
    means = [math.fsum(s.output_logprobs) / len(s.output_logprobs) for s in samples if s.output_logprobs is not None]
    ranked = sorted(range(len(samples)), key=lambda i: (-means[i], i))
    ids = [list(samples[i].output_ids or []) for i in ranked]
    return ids[:keep], sum(map(len, ids[keep:]))


@pytest.mark.field("best_of", "n", "seed")
def test_the_likeliest_samples_are_kept(engine: Engine) -> None:
    rows = best_of_rows()
    # All samples, to compare with those that are kept.
    everything = [{**row, "n": row.get("best_of", row["n"]), "best_of": None, "return_logprob": True} for row in rows]
    samples: dict[int, list[Completion]] = {}
    for completion in generate(engine, everything):
        samples.setdefault(completion.row_index, []).append(completion)
    kept: dict[int, list[Completion]] = {}
    for completion in generate(engine, rows):
        kept.setdefault(completion.row_index, []).append(completion)
    moved = 0
    for i, row in enumerate(rows):
        assert [c.sample_index for c in kept[i]] == list(range(row["n"]))
        assert all(c.output_logprobs is c.mean_logprob is c.cumulative_logprob is None for c in kept[i])
        assert all(c.dropped_tokens is None for c in kept[i][1:])
        if "best_of" not in row:
            assert kept[i][0].dropped_tokens is None
            continue
        ids, dropped = chosen(samples[i], row["n"])
        assert [list(c.output_ids or []) for c in kept[i]] == ids
        assert kept[i][0].dropped_tokens == dropped
        assert [c.cached_tokens for c in kept[i][1:]] == [c.prompt_tokens for c in kept[i][1:]], "counted once"
        moved += ids != [list(c.output_ids or []) for c in samples[i][: row["n"]]]
    assert moved > 5, "the ranking must change the order of some rows"
    assert (engine.last_run.scheduler.stats.preemptions > 0) == (engine.config.page_size == 8)


@pytest.mark.field("best_of")
def test_the_output_and_the_report_count_dropped_tokens(model: Path, tmp_path: Path) -> None:
    lines = [{"text": text, **DRAWN, "max_new_tokens": 7, "n": 2, "ignore_eos": True} for text in prompts(8, 1)]
    source = write_lines(tmp_path / "in.jsonl", [*lines, {"text": "none", "max_new_tokens": 0, "best_of": 3, "n": 2}])
    command = ["run", source, "--model", model, "--dtype", "float32", "--report", "-"]
    report = run([*command, "--best-of", "4", "-o", "out.parquet"], tmp_path).report
    rows = rows_of(tmp_path / "out.parquet")
    assert len(rows) == 18
    assert [row["dropped_tokens"] for row in rows] == [14, None] * 8 + [0, None]
    assert report["dropped_tokens"] == 8 * 14
    assert report["completion_tokens"] == 8 * 14
    assert report["rows_ok"] == 9


@pytest.mark.field("best_of")
def test_copies_of_identical_greedy_rows(engine: Engine) -> None:
    rows = [{"text": "twice", "temperature": 0, "max_new_tokens": 5, "ignore_eos": True, "n": 2, "best_of": 3}] * 2
    done = generate(engine, [{**row, "id": str(i)} for i, row in enumerate(rows)])
    assert [c.dedup_of for c in done] == [None, None, 0, 0]
    assert [c.dropped_tokens for c in done] == [5, None, 5, None]
    assert len({tuple(c.output_ids or []) for c in done}) == 1


def test_stop_on_repeat_ends_a_repeating_sample(engine: Engine, model: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "text": text,
            "temperature": 0 if i % 3 else 1.5,
            "top_k": 2,
            "max_new_tokens": 90,
            "ignore_eos": i % 4 > 0,
            "min_new_tokens": 30 if i % 6 == 3 else 0,
            "seed": i,
            **({"stop": ["e"]} if i % 5 == 4 else {}),
        }
        for i, text in enumerate(prompts(40, 6))
    ]
    free = generate(engine, rows)
    held = generate(build(model, engine.config.page_size == 8, stop_on_repeat=SPAN), rows)
    ended = 0
    for before, after, row in zip(free, held, rows, strict=True):
        ids = list(before.output_ids or [])
        least = row["min_new_tokens"]
        first = next((k for k in range(least, len(ids) + 1) if brute_force(ids[:k], SPAN)), None)
        if first is None or (first == len(ids) and before.finish_reason == "stop"):
            assert outcomes([after]) == outcomes([before])
            continue
        ended += 1
        assert after.finish_reason == "repetition"
        assert list(after.output_ids or []) == ids[:first]
        assert after.stop_kind is after.matched_stop is None
        assert (before.text or "").startswith((after.text or "").rstrip("\ufffd"))
    assert ended >= 3
