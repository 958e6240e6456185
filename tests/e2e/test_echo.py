"""`echo`: the prompt's text before the output's text, for every kind of prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen import Engine
from batchgen.text.tokens.detokenize import echo_text
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.e2e.engines import generate
from tests.e2e.rows import prompts, rows_of, write_lines
from tests.e2e.runner import run
from tests.text.conftest import KINDS, save_tokenizer

GREEDY = {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}


@pytest.mark.field("echo", "prompt", "text", "input_ids", "messages")
def test_the_text_is_the_prompt_and_the_output(engine: Engine) -> None:
    texts = [*prompts(20, 2), "<|im_start|>kept as it is<|im_end|>", "Zażółć 東京\n"]
    rows: list[dict[str, Any]] = [
        {"text": text, **GREEDY, "stop": ["a"], "min_new_tokens": i % 5} for i, text in enumerate(texts)
    ]
    plain = generate(engine, rows)
    for before, after, text in zip(
        plain, generate(engine, [{**row, "echo": True} for row in rows]), texts, strict=True
    ):
        assert after.text == text + (before.text or "")
        assert (after.output_ids, after.matched_text) == (before.output_ids, before.matched_text)


@pytest.mark.field("echo")
def test_echo_of_conversations_and_token_ids(engine: Engine) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], **GREEDY}
    ids = {"input_ids": engine.tokenizer.encode(["naïve"])[0], **GREEDY, "skip_special_tokens": False}
    for row, text in ((chat, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), (ids, "naïve")):
        before, after = generate(engine, [row, {**row, "echo": True}])
        assert after.text == text + (before.text or "")


@pytest.mark.field("echo")
@pytest.mark.parametrize("kind", KINDS)
def test_echo_and_output_join_to_the_text_of_all_tokens(tmp_path: Path, kind: str) -> None:
    """Decoders that strip the space of a first token must not join two words."""
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, kind))
    for text in ("The quick brown fox jumps", "Hello there, how are you", "a b"):
        ids = tokenizer.encode([text])[0]
        for cut in range(2, len(ids)):
            prompt, output = ids[:cut], ids[cut:]
            joined = echo_text(prompt, tokenizer) + tokenizer.decode_output(output)
            assert joined == tokenizer.decode(ids), (prompt, output)


@pytest.mark.field("echo", "logprobs", "logprob_start_len", "max_new_tokens")
def test_echo_with_logprobs_of_the_endpoint_returns_prompt_logprobs(model: Path, tmp_path: Path) -> None:
    text = "The quick brown fox"
    body = {"model": "*", "prompt": text, "temperature": 0, "max_tokens": 5, "echo": True, "logprobs": 2}
    line = {"method": "POST", "url": "/v1/completions"}
    plain = {"text": text, "temperature": 0, "max_new_tokens": 5, "return_logprob": True, "top_logprobs_num": 2}
    rows = [
        {"custom_id": "echoed", **line, "body": body},
        {"id": "plain", **plain, "logprob_start_len": 0},
        {"custom_id": "late", **line, "body": {**body, "logprob_start_len": 3}},
        {"custom_id": "no output", **line, "body": {**body, "max_tokens": 0}},
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    run(["run", source, "--model", model, "--dtype", "float32", "-o", "out.parquet"], tmp_path)
    echoed, native, late, empty = rows_of(tmp_path / "out.parquet")
    assert (echoed["text"], empty["text"]) == (text + native["text"], text)
    assert (empty["finish_reason"], empty["completion_tokens"], empty["output_logprobs"]) == ("length", 0, [])
    for row in (echoed, empty):
        assert row["input_logprobs"][0] is None
        assert len(row["input_logprobs"]) == row["prompt_tokens"]
        assert row["input_top_ids"] == native["input_top_ids"]
        assert row["input_logprobs"][1:] == pytest.approx(native["input_logprobs"][1:], abs=1e-4)
    assert len(echoed["output_logprobs"]) == 5
    assert late["input_logprobs"] == pytest.approx(echoed["input_logprobs"][3:], abs=1e-4)
