"""500 rows in one batch, each with a random draw of all fields, against each of them run alone.

Prefixes are shared, prompts are computed in chunks, and the pool is so small that samples are preempted; on both model
paths (fewer rows through transformers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen import Engine
from tests.e2e.mixed import FIELD_DRAWS, mixed_options, mixed_rows
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run, start
from tests.e2e.same import Done, assert_close, assert_equal, compare

ROWS = {"native": 500, "transformers": 100}
CHUNK = 50
"""Rows run alone by one test."""
CASES = [(path, start) for path, count in ROWS.items() for start in range(0, count, CHUNK)]
SMALL = {"page_size": 8, "max_num_seqs": 48, "max_tokens_per_step": 64}
PAGES = {"native": 48, "transformers": 34}
"""Of the batch's pool: little more than one row of the longest context."""


@pytest.fixture(scope="module")
def options(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the rows' adapters and processors need of the engine."""
    return mixed_options(model, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engines(model: Path, options: dict[str, Any]) -> Callable[[str], Engine]:
    """A path's engine with room for everything; loaded once."""
    loaded: dict[str, Engine] = {}

    def engine(path: str) -> Engine:
        if path not in loaded:
            loaded[path] = Engine(str(model), dtype="float32", model_impl=path, page_size=8, **options)
        return loaded[path]

    return engine


@pytest.fixture(scope="module")
def batches(engines: Callable[[str], Engine]) -> Callable[[str], Done]:
    """Everything that one batch of a path's rows gave; run once."""
    done: dict[str, Done] = {}

    def batch(path: str) -> Done:
        if path not in done:
            engine = engines(path)
            small = Engine.from_parts(replace(engine.config, **SMALL), engine.model, engine.tokenizer)
            small.order, small.admission = "tree", "free"  # rows are to be preempted
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("batchgen.engine.engine.pool_pages", lambda *_: PAGES[path])
                done[path] = Done.of(small, mixed_rows(ROWS[path], seed=1))
            assert small.last_run is not None
            stats = small.last_run.scheduler.stats
            assert stats.preemptions > 0
            assert stats.prompt_tokens < small.last_run.workload.tree.prompt_tokens * 0.8, "prefixes are shared"
        return done[path]

    return batch


@pytest.mark.field(
    "temperature", "top_k", "top_p", "min_p", "seed", "n", "best_of", "stop", "stop_token_ids", "ignore_eos",
    "no_stop_trim", "min_new_tokens", "max_new_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "return_logprob", "top_logprobs_num", "echo", "suffix", "lora_path", "text", "input_ids", "input_embeds",
    "messages", "sampling_params", "prompt", "logprobs", "top_logprobs", "stop_regex", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "logprob_start_len",
    "token_ids_logprob", "return_text_in_logprobs", "custom_logit_processor", "custom_params", "stream",
    "completion", "completions", "return_hidden_states", "json_schema", "regex", "ebnf", "choice", "response_format",
    "structural_tag",
)  # fmt: skip
@pytest.mark.parametrize(("path", "start"), CASES)
def test_every_row_is_as_if_alone(
    engines: Callable[[str], Engine], batches: Callable[[str], Done], path: str, start: int
) -> None:
    together = batches(path)
    engine = engines(path)
    for row in mixed_rows(ROWS[path], seed=1)[start : start + CHUNK]:
        alone = Done.of(engine, [row])
        name = row.get("id") or row["custom_id"]
        assert alone.completions.keys() == {key for key in together.completions if key[0] == name}
        assert alone.events.keys() == {key for key in together.events if key[0] == name}
        for key, completion in alone.completions.items():
            assert_equal(together.completions[key], completion, row)
        for key, events in alone.events.items():
            for one, other in zip(together.events[key], events, strict=True):
                compare(one.logprob, other.logprob)
                assert replace(one, logprob=None) == replace(other, logprob=None), row


def test_the_rows_are_mixed(batches: Callable[[str], Done]) -> None:
    """Each draw happens often, most rows run, and they end in every way."""
    rows = mixed_rows(ROWS["native"], seed=1)
    flat = [{**row, **row.get("sampling_params", {}), **row.get("body", {})} for row in rows]
    given = Counter(name for row in flat for name in row)
    done = batches("native")
    samples = done.completions.values()
    kinds = Counter((c.finish_reason, c.stop_kind) for c in samples if c.error is None)
    assert {("length", None), ("stop", "eos"), ("stop", "string"), ("stop", "token")} <= kinds.keys()
    assert sum(c.error is not None for c in samples) < len(rows) / 20
    for draw in FIELD_DRAWS:
        names = [name for name in draw.fields if name in given]
        assert not names or min(given[name] for name in names) >= 5, draw.fields


def test_a_job_killed_and_resumed_says_the_same(model: Path, options: dict[str, Any], tmp_path: Path) -> None:
    """Rows of every field, states and all, in a job that dies twice beside one that does not."""
    write_lines(tmp_path / "in.jsonl", mixed_rows(60, seed=7))
    named = [word for name, path in options["lora"].items() for word in ("--lora", f"{name}={path}")]
    named += [
        word for name, code in options["logit_processor"].items() for word in ("--logit-processor", f"{name}={code}")
    ]
    arguments = ["run", "in.jsonl", "--model", model, "--dtype", "float32", "--events", "events.jsonl", *named]
    run([*arguments, "-o", "whole.parquet"], tmp_path)
    slowly = [*arguments, "-o", "killed.parquet", "--commit-every", "4", "--max-num-seqs", "4"]
    parts = tmp_path / "killed.parquet.work" / "parts"
    for committed in (2, 5):
        attempt = start(slowly, tmp_path)
        attempt.wait_for(lambda n=committed: len(list(parts.glob("part-*.parquet"))) >= n)  # type: ignore[misc]
        assert attempt.kill_after(0)
    run(slowly, tmp_path)
    for suffix in ("parquet", "hidden.parquet"):
        whole, killed = rows_of(tmp_path / f"whole.{suffix}"), rows_of(tmp_path / f"killed.{suffix}")
        assert len(whole) == len(killed) > 10
        for left, right in zip(killed, whole, strict=True):
            for name in left:
                assert_close(left[name], right[name], f"{name} of {right['id']}")
