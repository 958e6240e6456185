"""Models with sliding windows, whose layers free the pages behind them, against transformers' eager model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.engine.engine import Engine
from batchgen.engine.memory.kv_budget import sized_groups
from batchgen.errors import UsageError
from batchgen.plan.cache_groups import CacheGroup
from batchgen.plan.window_pages import WindowGroup
from tests.engine.reference import assert_all_same, eager_greedy, save_with_words, shared_prefix_prompts
from tests.models.tiny import VOCAB, WINDOW

NEW = 16
SIZE = 4
ROW = WindowGroup((), 1, WINDOW).most_pages(SIZE)


SLOW = "gemma2 gemma4_text gpt_oss phi3 cohere2 olmo3 qwen2 starcoder2 ministral mimo_v2_flash exaone4"
TYPES = ["gemma3_text", "mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in str.split(SLOW))]
"""Layers with a window natively (`mistral`, all; `qwen2`, some) and through transformers; `test_parity` has more."""


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), dtype="float32", page_size=SIZE, **{"max_tokens_per_step": 2048, **options})


@pytest.mark.parametrize("model_type", TYPES)
def test_windows_equal_eager(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together and alone; shuffled in small chunks; preempted, which computes lost windows again."""
    folder = save_with_words(model_type, tmp_path)
    prompts = shared_prefix_prompts(12, VOCAB, seed=3)
    expected = eager_greedy(folder, prompts, NEW)
    everything = list(range(len(prompts)))
    engine = engine_of(folder)
    expected.check(engine, prompts, everything)
    longest = max(everything, key=lambda i: len(prompts[i]))
    expected.check(engine, prompts, [longest])
    alone = engine.last_run
    assert alone.scheduler.stats.peak_window_pages == -(-len(prompts[longest]) // SIZE), "the prompt, in one chunk"

    engine = engine_of(folder, max_tokens_per_step=24, max_num_seqs=8)
    expected.check(engine, prompts, [longest])
    alone = engine.last_run
    assert alone.scheduler.stats.peak_window_pages <= 24 // SIZE + ROW < alone.scheduler.stats.peak_pages
    expected.check(engine, prompts, everything[::-1])

    expected.check_preempted(engine, prompts, monkeypatch)


def test_what_rows_return_does_not_depend_on_lost_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt logprobs, states and samples, in a pool that holds little more than one row, in either kind of layers."""
    save_with_words("qwen2", tmp_path)
    prompts = shared_prefix_prompts(12, VOCAB, seed=5)
    rows = [
        {
            "input_ids": prompt,
            "sampling_params": {"seed": i, "max_new_tokens": NEW, "ignore_eos": True, "n": 1 + i % 3},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_hidden_states": True,
        }
        for i, prompt in enumerate(prompts)
    ]
    expected = list(engine_of(tmp_path).generate(rows, ordered=True))
    longest = max(map(len, prompts)) + NEW
    engine = engine_of(tmp_path, max_tokens_per_step=24, max_num_seqs=6)
    engine.order, engine.admission = "tree", "free"
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: longest // SIZE + 3)
    least = WindowGroup((), 1, WINDOW).least_pages(SIZE)

    def small(*given: Any) -> list[CacheGroup]:
        groups = sized_groups(*given)
        return [replace(group, num_pages=least) if isinstance(group, WindowGroup) else group for group in groups]

    monkeypatch.setattr("batchgen.engine.engine.sized_groups", small)
    assert_all_same(engine.generate(rows, ordered=True), expected)
    stats = engine.last_run.scheduler.stats
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    assert stats.peak_window_pages < least


def test_rows_shorter_than_the_window_are_planned_without_it(tmp_path: Path) -> None:
    save_with_words("gemma2", tmp_path, sliding_window=200)
    engine = engine_of(tmp_path)
    prompts = shared_prefix_prompts(4, VOCAB, seed=3)
    eager_greedy(tmp_path, prompts, NEW).check(engine, prompts, [0, 1, 2, 3])
    assert list(engine.last_run.kv_peak_bytes) == ["full"]


@pytest.mark.parametrize(
    ("attention", "no_rope"),
    [("torch", [1, 0, 1]), ("compiled", [1, 1, 1]), pytest.param("triton", [1, 0, 1], marks=pytest.mark.slow)],
)
def test_attention_in_chunks_equals_eager(attention: str, no_rope: list[int], tmp_path: Path) -> None:
    """Llama 4 over several attention chunks: prompts in one step and in prefill chunks, borders while decoding."""
    folder = save_with_words("llama4_text", tmp_path, attention_chunk_size=8, no_rope_layers=no_rope)
    prompts = shared_prefix_prompts(10, VOCAB, seed=3)[: 4 if attention == "triton" else 10]
    assert max(map(len, prompts)) >= 3 * 8
    expected = eager_greedy(folder, prompts, NEW)
    more = {"max_num_seqs": 3, "deterministic": attention == "torch"}
    for options in ({"max_tokens_per_step": 13, "max_num_seqs": 5}, {}, more)[: 1 if attention == "triton" else 3]:
        engine = engine_of(folder, attention=attention, device="cpu", **options)
        expected.check(engine, prompts, [*range(len(prompts))])
        assert (len(engine.last_run.kv_peak_bytes) == 2) == (0 in no_rope)


def test_a_cache_that_does_not_hold_an_attention_chunk_is_refused(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 10, "no_rope_layers": [1] * 10, "moe_layers": []}
    save_with_words("llama4_text", tmp_path, attention_chunk_size=256, **layers)
    with pytest.raises(UsageError, match=r"1\.0 MiB do not hold the .* chunks of 256 tokens need; raise it, or lower"):
        list(engine_of(tmp_path, kv_memory="1MiB").generate([{"input_ids": [3] * 300, "max_new_tokens": 2}]))


def test_pages_may_not_lie_across_the_border_of_an_attention_chunk(tmp_path: Path) -> None:
    save_with_words("llama4_text", tmp_path, attention_chunk_size=10)
    row = {"input_ids": [3] * 20, "max_new_tokens": 2}
    with pytest.raises(UsageError, match="`page_size` 4 does not divide the model's attention chunks of 10 tokens"):
        list(engine_of(tmp_path).generate([row]))
    assert next(engine_of(tmp_path).generate([{**row, "input_ids": [3] * 8}])).error is None, "it has one chunk"
