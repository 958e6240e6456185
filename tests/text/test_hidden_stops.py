"""Stop strings of special tokens that the text does not show, and stops that no text can hold."""

from __future__ import annotations

import re
from typing import Any

import pytest

from batchgen.errors import ErrorInfo
from batchgen.request.fields.params import SamplingParams
from batchgen.text.encode import Encoder
from batchgen.text.stops.conditions import FinishedText, StopState
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.cases import each
from tests.text.conftest import KINDS, encode_result

END, EOS = "<|im_end|>", "</s>"


def finish(tokenizer: Tokenizer, pieces: list[str], eos: str = "", **params: Any) -> tuple[int, FinishedText]:
    """Number of tokens up to the stop, and the result. A piece is a special token or an ordinary text."""
    ids = [token for piece in pieces for token in tokenizer.encode_plain([piece])[0]]
    eos_ids = frozenset([tokenizer.token_to_id(eos) or 0]) if eos else frozenset[int]()
    state = StopState(SamplingParams(**params), eos_ids, tokenizer)
    for token in ids:
        if state.append(token) is not None:
            break
    return len(state.output_ids), state.finish("length")


TABLE: list[tuple[list[str], str, dict[str, Any], str, str | None]] = [
    # (pieces of the output, stop, other parameters, text, matched stop)
    (["a fox", END, "b"], END, {}, "a fox", END),
    (["a fox", END, "b"], EOS, {}, "a foxb", None),
    (["a fox", END, "b"], END, {"no_stop_trim": True}, "a fox", END),
    (["a fox", END, "b"], END, {"skip_special_tokens": False, "spaces_between_special_tokens": False}, "a fox", END),
    (["a fox", END, "b", "c"], f"{END}b", {}, "a fox", f"{END}b"),
    (["a fox", END, "b", "c"], f"x{END}b", {}, "a fo", f"x{END}b"),
    (["a fox", END, "b", "c"], f"x{END}b", {"no_stop_trim": True}, "a foxb", f"x{END}b"),
    (["a fox", END, "b"], f"{END}a", {}, "a foxb", None),
    (["a", END, EOS, "b"], f"{END}{EOS}", {}, "a", f"{END}{EOS}"),
    (["a", END, "b", EOS], f"{END}{EOS}", {}, "ab", None),
    (["a", EOS, "b", END, "c"], f"b{END}", {}, "a", f"b{END}"),
    (["a", EOS, "bc"], "ab", {}, "", "ab"),  # across a hidden token that the string does not name
    (["a", END, EOS, "b"], END, {"min_new_tokens": 3}, "ab", None),
    (["a", END, "b", END, "c"], END, {"min_new_tokens": 3}, "ab", END),
    (["im_end", END], "im_", {}, "", "im_"),
    (["a", END, "b"], "|im_end|>", {}, "ab", None),  # a part of a name is ordinary text
    (["a", END, "b"], ">", {}, "ab", None),
]


@pytest.mark.field("stop", "skip_special_tokens", "no_stop_trim", "min_new_tokens")
@each("pieces, stop, others, text, matched", TABLE)
def test_a_string_that_names_hidden_tokens_means_them(
    tokenizer: Tokenizer, pieces: list[str], stop: str, others: dict[str, Any], text: str, matched: str | None
) -> None:
    _, done = finish(tokenizer, pieces, stop=stop, **others)
    assert (done.text, done.matched_stop) == (text, matched)
    assert done.stop_kind == ("string" if matched else None)


def test_the_token_is_the_last_of_the_output(tokenizer: Tokenizer) -> None:
    count, done = finish(tokenizer, ["a", END, "b"], stop=END)
    assert (count, done.finish_reason, done.matched_text) == (2, "stop", END)


def test_a_name_that_ordinary_tokens_spell_out_stops_too(tokenizer: Tokenizer) -> None:
    _, done = finish(tokenizer, ["a", "<", "|", "i", "m", "_", "e", "n", "d", "|", ">", "b"], stop=END)
    assert (done.text, done.matched_stop) == ("a", END)


def test_an_end_of_sequence_token_keeps_its_kind(tokenizer: Tokenizer) -> None:
    _, done = finish(tokenizer, ["a", END, "b"], END, stop=END)
    assert (done.stop_kind, done.text) == ("eos", "a")
    _, done = finish(tokenizer, ["a", END, "b"], END, stop=END, ignore_eos=True)
    assert (done.stop_kind, done.text) == ("string", "a")
    _, done = finish(tokenizer, ["ab", END, "c"], END, stop=f"b{END}")
    assert (done.stop_kind, done.text) == ("string", "a"), "the string begins first"


def test_streamed_text_waits_for_a_hidden_token(tokenizer: Tokenizer) -> None:
    state = StopState(SamplingParams(stop=f"x{END}b", stream=True), frozenset(), tokenizer)
    texts = []
    for piece in ("f", "o", "x", END, "c", "x", END, "b"):
        state.append(tokenizer.encode_plain([piece])[0][0])
        texts.append(state.next_output_text() if state.event is None else "")
    assert texts == ["f", "o", "", "", "xc", "", "", ""]
    assert state.finish("length").text == "foxc"


def test_a_token_past_the_vocabulary_is_not_special(tokenizer: Tokenizer) -> None:
    state = StopState(SamplingParams(stop=END), frozenset(), tokenizer)
    assert state.append(tokenizer.vocab_size + 3) is None


NEVER = {
    "wordpiece": ["\n", "Ж", "a\tb", f"{END}\n", "😀"],
    "unigram": ["Ж", "▁", f"{END}Ж", "😀"],
}
SOME = ["a", "the ", END, f"{END}a", EOS, "e."]


@pytest.mark.field("stop")
@pytest.mark.parametrize("kind", KINDS)
def test_a_string_that_no_output_can_hold_is_refused(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    encoder = Encoder(tokenizers[kind], tokenizers[kind].vocab_size, 100)
    for stop in SOME:
        assert not isinstance(encode_result(encoder, {"text": "a", "stop": [stop]}), ErrorInfo), stop
    if kind.startswith(("byte", "nested")):
        for stop in ("\n", "Ж", "😀", "▁", "\ufffd"):
            assert not isinstance(encode_result(encoder, {"text": "a", "stop": [stop]}), ErrorInfo), stop
    for stop in NEVER.get(kind, []):
        refused = encode_result(encoder, {"text": "a", "stop": ["a", stop]})
        assert isinstance(refused, ErrorInfo), stop
        assert (refused.code, refused.param) == ("invalid_field", "stop")
        assert "no output can hold" in refused.message


@pytest.mark.field("stop_regex")
def test_a_pattern_of_a_hidden_token_is_refused(tokenizer: Tokenizer) -> None:
    encoder = Encoder(tokenizer, tokenizer.vocab_size, 100)
    for name in (END, EOS):
        row = {"text": "a", "stop_regex": rf"\s*{re.escape(name)}"}
        refused = encode_result(encoder, row)
        assert isinstance(refused, ErrorInfo)
        assert refused.param == "stop_regex"
        assert "stop_token_ids" in refused.message
        assert not isinstance(encode_result(encoder, {**row, "skip_special_tokens": False}), ErrorInfo)
