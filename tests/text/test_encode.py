from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request.fields.hidden_states import CaptureSupport
from batchgen.request.fields.prompts import TextPrompt, TokenPrompt
from batchgen.request.rows.parser import derive_seed, parse_row
from batchgen.request.rows.values import RowDefaults
from batchgen.request.table.request_table import ParsedRow
from batchgen.text.encode import EncodedPrompt, Encoder
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.cases import examples
from tests.text.conftest import SENTENCES, encode, encode_error, encode_result

DEFAULTS = RowDefaults()


def parsed(*values: dict[str, Any]) -> list[ParsedRow]:
    return [parse_row(value, index, DEFAULTS) for index, value in enumerate(values)]


def encode_all(encoder: Encoder, *values: dict[str, Any]) -> list[list[EncodedPrompt] | ErrorInfo]:
    rows = parsed(*values)
    results = list(encoder.encode_rows(enumerate(rows)))
    assert [index for index, _ in results] == list(range(len(rows)))
    return [result for _, result in results if result is not None]


def encode_one(encoder: Encoder, value: dict[str, Any]) -> EncodedPrompt:
    return encode(encoder, value)[0]


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder(tokenizer, tokenizer.vocab_size, context_length=64, run_seed=11)


@pytest.mark.field("text", "input_ids", "messages")
def test_prompts_of_all_sources_are_encoded_in_order(encoder: Encoder, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    results = encode_all(
        encoder,
        {"text": ["fox", "dog"]},
        {"input_ids": [[7, 8], [9]]},
        {"messages": chat},
        {"text": "<s>fox", "max_new_tokens": 5},
    )
    good = [result for result in results if not isinstance(result, ErrorInfo)]
    assert len(good) == 4
    prompt = parsed({"messages": chat})[0].prompts[0]
    assert [[list(p.ids) for p in row] for row in good] == [
        tokenizer.encode(["fox", "dog"]),
        [[7, 8], [9]],
        [tokenizer.encode_chat(prompt)],  # type: ignore[arg-type]
        tokenizer.encode(["fox"]),
    ]
    assert [p.prompt_index for p in good[0]] == [0, 1]
    assert good[3][0].max_new_tokens == 5


@pytest.mark.field("seed", "id")
def test_seeds_are_given_or_derived_from_run_seed_and_id(encoder: Encoder) -> None:
    assert encode_one(encoder, {"text": "a", "seed": -3}).seed == -3
    assert encode_one(encoder, {"text": "a", "id": "mine"}).seed == derive_seed(11, "mine")
    assert encode_one(encoder, {"text": "a"}).seed == derive_seed(11, "row-0")


@pytest.mark.field("max_new_tokens")
def test_max_new_tokens_is_clipped_to_the_context(encoder: Encoder) -> None:
    assert encode_one(encoder, {"input_ids": [5] * 60}).max_new_tokens == 4
    assert encode_one(encoder, {"input_ids": [5] * 60, "max_new_tokens": 3}).max_new_tokens == 3
    assert encode_one(encoder, {"input_ids": [5], "max_new_tokens": 0}).max_new_tokens == 0
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = encode_one(encoder, {**line, "body": body})
    assert prompt.max_new_tokens == 64 - len(prompt.ids), "chat lines are limited only by the context"


def test_a_prompt_that_fills_the_context_is_an_error_with_both_numbers(encoder: Encoder) -> None:
    error = encode_error(encoder, {"input_ids": [5] * 64})
    assert error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "64" in error.message
    assert "--truncate" in error.message
    assert encode(encoder, {"input_ids": [5] * 63})


@pytest.mark.parametrize(
    ("limit", "kept"), [(10, 54), (0, 63), (40, 32), (1000, 32)], ids=["asked", "none", "half", "half-at-most"]
)
def test_truncation_leaves_room_for_max_new_tokens(tokenizer: Tokenizer, limit: int, kept: int) -> None:
    ids = list(range(5, 105))
    row = {"input_ids": ids, "max_new_tokens": limit}
    left = encode_one(Encoder(tokenizer, tokenizer.vocab_size, 64, "left"), row)
    right = encode_one(Encoder(tokenizer, tokenizer.vocab_size, 64, "right"), row)
    assert list(left.ids) == ids[-kept:]
    assert list(right.ids) == ids[:kept]
    assert left.max_new_tokens == min(limit, 64 - kept)


def test_truncation_from_the_left_keeps_the_bos_of_text(tokenizer: Tokenizer) -> None:
    text = " ".join(SENTENCES)
    whole = tokenizer.encode([text])[0]
    prompt = encode_one(Encoder(tokenizer, tokenizer.vocab_size, 64, "left"), {"text": text, "max_new_tokens": 4})
    assert prompt.ids == [whole[0], *whole[-59:]]
    short = encode_one(Encoder(tokenizer, tokenizer.vocab_size, 64, "left"), {"text": "fox", "max_new_tokens": 64})
    assert short.ids == tokenizer.encode(["fox"])[0], "a prompt that fits is not truncated"


def test_ids_past_the_models_vocabulary_are_refused(encoder: Encoder, tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    assert encode_error(encoder, {"input_ids": [1, size]}).code == ErrorCode.TOKEN_OUT_OF_RANGE
    body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, size]}}
    assert encode_error(encoder, body).param == "prompt"
    stop = encode_error(encoder, {"text": "a", "stop_token_ids": [size]})
    assert (stop.code, stop.param) == (ErrorCode.TOKEN_OUT_OF_RANGE, "stop_token_ids")
    shaping = {"allowed_token_ids": [3, size], "logit_bias": {"5": 1, str(size): 1}, "bad_words": ["a", [3, size, 4]]}
    for name, value in [*shaping.items(), ("token_ids_logprob", [size])]:
        error = encode_error(encoder, {"text": "a", name: value, "return_logprob": True})
        assert (error.code, error.param) == (ErrorCode.TOKEN_OUT_OF_RANGE, name)
        assert str(size) in error.message
    top = encode_error(encoder, {"text": "a", "return_logprob": True, "top_logprobs_num": size + 1})
    assert (top.code, top.param) == (ErrorCode.INVALID_FIELD, "top_logprobs_num")
    small = Encoder(tokenizer, 10, 64)
    assert encode_error(small, {"text": "fox"}).code == ErrorCode.TOKEN_OUT_OF_RANGE


@pytest.mark.field("logprob_start_len")
def test_prompt_logprobs_begin_inside_the_prompt(encoder: Encoder) -> None:
    asked = {"input_ids": [[5, 6, 7], [8]], "return_logprob": True}
    assert encode(encoder, {**asked, "logprob_start_len": 1})
    error = encode_error(encoder, {**asked, "logprob_start_len": 2})
    assert (error.code, error.param) == (ErrorCode.INVALID_FIELD, "logprob_start_len")
    assert "1 tokens" in error.message


def test_empty_text_is_just_the_bos_or_an_error(
    encoder: Encoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert encode_one(encoder, {"text": ""}).ids == tokenizer.prefix_ids
    monkeypatch.setattr(tokenizer, "prefix_ids", [])
    assert encode_error(encoder, {"text": ""}).code == ErrorCode.EMPTY_PROMPT


def test_a_row_with_a_bad_prompt_or_conversation_fails_alone(encoder: Encoder) -> None:
    narrator = {"messages": [{"role": "narrator", "content": "Once"}]}
    bad, good, unrendered = encode_all(encoder, {"input_ids": [[1], [10**6], [2]]}, {"input_ids": [[1], [2]]}, narrator)
    assert isinstance(bad, ErrorInfo)
    assert not isinstance(good, ErrorInfo)
    assert isinstance(unrendered, ErrorInfo)
    assert "narrator" in unrendered.message


def test_invalid_parameters_are_refused_in_every_row_that_shares_them(encoder: Encoder) -> None:
    defaults = RowDefaults()
    wrong, right = {"text": "a", "stop_token_ids": [10**6]}, {"text": "a", "stop_token_ids": [1]}
    rows = [parse_row(value, 0, defaults) for value in (right, wrong, right, wrong)]
    assert rows[1].params is rows[3].params
    for _ in range(2):
        found = [result for _, result in encoder.encode_rows(enumerate(rows))]
        assert [isinstance(result, ErrorInfo) for result in found] == [False, True, False, True]
        assert found[1] == found[3]


@pytest.mark.field("return_hidden_states")
def test_the_hidden_state_limit_counts_the_requested_tokens(tokenizer: Tokenizer) -> None:
    """The model is so wide that four tokens of a layer exceed the limit; the prompt has 3 tokens."""
    encoder = Encoder(tokenizer, tokenizer.vocab_size, 64, limits=CaptureSupport(layers=2, hidden_size=2**29))

    def is_accepted(new: int, **asked: str) -> bool:
        row = {"input_ids": [7, 8, 9], "max_new_tokens": new, "return_hidden_states": asked}
        return not isinstance(encode_result(encoder, row), ErrorInfo)

    assert [is_accepted(new, tokens="all") for new in (0, 1, 2)] == [True, True, False]
    assert [is_accepted(new, tokens="output") for new in (0, 3, 4)] == [True, True, False]
    assert is_accepted(60, tokens="prompt")
    assert is_accepted(60, tokens="last")
    assert is_accepted(60, tokens="all", pool="mean")


def test_a_text_that_the_tokenizer_refuses_fails_only_its_row(
    encoder: Encoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tokenizer.encode_plain

    def fail_on_bad(texts: Sequence[str]) -> list[list[int]]:
        if "bad" in texts:
            raise ValueError("cannot take this")
        return real(texts)

    monkeypatch.setattr(tokenizer, "encode_plain", fail_on_bad)
    bad, good = encode_all(encoder, {"text": "bad"}, {"text": "good"})
    assert isinstance(bad, ErrorInfo)
    assert "cannot take this" in bad.message
    assert not isinstance(good, ErrorInfo)


def test_rows_are_read_lazily(encoder: Encoder) -> None:
    count = 0

    def source() -> Any:
        nonlocal count
        for index in range(5000):
            count += 1
            yield index, ParsedRow(index, f"row-{index}", (TextPrompt("fox"),), parsed({"text": "a"})[0].params, {})

    results = encoder.encode_rows(source())
    next(results)
    assert count <= 1024
    assert sum(1 for _ in results) == 4999


def test_rows_are_read_while_earlier_ones_are_tokenized(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    params = parsed({"text": "a"})[0].params
    more, real = threading.Event(), encoder._tokenizer.encode_plain

    def waiting(texts: list[str]) -> list[list[int]]:
        assert more.wait(60)
        return real(texts)

    def source() -> Any:
        for index in range(700):
            if index == 300:  # in the second batch
                more.set()
            yield index, ParsedRow(index, f"row-{index}", (TextPrompt("fox " * (index % 5 + 1)),), params, {})

    monkeypatch.setattr(encoder._tokenizer, "encode_plain", waiting)
    for index, (tag, prompts) in enumerate(encoder.encode_rows(source())):
        assert isinstance(prompts, list)
        assert tag == index
        assert prompts[0].ids == encoder._tokenizer.encode(["fox " * (index % 5 + 1)])[0]
    assert index == 699


def test_closing_the_iterator_early_leaves_no_thread(encoder: Encoder) -> None:
    params = parsed({"text": "a"})[0].params
    rows = ((i, ParsedRow(i, f"row-{i}", (TextPrompt("fox"),), params, {})) for i in range(5000))
    before = set(threading.enumerate())
    results = encoder.encode_rows(rows)
    next(results)
    assert len(set(threading.enumerate()) - before) == 1
    results.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) == before


@examples(60)
@given(
    texts=st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=4),
    ids=st.lists(st.integers(0, 420), min_size=1, max_size=90),
    limit=st.none() | st.integers(0, 200),
    truncate=st.sampled_from(["none", "left", "right"]),
    context=st.integers(1, 80),
)
def test_encoded_prompts_always_fit_the_context(
    tokenizer: Tokenizer, texts: list[str], ids: list[int], limit: int | None, truncate: Any, context: int
) -> None:
    encoder = Encoder(tokenizer, tokenizer.vocab_size, context, truncate)
    params = parse_row({"text": "x"}, 0, RowDefaults(flags={"max_new_tokens": limit})).params
    prompts = (*map(TextPrompt, texts), TokenPrompt(array("i", tuple(ids))))
    ((_, result),) = encoder.encode_rows([(0, ParsedRow(0, "row-0", prompts, params, {}))])
    assert result is not None
    if isinstance(result, ErrorInfo):
        expected = {ErrorCode.TOKEN_OUT_OF_RANGE, ErrorCode.CONTEXT_LENGTH_EXCEEDED}
        assert result.code in expected
        assert result.code != ErrorCode.CONTEXT_LENGTH_EXCEEDED or truncate == "none" or context == 1
        return
    for prompt in result:
        assert 1 <= len(prompt.ids) < context
        assert len(prompt.ids) + prompt.max_new_tokens <= context
        assert prompt.max_new_tokens > 0 or limit == 0
