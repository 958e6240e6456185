"""`suffix` through the engine: in a fill-in-the-middle prompt if the tokenizer supports it, else after the text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from batchgen import Engine
from tests.e2e.engines import generate, outcomes
from tests.e2e.rows import prompts
from tests.models.tiny import save_tiny

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
GREEDY = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def fim_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with the fill-in-the-middle tokens of a code model."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("fim") / "model")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    generation = (folder / "generation_config.json").read_text()
    save_tiny("llama", folder, vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=256)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(generation)
    return folder


@pytest.fixture(scope="module")
def fim_engine(fim_model: Path) -> Engine:
    return Engine(str(fim_model), dtype="float32")


@pytest.mark.field("suffix")
def test_a_suffix_equals_the_written_out_fill_in_the_middle_prompt(fim_engine: Engine) -> None:
    marks = [fim_engine.tokenizer.token_to_id(mark) for mark in MARKS]
    rows: list[dict[str, Any]] = []
    written_out: list[dict[str, Any]] = []
    for i, text in enumerate(prompts(20, 7)):
        after = ["\n", " end", "dog."][i % 3]
        more = {"temperature": i % 2, "max_new_tokens": 3 + i, "seed": i, "n": 1 + i % 2, "id": str(i)}
        rows.append({"text": text, "suffix": after, **more})
        before, behind = (fim_engine.tokenizer.encode_plain([part])[0] for part in (text, after))
        ids = [*fim_engine.tokenizer.prefix_ids, marks[0], *before, marks[1], *behind, marks[2]]
        written_out.append({"input_ids": ids, "stop_token_ids": marks, **more})
    assert outcomes(generate(fim_engine, rows)) == outcomes(generate(fim_engine, written_out))


@pytest.mark.field("suffix")
def test_fill_in_the_middle_tokens_stop_a_row_with_a_suffix(fim_engine: Engine) -> None:
    pad = fim_engine.tokenizer.token_to_id(MARKS[3])
    row = {"text": "def f():", "suffix": "return", **GREEDY, "logit_bias": {str(pad): 100}, "ignore_eos": True}
    late = {**row, "min_new_tokens": 4}
    free = {"text": "def f():", **GREEDY, "logit_bias": {str(pad): 100}, "ignore_eos": True}
    stopped, waited, unbound = generate(fim_engine, [row, late, free])
    assert (stopped.text, stopped.stop_kind, stopped.matched_stop) == ("", "token", str(pad))
    assert (waited.completion_tokens, waited.matched_stop) == (5, str(pad)), "masked until the minimum"
    assert unbound.finish_reason == "length", "without a suffix they do not stop"


@pytest.mark.field("suffix", "echo")
def test_without_fill_in_the_middle_the_suffix_follows_the_text(engine: Engine) -> None:
    rows = [{"text": text, **GREEDY, "stop": "e", "no_stop_trim": i % 2 == 0} for i, text in enumerate(prompts(9, 3))]
    for before, after, row in zip(
        generate(engine, rows),
        generate(engine, [{**row, "suffix": " END", "echo": True} for row in rows]),
        rows,
        strict=True,
    ):
        assert after.text == f"{row['text']}{before.text} END"
        assert (after.output_ids, after.matched_stop) == (before.output_ids, before.matched_stop)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "suffix": "!", **GREEDY}
    (done,) = generate(engine, [chat])
    assert (done.text or "").endswith("!")
