"""Stops and special tokens: strings that name tokens which the text does not show, and stops that never match.

With `skip_special_tokens` a special token has no text, so its spelling in a stop string can never be found there. It
means the token instead, at its place in the text. To search for both at once, each such token is written as a
mark: a lone surrogate, which no decoded text holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import show
from batchgen.request.fields.params import SamplingParams
from batchgen.text.tokens.detokenize import REPLACEMENT, TokenBytes
from batchgen.text.tokens.tokenizer import Tokenizer

_FIRST_MARK = 0xD800
_MARKS = 0x800
_SPACE_MARK = "▁"


class HiddenStrings(NamedTuple):
    """The stop strings of a row that name hidden tokens."""

    marks: Mapping[int, str]
    """Token id -> its mark."""
    strings: tuple[tuple[int, str], ...]
    """(index in the list of stop strings, the string with marks in place of spellings)."""


@lru_cache(maxsize=256)
def hidden_strings(tokenizer: Tokenizer, stop: tuple[str, ...]) -> HiddenStrings | None:
    """The strings of `stop` that name special tokens; None if there are none."""
    spelled = {str(tokenizer.id_to_token(token)): token for token in sorted(tokenizer.special_ids)}
    named = sorted((name for name in spelled if any(name in text for text in stop)), key=len, reverse=True)[:_MARKS]
    if not named:
        return None
    marks = {name: chr(_FIRST_MARK + number) for number, name in enumerate(named)}
    pattern = re.compile("|".join(map(re.escape, named)))  # the longest name first, as tokenizers find them
    translated = [pattern.sub(lambda match: marks[match[0]], text) for text in stop]
    strings = tuple((order, text) for order, text in enumerate(translated) if text != stop[order])
    return HiddenStrings({spelled[name]: mark for name, mark in marks.items()}, strings)


class HiddenSearch:
    """Places of the hidden tokens of one sample, and the search for strings that name them."""

    def __init__(self, hidden: HiddenStrings) -> None:
        self._hidden = hidden
        self._places: list[tuple[int, str]] = []
        """(number of characters in front, mark) of each token that a stop string names, in order."""

    def append(self, token: int, position: int) -> bool:
        """Add a token behind `position` characters; whether it has a mark."""
        mark = self._hidden.marks.get(token)
        if mark is not None:
            self._places.append((position, mark))
        return mark is not None

    def find(self, window: str, offset: int, fresh: int, marked: bool) -> tuple[int, int, int] | None:
        """The first string that the last token completes, as (begin, index in the list of stop strings, end).

        Args:
            window: the end of the text, long enough for every string.
            offset: position of its first character; results are positions in the whole text, too.
            fresh: position in `window` of the first character that the last token added.
            marked: whether the last token has a mark, which is then at the end.
        """
        text, places = self._with_marks(window, offset)
        new = len(text) - 1 if marked else fresh + sum(place - number <= fresh for number, place in enumerate(places))
        matches = []
        for order, string in self._hidden.strings:
            begin = text.find(string, max(0, new - len(string) + 1))
            if begin >= 0:
                end = begin + len(string)
                visible = (at - sum(place < at for place in places) for at in (begin, end))
                matches.append((offset + next(visible), order, offset + next(visible)))
        return min(matches, default=None)

    def unsettled(self, window: str, offset: int) -> int:
        """Number of characters at the end of `window` that a later match may cut."""
        text, places = self._with_marks(window, offset)
        for begin in range(len(text)):
            if any(string.startswith(text[begin:]) for _, string in self._hidden.strings):
                return len(text) - begin - sum(place >= begin for place in places)
        return 0

    def _with_marks(self, window: str, offset: int) -> tuple[str, list[int]]:
        """The window with the marks in it, and their indexes."""
        pieces: list[str] = []
        places: list[int] = []
        begin = 0
        self._places = [place for place in self._places if place[0] >= offset]
        for number, (position, mark) in enumerate(self._places):
            end = min(max(position - offset, begin), len(window))
            pieces += (window[begin:end], mark)
            places.append(end + number)
            begin = end
        return "".join([*pieces, window[begin:]]), places


def check_stops(params: SamplingParams, tokenizer: Tokenizer) -> None:
    """Refuse stop strings that no output can hold, and patterns of special tokens that the text does not show.

    Raises:
        RowError: `invalid_field`.
    """
    names = _special_names(tokenizer) if params.stop or params.stop_regex else ()
    for text in params.stop:
        if missing := unwritable(tokenizer, text):
            what = f"{show(text)}, which no output can hold: no token of the model's vocabulary has {show(missing)}"
            raise RowError(ErrorCode.INVALID_FIELD, f"`stop` is {what}; leave it out", "stop")
    for pattern in params.stop_regex if params.skip_special_tokens else ():
        name = next((name for name in names if re.escape(name) in pattern), None)
        if name is not None:
            what = f"names the special token {show(name)}, which is not a part of the text"
            remedy = "name it in `stop` or `stop_token_ids`, or set `skip_special_tokens` to false"
            raise RowError(ErrorCode.INVALID_FIELD, f"`stop_regex` {what}; {remedy}", "stop_regex")


def unwritable(tokenizer: Tokenizer, text: str) -> str:
    """The characters of a text that no sequence of tokens can have, special tokens aside; "" if there are none."""
    rest = dict.fromkeys(text)
    if not rest.keys() - _characters(tokenizer):
        return ""
    for name in sorted(_special_names(tokenizer), key=len, reverse=True):
        text = text.replace(name, "")
    return "".join(character for character in dict.fromkeys(text) if not _is_writable(tokenizer, character))


def _is_writable(tokenizer: Tokenizer, character: str) -> bool:
    if character in _characters(tokenizer):
        return True
    if character == REPLACEMENT:  # what incomplete bytes are written as
        return bool(_bytes(tokenizer))
    return bool(_bytes(tokenizer)) and _bytes(tokenizer).issuperset(character.encode())


@lru_cache(maxsize=8)
def _special_names(tokenizer: Tokenizer) -> tuple[str, ...]:
    return tuple(str(tokenizer.id_to_token(token)) for token in sorted(tokenizer.special_ids))


@lru_cache(maxsize=8)
def _characters(tokenizer: Tokenizer) -> frozenset[str]:
    """Characters of single tokens. Those of spellings that the decoder replaces by others are left out."""
    if tokenizer.vocab_bytes is not None:
        return frozenset(map(chr, range(0x80))) if _bytes(tokenizer).issuperset(range(0x80)) else frozenset()
    ids = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    spellings = [tokenizer.id_to_token(token) or "" for token in ids]
    characters = {" ", *"".join(spellings)}
    marked = next((token for token, text in zip(ids, spellings, strict=True) if _SPACE_MARK in text), None)
    if marked is not None and _SPACE_MARK not in tokenizer.decode([marked, marked]):
        characters.discard(_SPACE_MARK)
    return frozenset(characters)


@lru_cache(maxsize=8)
def _bytes(tokenizer: Tokenizer) -> frozenset[int]:
    """Bytes that tokens can give one by one; none for a vocabulary of characters."""
    ids = (token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids)
    if tokenizer.vocab_bytes is not None:
        return frozenset(byte for token in ids for byte in tokenizer.vocab_bytes[token])
    if not tokenizer.byte_fallback:
        return frozenset()
    pieces = TokenBytes(tokenizer)
    names = (f"<0x{byte:02X}>" for byte in range(256))
    tokens = (tokenizer.token_to_id(name) for name in names)
    return frozenset(byte for token in tokens if token is not None for byte in pieces[token])
