"""Rows with several adapters and without one in a batch: each equals the row alone and peft's merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.engine.engine import Engine
from batchgen.errors import UsageError
from batchgen.request.completion import Completion
from tests.engine.reference import Greedy, eager_greedy, save_with_words, shared_prefix_prompts
from tests.models.adapters import KINDS, merge_adapter, save_adapter
from tests.models.tiny import VOCAB

PROMPTS = 16
NEW_TOKENS = 8
NAMES = (None, "two", "all")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    """(folder, adapters, prompts, {adapter: greedy tokens of the merged model})."""
    root = tmp_path_factory.mktemp("lora")
    base = save_with_words("qwen3", root / "base")
    adapters = {
        name: str(save_adapter(base, root / name, seed=i, **KINDS[name])) for i, name in enumerate(("two", "all"))
    }
    prompts = shared_prefix_prompts(PROMPTS, VOCAB, seed=3)
    expected = {None: eager_greedy(base, prompts, NEW_TOKENS)}
    for name, path in adapters.items():
        expected[name] = eager_greedy(merge_adapter(base, Path(path), root / f"{name}-merged"), prompts, NEW_TOKENS)
    return base, adapters, prompts, expected


def rows(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Every prompt without an adapter and with each one, so that equal ids have different cache keys."""
    common = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "return_logprob": True}
    return [
        {"id": f"{i}-{name}", "input_ids": prompt, "lora_path": name, **common}
        for i, prompt in enumerate(prompts)
        for name in NAMES
    ]


def assert_merged(results: list[Completion], expected: dict[str | None, Greedy]) -> None:
    for result in results:
        number, name = (result.id or "").split("-")
        expected[None if name == "None" else name].assert_same(int(number), result)


@pytest.mark.field("lora_path")
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_mixed_batch_equals_the_merged_models(world, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch, alone, and in small chunks in a pool with preemptions."""
    base, adapters, prompts, expected = world
    options = {"model_impl": implementation, "dtype": "float32", "page_size": 4, "lora": adapters}
    engine = Engine(str(base), **options)
    batch = rows(prompts)
    assert_merged(list(engine.generate(batch)), expected)
    tree = engine.last_run.workload.tree
    distinct = {(row["lora_path"], *row["input_ids"][: n + 1]) for row in batch for n in range(len(row["input_ids"]))}
    assert tree.distinct_tokens == len(distinct)
    assert engine.last_run.scheduler.stats.prompt_tokens == len(distinct)
    for row in batch[:6]:
        assert_merged(list(engine.generate([row])), expected)
    small = Engine(str(base), **options, max_tokens_per_step=24, max_num_seqs=16)
    longest = max(len(p) for p in prompts) + NEW_TOKENS
    small.order, small.admission = "tree", "free"  # rows are to be preempted
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 2 * longest // 4 + 4)
    assert_merged(list(small.generate(batch)), expected)
    assert small.last_run.scheduler.stats.preemptions > 0


@pytest.mark.field("lora_path")
def test_samples_and_copies_keep_their_adapter(world) -> None:
    base, adapters, prompts, expected = world
    engine = Engine(str(base), dtype="float32", lora=adapters, seed=3)
    sampled = [
        {"id": f"{name}", "input_ids": prompts[0], "lora_path": name, "n": 3, "max_new_tokens": 6} for name in NAMES
    ]
    together = {(c.id, c.sample_index): c.output_ids for c in engine.generate(sampled)}
    alone = {(c.id, c.sample_index): c.output_ids for row in sampled for c in engine.generate([row])}
    assert together == alone
    assert len({tuple(ids or ()) for ids in together.values()}) > 3
    again = [{**row, "id": None} for row in rows(prompts[:1]) * 2]
    copies = [c for c in engine.generate(again, ordered=True) if c.dedup_of is not None]
    assert [(c.row_index, c.dedup_of) for c in copies] == [(3, 0), (4, 1), (5, 2)]
    for copy, name in zip(copies, NAMES, strict=True):
        expected[name].assert_same(0, copy)


@pytest.mark.field("lora_path", "model")
def test_names_of_adapters(world) -> None:
    base, adapters, prompts, expected = world
    engine = Engine(str(base), dtype="float32", lora=adapters)
    common = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}

    def line(name: str, **body: Any) -> dict[str, Any]:
        body = {"prompt": prompts[0], **common, **body}
        return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}

    good = [
        line("a", model=f"{base}:two"),
        line("b", model="base:all"),
        line("c", model="*:all", lora_path="all"),
        line("d", model="*", lora_path="two"),
        line("e", model=str(base)),
        {"id": "f", "input_ids": prompts[0], "model": "base:two", **common},
        {"id": "g", "input_ids": prompts[0], "sampling_params": {"lora_path": "all", **common}},
    ]
    wanted = ["two", "all", "all", "two", None, "two", "all"]
    for result, name in zip(engine.generate(good, ordered=True), wanted, strict=True):
        expected[name].assert_same_ids(0, result)
    bad = [
        (line("a", model="base:none"), "unknown_adapter", "model"),
        (line("b", lora_path="none"), "unknown_adapter", "lora_path"),
        ({"id": "c", "input_ids": [5], "lora_path": "TWO"}, "unknown_adapter", "lora_path"),
        (line("d", model="base:two", lora_path="all"), "invalid_field", "lora_path"),
        (line("e", model="other:two"), "invalid_field", "model"),
        ({"id": "f", "input_ids": [5], "lora_path": ""}, "invalid_field", "lora_path"),
        ({"id": "g", "input_ids": [5], "lora_path": 3}, "invalid_field", "lora_path"),
    ]
    for result, (_, code, param) in zip(engine.generate([row for row, _, _ in bad], ordered=True), bad, strict=True):
        assert (result.error.code, result.error.param) == (code, param)
        assert code != "unknown_adapter" or "all, two" in result.error.message


def test_adapters_in_the_python_api(world) -> None:
    base, adapters, _, _ = world
    pairs = [("two", adapters["two"])]
    for given in (dict(pairs), pairs, [f"two={adapters['two']}"], f"two={adapters['two']}"):
        assert list(Engine(str(base), dtype="float32", lora=given).model.spec.adapters) == ["two"]
    with pytest.raises(UsageError, match="'two' twice"):
        Engine(str(base), lora=pairs * 2)
    with pytest.raises(UsageError, match="must be NAME=PATH"):
        Engine(str(base), lora="two")
