"""`echo`: the prompt's text before the output's text, for every kind of prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen import Engine
from batchgen.text.echo_suffix import echo_text
from batchgen.text.tokenizer import Tokenizer
from tests.e2e.engines import ENGINES, build, generate
from tests.e2e.rows import prompts, rows_of, write_lines
from tests.e2e.runner import run
from tests.text.conftest import KINDS, save_tokenizer

GREEDY = {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest, model: Path) -> Engine:
    return build(model, request.param)


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


@pytest.mark.field("echo", "max_new_tokens")
def test_echo_without_new_tokens(engine: Engine, model: Path, tmp_path: Path) -> None:
    (done,) = generate(engine, [{"text": "Only this", "echo": True, "max_new_tokens": 0}])
    assert (done.text, done.finish_reason, done.completion_tokens) == ("Only this", "length", 0)
    body = {"model": "*", "prompt": "Only this", "echo": True, "max_tokens": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    run(["run", write_lines(tmp_path / "in.jsonl", [line]), "--model", model, "-o", "out.parquet"], tmp_path)
    assert [row["text"] for row in rows_of(tmp_path / "out.parquet")] == ["Only this"]


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


@pytest.mark.field("echo", "logprobs", "logprob_start_len")
@pytest.mark.parametrize("tokens", [0, 5])
def test_echo_with_logprobs_of_the_endpoint_returns_prompt_logprobs(model: Path, tmp_path: Path, tokens: int) -> None:
    body = {
        "model": "*",
        "prompt": "The quick brown fox",
        "temperature": 0,
        "max_tokens": tokens,
        "echo": True,
        "logprobs": 2,
    }
    line = {"custom_id": "line", "method": "POST", "url": "/v1/completions", "body": body}
    same = {"text": "The quick brown fox", "temperature": 0, "max_new_tokens": tokens, "return_logprob": True}
    native = {"id": "native", **same, "top_logprobs_num": 2, "logprob_start_len": 0}
    short = {**line, "custom_id": "short", "body": {**body, "logprob_start_len": 3}}
    source = write_lines(tmp_path / "in.jsonl", [line, native, short])
    run(["run", source, "--model", model, "--dtype", "float32", "-o", "out.parquet"], tmp_path)
    echo_text, plain, late = rows_of(tmp_path / "out.parquet")
    assert echo_text["text"] == "The quick brown fox" + plain["text"]
    assert echo_text["input_logprobs"][0] is None
    assert len(echo_text["input_logprobs"]) == echo_text["prompt_tokens"]
    assert echo_text["input_top_ids"] == plain["input_top_ids"]
    assert echo_text["input_logprobs"][1:] == pytest.approx(plain["input_logprobs"][1:], abs=1e-4)
    assert len(echo_text["output_logprobs"]) == tokens
    assert late["input_logprobs"] == pytest.approx(echo_text["input_logprobs"][3:], abs=1e-4)
