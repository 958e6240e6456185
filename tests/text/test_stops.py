from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import takewhile

import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.errors import RowError
from batchgen.request.params import SamplingParams
from batchgen.text.stops import FinishedText, StopEvent, StopState, all_stop_token_ids
from batchgen.text.tokenizer import Tokenizer
from tests.text.conftest import KINDS, SENTENCES
from tests.text.test_detokenize import id_lists

SHARED = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


def token_id(tokenizer: Tokenizer, spelled: str) -> int:
    found = tokenizer._hf.convert_tokens_to_ids(spelled)
    assert isinstance(found, int)
    return found


def run(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams, eos: frozenset[int] = frozenset(), limit: int = -1
) -> tuple[int, FinishedText]:
    """Append ids until one stops the sample; return their number and the result. `limit`: most tokens allowed."""
    state = StopState(params, eos, tokenizer)
    for count, token in enumerate(ids, 1):
        if state.append(token, last=count == limit) is not None:
            break
    assert state.output_ids == ids[: len(state.output_ids)]
    return len(state.output_ids), state.finish("length")


def incomplete_length(tokenizer: Tokenizer, ids: list[int], *flags: bool) -> int:
    """Number of characters at the end of the text that are U+FFFD for an incomplete character."""
    text = tokenizer.decode_output(ids, *flags)
    length = len(text) - len(text.rstrip("\ufffd"))
    if not length or tokenizer.byte_level_tokens is None:
        return length  # other decoders may still join all of them
    continuations = [
        t for t in range(tokenizer.vocab_size) if tokenizer.byte_level_tokens[t] in (b"\x80", b"\x90", b"\xa0")
    ]
    assert len(continuations) == 3
    # After anything but the first bytes of a character each of these is a separate replacement character.
    return int(any(tokenizer.decode_output([*ids, token], *flags) != text + "\ufffd" for token in continuations))


def brute_force(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams, eos: frozenset[int], limit: int = -1
) -> tuple[int, FinishedText]:
    """The rules of `stops`, implemented by decoding every prefix and testing every position."""
    flags = (params.skip_special_tokens, params.spaces_between_special_tokens)
    ignored = set() if not params.ignore_eos else eos - set(params.stop_token_ids)
    stopping = (eos | set(params.stop_token_ids)) - ignored
    before = ""
    for count, token in enumerate(ids, 1):
        text = tokenizer.decode_output(ids[:count], *flags)
        fresh = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False)))
        matches = []
        if count >= params.min_new_tokens:
            for order, stop in enumerate(params.stop):
                for begin in range(len(text) - len(stop) + 1):
                    if text[begin : begin + len(stop)] == stop and begin + len(stop) > fresh:
                        matches.append((begin, order + 1, stop, stop, "string"))
            ends = token in stopping or count == limit
            seen = text if ends else text[: len(text) - incomplete_length(tokenizer, ids[:count], *flags)]
            for order, pattern in enumerate(params.stop_regex, 1 + len(params.stop)):
                if (match := regex.search(pattern, seen)) is not None:
                    matches.append((match.start(), order, pattern, match[0], "regex"))
        if token in stopping:
            matches.append((fresh, 0, str(token), "", ""))
        if matches:
            begin, order, stop, matched, how = min(matches)
            if order == 0:
                kept = tokenizer.decode_output(ids[: count if params.no_stop_trim else count - 1], *flags)
                kind = "eos" if token in eos else "token"
                return count, FinishedText(kept, "stop", kind, stop, tokenizer.decode([token], False))  # type: ignore[arg-type]
            end = begin + len(matched) if params.no_stop_trim else begin
            return count, FinishedText(text[:end], "stop", how, stop, matched)  # type: ignore[arg-type]
        before = text
    return len(ids), FinishedText(tokenizer.decode_output(ids, *flags), "length")


PATTERNS = [
    r"[0-9]+", r"a+", r"o.*e", r"(?s)o.+?e", r"[^a-z ]", r"\bth", r"e\b", r"\w+ \w+", r"(?i)THE|fox", r"\n\s*\n",
    r"(?<=o)[a-z]", r"[a-z](?= )", r"(?m)^d", r"\.$", r"(.)\1", r"[A-Z][a-z]{2,4}", r"\ufffd+", r"x(?!$)", r"\s\bf",
    r"(?:a|ab)(?:c|bcd)*",
]  # fmt: skip


@pytest.mark.field(
    "stop", "stop_regex", "stop_token_ids", "min_new_tokens", "ignore_eos", "no_stop_trim", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@SHARED
@given(data=st.data())
def test_stops_equal_brute_force(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(id_lists(tokenizer))
    whole = tokenizer.decode(ids, data.draw(st.booleans()))
    spans = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 6)).map(lambda s: whole[s[0] : sum(s)])
    stop = data.draw(st.lists(spans | st.sampled_from(["a", " ", "e ", "\ufffd", "|"]), max_size=4))
    vocabulary = st.sampled_from(ids) | st.integers(0, tokenizer.vocab_size - 1) if ids else st.just(0)
    few = st.lists(vocabulary, max_size=2)
    params = SamplingParams(
        max_new_tokens=None,
        stop=tuple(filter(None, stop)),
        stop_regex=data.draw(st.lists(st.sampled_from(PATTERNS) | spans.map(re.escape).filter(bool), max_size=3)),
        stop_token_ids=tuple(data.draw(few)),
        min_new_tokens=data.draw(st.integers(0, len(ids) + 1)),
        ignore_eos=data.draw(st.booleans()),
        no_stop_trim=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        spaces_between_special_tokens=data.draw(st.booleans()),
    )
    eos = frozenset(data.draw(few))
    limit = data.draw(st.sampled_from([len(ids), -1]))
    expected = brute_force(tokenizer, ids, params, eos, limit)
    assert run(tokenizer, ids, params, eos, limit) == expected
    streamed, done = stream_run(tokenizer, ids, params, eos, limit)
    assert done == expected[1]
    assert done.text.startswith(streamed), "streamed text is never revoked"


def stream_run(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams, eos: frozenset[int], limit: int
) -> tuple[str, FinishedText]:
    """Run with `stream`: the text returned before the end, and the result."""
    state = StopState(replace(params, stream=True), eos, tokenizer)
    streamed = ""
    for count, token in enumerate(ids, 1):
        if state.append(token, last=count == limit) is not None:
            break
        streamed += state.next_output_text()
    return streamed, state.finish("length")


@pytest.mark.field("stream")
def test_streamed_text_is_returned_as_soon_as_it_is_final(tokenizer: Tokenizer) -> None:
    text = "a fox, END of café 東京"
    ids = [token for character in text for token in tokenizer.encode_plain([character])[0]]

    def lag(**params: object) -> list[int]:
        """Number of characters held back after each token."""
        state = StopState(SamplingParams(stream=True, **params), frozenset(), tokenizer)  # type: ignore[arg-type]
        streamed, lags = "", []
        for count, token in enumerate(ids, 1):
            state.append(token)
            streamed += state.next_output_text()
            whole = tokenizer.decode(ids[:count]).rstrip("\ufffd")
            assert whole.startswith(streamed)
            lags.append(len(whole) - len(streamed))
        return lags

    assert set(lag()) == {0}, "only an incomplete character is held back"
    assert lag(stop="ENDING")[:12] == [0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0]
    assert lag(stop_regex=r"EN[A-Z]+\.")[:12] == [0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0]
    assert lag(stop_regex=r"never$")[-1] == len(text), "such a pattern may match anything later"


def test_a_match_may_span_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain(["Hello there, how"])[0]
    assert len(tokenizer.encode_plain(["there, h"])[0]) > 1
    count, done = run(tokenizer, ids, SamplingParams(stop=("re, h",)))
    assert done == FinishedText("Hello the", "stop", "string", "re, h", "re, h")
    assert tokenizer.decode(ids[:count]).startswith("Hello there, h")
    assert not tokenizer.decode(ids[: count - 1]).startswith("Hello there, h")


def test_no_stop_trim_keeps_the_match_and_nothing_after_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain(["Hello there, how"])[0]
    _, done = run(tokenizer, ids, SamplingParams(stop=("th",), no_stop_trim=True))
    assert done.text == "Hello th"


def test_the_match_that_begins_first_wins_then_list_order(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain(["ab"])[0] + tokenizer.encode_plain(["c"])[0]
    late, early = SamplingParams(stop=("c", "bc")), SamplingParams(stop=("bc", "c"))
    assert run(tokenizer, ids, late)[1].matched_stop == run(tokenizer, ids, early)[1].matched_stop == "bc"
    word = tokenizer.encode_plain([" the"])[0]
    assert run(tokenizer, word, SamplingParams(stop=("the", "th")))[1].matched_stop in ("the", "th")
    piece = next(t for t in range(tokenizer.vocab_size) if tokenizer.token_text(t) == " the")
    assert run(tokenizer, [piece], SamplingParams(stop=("the", "th")))[1].matched_stop == "the"
    assert run(tokenizer, [piece], SamplingParams(stop=("th", "the")))[1].matched_stop == "th"


def test_stop_strings_start_at_min_new_tokens(tokenizer: Tokenizer) -> None:
    ids = [token for _ in range(3) for token in tokenizer.encode_plain(["a"])[0] + tokenizer.encode_plain(["b"])[0]]
    assert len(ids) == 6
    for minimum, taken in [(0, 2), (2, 2), (3, 4), (4, 4), (5, 6)]:
        count, done = run(tokenizer, ids, SamplingParams(stop=("ab",), min_new_tokens=minimum))
        assert (count, done.text) == (taken, "ab" * (taken // 2 - 1)), minimum


def test_an_eos_token_is_cut_from_the_text_and_reported(tokenizer: Tokenizer) -> None:
    end = token_id(tokenizer, "<|im_end|>")
    ids = [*tokenizer.encode_plain(["fox"])[0], end]
    eos = frozenset({end})
    named = SamplingParams(stop_token_ids=(end,), ignore_eos=True)
    expected = FinishedText("fox", "stop", "eos", str(end), "<|im_end|>")
    assert run(tokenizer, ids, SamplingParams(), eos)[1] == expected
    assert run(tokenizer, ids, named, eos)[1] == expected, "an end-of-sequence id has kind eos even if the row names it"
    assert run(tokenizer, ids, SamplingParams(ignore_eos=True), eos)[1] == FinishedText("fox", "length")
    kept = SamplingParams(no_stop_trim=True, skip_special_tokens=False)
    assert run(tokenizer, ids, kept, eos)[1].text == "fox<|im_end|>"
    assert run(tokenizer, ids, SamplingParams(skip_special_tokens=False), eos)[1].text == "fox"


def test_the_text_of_a_stop_token_id_is_cut(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain(["a"])[0] + tokenizer.encode_plain(["b"])[0]
    trimmed = run(tokenizer, ids, SamplingParams(stop_token_ids=(ids[1],)))[1]
    assert trimmed == FinishedText("a", "stop", "token", str(ids[1]), "b")
    assert run(tokenizer, ids, SamplingParams(stop_token_ids=(ids[1],), no_stop_trim=True))[1].text == "ab"


def test_a_string_that_begins_before_the_stop_id_wins(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain(["a"])[0] + tokenizer.encode_plain(["b"])[0]
    assert run(tokenizer, ids, SamplingParams(stop=("ab",), stop_token_ids=(ids[1],)))[1].stop_kind == "string"
    assert run(tokenizer, ids, SamplingParams(stop=("b",), stop_token_ids=(ids[1],)))[1].stop_kind == "token"


def test_rows_without_stop_strings_are_decoded_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StopState(SamplingParams(stop_token_ids=(3,)), frozenset({4}), tokenizer)
    calls: list[int] = []
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, *flags: calls.append(len(ids)) or "text")
    for token in [10, 11, 12]:
        assert state.append(token) is None
    assert calls == []
    assert state.finish("length").text == "text"
    assert calls == [3]


def test_stop_strings_match_special_tokens_only_if_not_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain(["fox<|im_end|>dog"])[0]
    assert run(tokenizer, ids, SamplingParams(stop=("<|im_end|>",)))[1] == FinishedText("foxdog", "length")
    shown = SamplingParams(stop=("<|im_end|>",), skip_special_tokens=False)
    assert run(tokenizer, ids, shown)[1].text == "fox"


def test_the_given_finish_reason_is_kept_without_a_stop(tokenizer: Tokenizer) -> None:
    state = StopState(SamplingParams(stop=("x",)), frozenset(), tokenizer)
    state.append(tokenizer.encode_plain(["a"])[0][0])
    assert state.finish("abort") == FinishedText("a", "abort")
    assert StopState(SamplingParams(), frozenset(), tokenizer).finish("length") == FinishedText("", "length")


def test_a_stop_at_the_last_allowed_token_has_finish_reason_stop(tokenizer: Tokenizer) -> None:
    state = StopState(SamplingParams(stop_token_ids=(7,)), frozenset(), tokenizer)
    assert state.append(7) == StopEvent("token", "7", tokenizer.token_text(7))
    assert state.finish("length").finish_reason == "stop"


def test_appending_after_the_end_fails(tokenizer: Tokenizer) -> None:
    state = StopState(SamplingParams(), frozenset({7}), tokenizer)
    state.append(7)
    with pytest.raises(AssertionError, match="has ended"):
        state.append(8)


@pytest.mark.field("min_new_tokens", "stop_token_ids", "ignore_eos")
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), {1, 2}),
        (SamplingParams(ignore_eos=True), set()),
        (SamplingParams(stop_token_ids=(5,)), {1, 2, 5}),
        (SamplingParams(stop_token_ids=(2, 5), ignore_eos=True), {2, 5}),
    ],
)
def test_all_stop_token_ids(params: SamplingParams, expected: set[int]) -> None:
    assert all_stop_token_ids(params, frozenset({1, 2})) == expected


def test_stop_strings_are_searched_in_long_outputs(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain([" ".join(SENTENCES)])[0] * 200
    count, done = run(tokenizer, ids, SamplingParams(stop=("never found", "x" * 50)))
    assert count == len(ids)
    assert done.text == tokenizer.decode(ids)


def run_characters(tokenizer: Tokenizer, text: str, **params: object) -> tuple[int, FinishedText]:
    """`run` on a text of one-character tokens."""
    ids = [token for character in text for token in tokenizer.encode_plain([character])[0]]
    assert len(ids) == len(text)
    return run(tokenizer, ids, SamplingParams(**params))  # type: ignore[arg-type]


@pytest.mark.field("stop_regex", "no_stop_trim")
def test_the_text_is_cut_at_the_pattern_match(tokenizer: Tokenizer) -> None:
    text = "Sum: 17 + 25 = 42."
    count, done = run_characters(tokenizer, text, stop_regex=r"= \d+\.")
    assert (count, done) == (18, FinishedText("Sum: 17 + 25 ", "stop", "regex", r"= \d+\.", "= 42."))
    assert run_characters(tokenizer, text, stop_regex=r"= \d+\.", no_stop_trim=True)[1].text == text
    assert run_characters(tokenizer, text, stop_regex=[r"\d+"])[:1] == (6,), "a match counts as soon as it is complete"
    assert run_characters(tokenizer, text, stop_regex=[r"\d+ "])[1].matched_text == "17 "


@pytest.mark.field("stop_regex", "stop")
def test_the_first_match_wins_then_strings_before_patterns(tokenizer: Tokenizer) -> None:
    assert run_characters(tokenizer, "xabc", stop="c", stop_regex=["c", "bc"])[1].matched_text == "bc"
    assert run_characters(tokenizer, "xabc", stop=["bc"], stop_regex=["[b]c"])[1].stop_kind == "string"
    assert run_characters(tokenizer, "xabc", stop=["c"], stop_regex=["[b]c"])[1].stop_kind == "regex"
    assert run_characters(tokenizer, "xabc", stop_regex=["b[c]", "[b]c"])[1].matched_stop == "b[c]"


@pytest.mark.field("stop_regex", "min_new_tokens")
def test_patterns_start_at_min_new_tokens_and_search_the_whole_text(tokenizer: Tokenizer) -> None:
    for minimum, taken in ((0, 2), (2, 2), (3, 3), (6, 6)):
        count, done = run_characters(tokenizer, "ababab", stop_regex=["ab"], min_new_tokens=minimum)
        assert (count, done.text) == (taken, ""), "the leftmost match in the text so far counts"


@pytest.mark.field("stop_regex")
def test_anchors_and_look_behind_see_only_the_output(tokenizer: Tokenizer) -> None:
    assert run_characters(tokenizer, "ab\ncd", stop_regex=["^c"])[1].finish_reason == "length"
    assert run_characters(tokenizer, "ab\ncd", stop_regex=["(?m)^c"])[1].text == "ab\n"
    assert run_characters(tokenizer, "abc", stop_regex=["b$"])[0] == 2, "the text ends after every token"
    assert run_characters(tokenizer, "a,b", stop_regex=["(?<=,)b"])[1].text == "a,"
    assert run_characters(tokenizer, "a b", stop_regex=[r"a(?= )"]) == (
        2,
        FinishedText("", "stop", "regex", "a(?= )", "a"),
    )
    assert run_characters(tokenizer, "a b", stop_regex=[r"(?=b)"])[1] == FinishedText(
        "a ", "stop", "regex", "(?=b)", ""
    )


@pytest.mark.field("stop_regex")
@pytest.mark.parametrize("kind", ["bytelevel", "nested", "bytefallback"])
def test_patterns_do_not_see_an_incomplete_character(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    pieces = tokenizer.vocab_bytes
    tokens = range(tokenizer.vocab_size)

    def spelled(byte: int) -> int | None:
        if pieces is not None:
            return next(token for token in tokens if pieces[token] == bytes([byte]))
        letter = tokenizer.token_to_id(chr(byte)) if byte < 0x80 else None
        return letter if letter is not None else tokenizer.token_to_id(f"<0x{byte:02X}>")

    def ids(text: bytes) -> list[int]:
        return [token for token in map(spelled, text) if token is not None]

    params = SamplingParams(stop_regex=(r"[^\w\s.,!?-]",), no_stop_trim=True)
    whole = ids("é 東😀é! #!".encode())
    count, done = run(tokenizer, whole, params)
    assert (done.text, done.matched_text) == ("é 東😀", "😀")
    assert count == len("é 東😀".encode())
    half = ids(b"caf\xc3")
    assert run(tokenizer, half, params)[1] == FinishedText("caf\ufffd", "length")
    assert run(tokenizer, half, params, limit=4)[1].matched_text == "\ufffd", "the last allowed token"
    assert run(tokenizer, half, params, frozenset({half[-1]}))[1].stop_kind == "eos"
    end = token_id(tokenizer, "<|im_end|>")
    assert run(tokenizer, [*half, end], params, frozenset({end}))[1].matched_text == "\ufffd"
    broken = run(tokenizer, [*half, *tokenizer.encode_plain(["b"])[0]], params)
    assert broken[1].matched_text == "\ufffd", "the character can no longer be completed"
    assert run(tokenizer, ids(b"e\xc3\xa9"), SamplingParams(stop_regex=(r"e(?=\W)",)))[1].finish_reason == "length"


HOSTILE = [("(a|aa)+$", "a" * 80 + "!"), ("(x+x+)+y", "x" * 400)]


@pytest.mark.field("stop_regex")
@pytest.mark.parametrize(("pattern", "text"), HOSTILE)
def test_patterns_over_the_time_limit_fail_their_row(
    tokenizer: Tokenizer, pattern: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.text.stop_search.SEARCH_SECONDS", 0.1)
    began = time.monotonic()
    with pytest.raises(RowError, match=r"`stop_regex` .* takes too long") as caught:
        run_characters(tokenizer, text * 3, stop_regex=[pattern], min_new_tokens=len(text), max_new_tokens=None)
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_field", "stop_regex")
    assert time.monotonic() - began < 20


def test_patterns_search_each_character_a_bounded_number_of_times(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain([" ".join(SENTENCES)])[0] * 200
    searched = {"characters": 0}

    class Counted:
        def __init__(self, compiled: object) -> None:
            self._compiled = compiled

        def search(self, text: str, pos: int, **more: object) -> object:
            searched["characters"] += len(text) - pos
            return self._compiled.search(text, pos, **more)  # type: ignore[attr-defined]

    state = StopState(SamplingParams(stop_regex=["never[0-9]found", r"x{50}|END\s+OF"]), frozenset(), tokenizer)
    for pattern in state._search._patterns._states:  # type: ignore[union-attr]
        pattern.compiled = Counted(pattern.compiled)
    for token in ids:
        assert state.append(token) is None
    assert searched["characters"] < 12 * len(ids), "only the new text and its surroundings"
    assert state.finish("length").text == tokenizer.decode(ids)
