from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from batchgen.errors import RowError
from batchgen.request.fields.params import SamplingParams
from batchgen.text.stops.conditions import FinishedText, StopEvent, StopState, all_stop_token_ids
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.cases import examples
from tests.text.conftest import KINDS, SENTENCES
from tests.text.test_detokenize import id_lists


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
    places: list[tuple[int, str]] = []  # hidden special tokens: characters in front, spelling
    for count, token in enumerate(ids, 1):
        text = tokenizer.decode_output(ids[:count], *flags)
        hidden = params.skip_special_tokens and token in tokenizer.special_ids
        if hidden:
            places.append((len(before), str(tokenizer.id_to_token(token))))
        fresh = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False)))
        matches: list[tuple[int, int, int, str, str, str]] = []
        if count >= params.min_new_tokens:
            for order, stop in enumerate(params.stop):
                for begin in range(len(text) - len(stop) + 1):
                    if text[begin : begin + len(stop)] == stop and begin + len(stop) > fresh:
                        matches.append((begin, order + 1, begin + len(stop), stop, stop, "string"))
                for begin, end in hidden_matches(tokenizer, stop, text, places, -1 if hidden else fresh):
                    matches.append((begin, order + 1, end, stop, stop, "string"))
            ends = token in stopping or count == limit
            seen = text if ends else text[: len(text) - incomplete_length(tokenizer, ids[:count], *flags)]
            for order, pattern in enumerate(params.stop_regex, 1 + len(params.stop)):
                if (match := regex.search(pattern, seen)) is not None:
                    matches.append((match.start(), order, match.end(), pattern, match[0], "regex"))
        if token in stopping:
            matches.append((fresh, 0, 0, str(token), "", ""))
        if matches:
            begin, order, end, stop, matched, how = min(matches)
            if order == 0:
                kept = tokenizer.decode_output(ids[: count if params.no_stop_trim else count - 1], *flags)
                kind = "eos" if token in eos else "token"
                return count, FinishedText(kept, "stop", kind, stop, tokenizer.decode([token], False))  # type: ignore[arg-type]
            kept = text[: end if params.no_stop_trim else begin]
            return count, FinishedText(kept, "stop", how, stop, matched)  # type: ignore[arg-type]
        before = text
    return len(ids), FinishedText(tokenizer.decode_output(ids, *flags), "length")


def hidden_matches(
    tokenizer: Tokenizer, stop: str, text: str, places: list[tuple[int, str]], fresh: int
) -> Iterator[tuple[int, int]]:
    """(begin, end) of each match of a string that names special tokens, some of them hidden at `places`.

    The match must hold the character `fresh` or a later one; -1: the last of the hidden tokens.
    """
    names = [str(tokenizer.id_to_token(token)) for token in tokenizer.special_ids]
    pieces = re.split(f"({'|'.join(sorted(map(re.escape, names), key=len, reverse=True))})", stop)
    if len(pieces) == 1:
        return
    # What is between two characters: the names of the hidden tokens there. A unit is a character or a name.
    units: list[tuple[str, int]] = []
    for position in range(len(text) + 1):
        units += [(name, position) for at, name in places if min(at, len(text)) == position]
        units += [(text[position : position + 1], position)] * (position < len(text))
    wanted = [unit for piece in pieces for unit in ([piece] if piece in names else piece)]
    used = {name for name in wanted if name in names}
    units = [unit for unit in units if len(unit[0]) == 1 or unit[0] in used]
    for first in range(len(units) - len(wanted) + 1):
        span = units[first : first + len(wanted)]
        if [unit for unit, _ in span] != wanted:
            continue
        last, position = span[-1]
        if (
            (first + len(wanted) == len(units) and last in names)
            if fresh < 0
            else (last not in names and position >= fresh)
        ):
            yield span[0][1], position + (last not in names)


PATTERNS = [
    r"[0-9]+", r"a+", r"o.*e", r"(?s)o.+?e", r"[^a-z ]", r"\bth", r"e\b", r"\w+ \w+", r"(?i)THE|fox", r"\n\s*\n",
    r"(?<=o)[a-z]", r"[a-z](?= )", r"(?m)^d", r"\.$", r"(.)\1", r"[A-Z][a-z]{2,4}", r"\ufffd+", r"x(?!$)", r"\s\bf",
    r"(?:a|ab)(?:c|bcd)*", r"(?=f)",
]  # fmt: skip


@pytest.mark.field(
    "stop", "stop_regex", "stop_token_ids", "min_new_tokens", "ignore_eos", "no_stop_trim", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@examples(120)
@given(data=st.data())
def test_stops_equal_brute_force(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(id_lists(tokenizer))
    whole = tokenizer.decode(ids, data.draw(st.booleans()))
    spans = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 6)).map(lambda s: whole[s[0] : sum(s)])
    shown = tokenizer.decode(ids, False)
    marked = st.tuples(st.integers(0, max(0, len(shown) - 1)), st.integers(1, 20)).map(lambda s: shown[s[0] : sum(s)])
    fixed = ["a", " ", "e ", "\ufffd", "|", "<|im_end|>", "</s>"]
    stop = data.draw(st.lists(spans | marked | st.sampled_from(fixed), max_size=4))
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


def run_characters(tokenizer: Tokenizer, text: str, **params: object) -> tuple[int, FinishedText]:
    """`run` on a text of one-character tokens."""
    ids = [token for character in text for token in tokenizer.encode_plain([character])[0]]
    assert len(ids) == len(text)
    return run(tokenizer, ids, SamplingParams(**params))  # type: ignore[arg-type]


@pytest.mark.field("stop_regex")
@pytest.mark.parametrize("pattern", ["a+a+[bc]", "a+a+[bc]$"])
def test_patterns_over_the_time_limit_fail_their_row(
    tokenizer: Tokenizer, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of some milliseconds, under a lower limit."""
    options: dict[str, Any] = {"stop_regex": [pattern], "min_new_tokens": 300, "max_new_tokens": None}
    assert run_characters(tokenizer, "a" * 300, **options)[0] == 300
    monkeypatch.setattr("batchgen.text.stops.search.SEARCH_SECONDS", 1e-4)
    with pytest.raises(RowError, match=r"`stop_regex` .* takes too long") as caught:
        run_characters(tokenizer, "a" * 300, **options)
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_field", "stop_regex")


def test_the_end_of_a_sample_is_an_event_and_a_reason(tokenizer: Tokenizer) -> None:
    state = StopState(SamplingParams(stop_token_ids=(7,)), frozenset(), tokenizer)
    assert state.append(7, last=True) == StopEvent("token", "7", tokenizer.token_text(7))
    assert state.finish("length").finish_reason == "stop"
    assert StopState(SamplingParams(), frozenset(), tokenizer).finish("abort") == FinishedText("", "abort")


class Searched:
    """A compiled pattern that counts the characters it searches."""

    characters = 0

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.flags = compiled.flags

    def search(self, text: str, pos: int = 0, **more: Any) -> Any:
        Searched.characters += len(text) - pos
        return self._compiled.search(text, pos, **more)


def test_patterns_search_each_character_a_bounded_number_of_times(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokenizer.encode_plain([" ".join(SENTENCES)])[0] * 200
    compile_with = regex.compile
    monkeypatch.setattr(regex, "compile", lambda *args: Searched(compile_with(*args)))
    params = SamplingParams(stop=("never found", "x" * 50), stop_regex=("nowhere[0-9]found", r"x{51}|END\s+OF"))
    assert run(tokenizer, ids, params) == (len(ids), FinishedText(tokenizer.decode(ids), "length"))
    assert len(ids) < Searched.characters < 12 * len(ids), "only the new text and its surroundings"


class Decoded:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tokenizer, name)
        if not name.startswith("decode"):
            return found

        def decode(ids: Sequence[int], *flags: bool) -> str:
            self.ids += len(ids)
            return found(ids, *flags)  # type: ignore[no-any-return]

        return decode


def test_outputs_without_stop_strings_are_decoded_once(tokenizer: Tokenizer) -> None:
    counting: Any = Decoded(tokenizer)
    state = StopState(SamplingParams(stop_token_ids=(3,)), frozenset({4}), counting)
    for token in (10, 11, 12):
        assert state.append(token) is None
    assert counting.ids == 0
    assert state.finish("length").text == tokenizer.decode([10, 11, 12])
    assert counting.ids == 3
