"""`--deterministic`: a row's tokens and logprobs have the same bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.engine.engine import Engine
from batchgen.kernels.cpu.library import loaded
from batchgen.request.completion import Completion
from tests.engine.reference import FLOATS, save_with_words, shared_prefix_prompts
from tests.models.adapters import KINDS, save_adapter
from tests.models.tiny import VOCAB

NEW_TOKENS = 8
CHUNKED = {"max_tokens_per_step": 24, "max_num_seqs": 9, "page_size": 4}


def bits(values: Any) -> bytes | None:
    return None if values is None else np.array(values, np.float32).tobytes()


def listed(values: Any) -> list[int] | None:
    return None if values is None else np.asarray(values).tolist()


def result_bits(done: Completion) -> tuple[Any, ...]:
    """Everything that depends on a row's logits, with floats as bits."""
    assert done.error is None, done.error
    return (
        *(listed(getattr(done, name)) for name in ("output_ids", "output_top_ids", "routed_experts")),
        *(bits(getattr(done, name)) for name in FLOATS),
        [(block.layer, block.values.tobytes()) for block in done.states or ()],
    )


def run(engine: Engine, rows: list[dict[str, Any]]) -> dict[tuple[str | None, int], tuple[Any, ...]]:
    return {(done.id, done.sample_index): result_bits(done) for done in engine.generate(rows)}


def mixed_rows(count: int, adapters: tuple[str, ...] = (), seed: int = 0) -> list[dict[str, Any]]:
    """Greedy and sampled rows with shared prefixes and all kinds of logprobs."""
    rows: list[dict[str, Any]] = []
    for i, ids in enumerate(shared_prefix_prompts(count, VOCAB, seed=seed)):
        row: dict[str, Any] = {"id": str(i), "input_ids": ids, "temperature": 0 if i % 3 == 0 else 0.9, "seed": i}
        row |= {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "return_logprob": True}
        row |= {
            1: {"top_p": 0.9},
            2: {"top_k": 20, "min_p": 0.02, "n": 2},
            3: {"top_logprobs_num": 4, "logprob_start_len": 0},
            4: {"token_ids_logprob": [3, 9], "frequency_penalty": 0.5, "presence_penalty": 0.2},
            5: {"repetition_penalty": 1.3, "logit_bias": {"7": 2.0}},
            6: {"min_p": 0.1, "allowed_token_ids": list(range(5, 90))},
        }.get(i % 8, {})
        if adapters:
            row["lora_path"] = (None, *adapters)[i % (len(adapters) + 1)]
        rows.append(row)
    return rows


def special_rows() -> list[dict[str, Any]]:
    """One row of each kind with separate code."""
    prompt = [7, 8, 9, 10, 11, 12]
    asked = {"max_new_tokens": NEW_TOKENS, "return_logprob": True, "top_logprobs_num": 2, "ignore_eos": True}
    return [
        {"id": "texts", "input_ids": prompt, "completions": [[5, 6], [40], [7, 7, 7, 9]]},
        {"id": "embeds", "input_embeds": np.random.default_rng(0).normal(0, 0.3, (9, 64)).tolist(), **asked},
        {"id": "best", "input_ids": prompt, "n": 1, "best_of": 3, **asked},
        {"id": "words", "input_ids": prompt, "bad_words": ["w3 w4"], **asked},
        {"id": "prompt", "input_ids": prompt * 5, "logprob_start_len": 0, **asked, "max_new_tokens": 0},
        {"id": "stop", "input_ids": prompt, "stop_token_ids": list(range(0, VOCAB, 5)), "min_new_tokens": 3, **asked},
    ]


def preempting(monkeypatch: pytest.MonkeyPatch, engine: Engine, rows: list[dict[str, Any]]) -> dict[Any, Any]:
    longest = max(len(row.get("input_ids", ())) for row in rows) + NEW_TOKENS
    with monkeypatch.context() as patch:
        patch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 2 * longest // engine.config.page_size + 4)
        patch.setattr(engine, "order", "tree")
        patch.setattr(engine, "admission", "free")
        found = run(engine, rows)
    assert engine.last_run.scheduler.stats.preemptions > 0
    return found


def assert_deterministic(
    monkeypatch: pytest.MonkeyPatch | None, folder: Path, rows: list[dict[str, Any]], alone: int = 8, **options: Any
) -> None:
    """The same results together, shuffled, in small chunks and pages, preempted (with `monkeypatch`), and alone."""
    engine = Engine(str(folder), deterministic=True, **options)
    together = run(engine, rows)
    order = np.random.default_rng(1).permutation(len(rows))
    assert run(engine, [rows[i] for i in order]) == together
    for row in rows[:alone] + rows[-4:]:
        for key, value in run(engine, [row]).items():
            assert value == together[key], row
    config = type(engine.config)(model=str(folder), deterministic=True, **{**options, **CHUNKED})
    chunked = Engine.from_parts(config, engine.model, engine.tokenizer)
    assert (run(chunked, rows) if monkeypatch is None else preempting(monkeypatch, chunked, rows)) == together


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("native", "bfloat16"), pytest.param("transformers", "float32", marks=pytest.mark.slow)],
)
def test_rows_of_every_kind(implementation: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama, with adapters."""
    folder = save_with_words("llama", tmp_path / "base")
    names = ("two", "all")
    adapters = {name: str(save_adapter(folder, tmp_path / name, seed=i, **KINDS[name])) for i, name in enumerate(names)}
    rows = mixed_rows(20, names) + special_rows()
    assert_deterministic(monkeypatch, folder, rows, model_impl=implementation, dtype=dtype, lora=adapters)


@pytest.mark.parametrize("attention", ["compiled", "torch"])
def test_prompts_of_several_blocks(attention: str, tmp_path: Path) -> None:
    """Tree nodes that are longer than attention's blocks, with prefix groups."""
    if attention == "compiled" and not loaded():
        pytest.skip("no C++ compiler here")
    folder = save_with_words("llama", tmp_path, max_position_embeddings=1024)
    rng = np.random.default_rng(0)
    root, *stems = ([int(token) for token in rng.integers(3, VOCAB, length)] for length in (210, 260, 75))
    prompts = [root + stem + rng.integers(3, VOCAB, 5 + 9 * i).tolist() for stem in stems for i in range(4)]
    rows = [row | {"input_ids": prompt} for row, prompt in zip(mixed_rows(len(prompts)), prompts, strict=True)]
    assert_deterministic(None, folder, rows, 3, dtype="float32", attention=attention)


def test_among_256(tmp_path: Path) -> None:
    folder = save_with_words("qwen3", tmp_path)
    rows = mixed_rows(256, seed=2)
    engine = Engine(str(folder), deterministic=True, dtype="float32", max_num_seqs=256)
    together = run(engine, rows)
    for row in rows[::32]:
        assert all(together[key] == value for key, value in run(engine, [row]).items())


@pytest.mark.parametrize("model_type", [pytest.param("gemma2", marks=pytest.mark.slow), "gpt_oss", "deepseek_v3"])
def test_library_models(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_with_words(model_type, tmp_path)
    assert_deterministic(monkeypatch, folder, mixed_rows(10), 2, model_impl="transformers", dtype="float32")


def test_states_and_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_with_words("qwen3_moe", tmp_path)
    asked = (
        {"return_hidden_states": {"layers": [0, 2, -1], "tokens": "all"}},
        {"return_routed_experts": True},
        {"return_hidden_states": {"layers": [-1], "tokens": "output"}},
    )
    rows = [row | asked[i % 3] for i, row in enumerate(mixed_rows(12))]
    assert_deterministic(monkeypatch, folder, rows, 3, dtype="float32")
