"""300 rows with random values of all fields in one batch, compared with each row run alone.

Prefixes are shared, prompts are computed in chunks, and the pool is so small that samples are preempted. On both model
paths, with fewer rows through transformers.
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
from tests.e2e.same import RunResult, assert_equal, compare

ROWS = {"native": 300, "transformers": 60}
CHUNK = 50
"""Number of rows that one test runs alone."""
CASES = [
    pytest.param(path, start, marks=[pytest.mark.slow] if 0 < start < 250 else [])
    for path, count in ROWS.items()
    for start in range(0, count, CHUNK)
]
SMALL = {"page_size": 8, "max_num_seqs": 48, "max_tokens_per_step": 64}
PAGES = {"native": 48, "transformers": 34}
"""Pages of the batch's pool: little more than one row of the longest context."""


@pytest.fixture(scope="module")
def options(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Engine options for the rows' adapters and logit processor."""
    return mixed_options(model, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engines(model: Path, options: dict[str, Any]) -> Callable[[str], Engine]:
    """Function that returns a path's engine with the default pool, loaded once."""
    loaded: dict[str, Engine] = {}

    def engine(path: str) -> Engine:
        if path not in loaded:
            loaded[path] = Engine(str(model), dtype="float32", model_impl=path, page_size=8, **options)
        return loaded[path]

    return engine


@pytest.fixture(scope="module")
def batches(engines: Callable[[str], Engine]) -> Callable[[str], RunResult]:
    """Function that returns the results of one batch of a path's rows, run once."""
    done: dict[str, RunResult] = {}

    def batch(path: str) -> RunResult:
        if path not in done:
            engine = engines(path)
            small = Engine.from_parts(replace(engine.config, **SMALL), engine.model, engine.tokenizer)
            small.order, small.admission = "tree", "free"  # so that rows are preempted
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("batchgen.engine.engine.pool_pages", lambda *_: PAGES[path])
                done[path] = RunResult.of(small, mixed_rows(ROWS[path], seed=1))
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
def test_every_row_of_a_batch_equals_the_row_alone(
    engines: Callable[[str], Engine], batches: Callable[[str], RunResult], path: str, start: int
) -> None:
    together = batches(path)
    engine = engines(path)
    for row in mixed_rows(ROWS[path], seed=1)[start : start + CHUNK]:
        alone = RunResult.of(engine, [row])
        name = row.get("id") or row["custom_id"]
        assert alone.completions.keys() == {key for key in together.completions if key[0] == name}
        assert alone.events.keys() == {key for key in together.events if key[0] == name}
        for key, completion in alone.completions.items():
            assert_equal(together.completions[key], completion, row)
        for key, events in alone.events.items():
            for one, other in zip(together.events[key], events, strict=True):
                compare(one.logprob, other.logprob)
                assert replace(one, logprob=None) == replace(other, logprob=None), row


def test_the_rows_cover_all_fields_and_ends(batches: Callable[[str], RunResult]) -> None:
    """Each field is drawn at least five times, most rows succeed, and samples end in every way."""
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
