"""llguidance as a grammar compiler: matchers with the interface of xgrammar's.

llguidance has no compiled form to store: a matcher is made from the schema's text, and matchers of further samples are
copies of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.request.foreign_text import read_json
from batchgen.text.grammar.schemas.rules import MAX_DIGITS

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON in one line, spaced as xgrammar does."""
_HEADER = '%llguidance {"no_forcing": true}'
"""Allow every token that fits, also where the text is forced."""
_DIGITS = b"0123456789"
_MANY_DIGITS = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))


class _Pieces:
    """The vocabulary as llguidance reads it: the bytes of every token, and one more token for the end of the text."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.tokens = [*pieces, b"<end>"]
        self.eos_token_id = len(pieces)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        raise ValueError("texts are not tokenised here")


@dataclass(frozen=True, slots=True)
class GuidanceVocabulary:
    """A vocabulary, given the bytes of each token; tokens without bytes are never allowed."""

    tokenizer: Any
    """Its form for llguidance."""
    pieces: Sequence[bytes]
    digits: dict[int, int]
    """Token that begins with digits -> how many, more than any room if it has too many further on."""
    most_digits: int
    """The largest value of `digits`."""

    @classmethod
    def of(cls, pieces: Sequence[bytes]) -> GuidanceVocabulary:
        """The vocabulary of `pieces`."""
        from llguidance import LLTokenizer, TokenizerWrapper

        end = len(pieces)
        slices = LLTokenizer.json_slices()
        tokenizer = LLTokenizer(TokenizerWrapper(_Pieces(pieces)), n_vocab=end + 1, eos_token=end, slices=slices)
        leading = (len(piece) - len(piece.lstrip(_DIGITS)) for piece in pieces)
        digits = {token: count for token, count in enumerate(leading) if count}
        long = (token for token, piece in enumerate(pieces) if len(piece) > MAX_DIGITS and _MANY_DIGITS.search(piece))
        digits |= dict.fromkeys(long, MAX_DIGITS + 1)
        return cls(tokenizer, pieces, digits, max(digits.values(), default=0))


@cache
def byte_vocabulary() -> GuidanceVocabulary:
    """The vocabulary of all bytes."""
    return GuidanceVocabulary.of([bytes([code]) for code in range(256)])


@dataclass(slots=True)
class _NumberScan:
    """Where a JSON text has come to: in a string, or after how many digits of a number."""

    in_string: bool = False
    is_escaped: bool = False
    digits: int = 0

    def read(self, piece: bytes) -> None:
        for byte in piece:
            if self.in_string:
                self.in_string = self.is_escaped or byte != 0x22
                self.is_escaped = not self.is_escaped and byte == 0x5C
            else:
                self.in_string = byte == 0x22
                self.digits = self.digits + 1 if 0x30 <= byte <= 0x39 else 0

    @property
    def room(self) -> int:
        """How many more digits there may be."""
        return MAX_DIGITS - self.digits


def guidance_matcher(schema: str, vocabulary: GuidanceVocabulary) -> Any:
    """Llguidance's matcher for the JSON text of a schema of `GuidanceWriter`.

    Raises:
        ValueError: it does not compile.
    """
    from llguidance import LLMatcher

    options = json.dumps({**read_json(schema), "x-guidance": _OPTIONS})
    matcher = LLMatcher(vocabulary.tokenizer, f"{_HEADER}\nstart: %json {options}", log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


class GuidanceMatcher:
    """Matcher of one sample, with the methods of `xgrammar.GrammarMatcher` that are used here.

    Numbers have at most `MAX_DIGITS` digits in a row, unless they can only go on with more: llguidance has no such
    limit for them, so it is counted here.
    """

    def __init__(self, matcher: Any, vocabulary: GuidanceVocabulary, stop_ids: Sequence[int]) -> None:
        """`matcher`: of this sample alone; `stop_ids`: tokens that are allowed where the text may end."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stop_ids = stop_ids
        self._stop_words = _words_of(stop_ids, len(vocabulary.pieces))
        self._scan = _NumberScan()

    def accept_token(self, token: int) -> bool:
        """Accept a token; False if the grammar does not allow it.

        Raises:
            RuntimeError: the matcher failed.
        """
        if self._matcher.is_stopped() or not self._matcher.validate_tokens([token]):
            return False
        if token in self._excess() and not self._mask()[token // 32] >> token % 32 & 1:
            return False
        if not self._matcher.consume_token(token):
            return False
        self._scan.read(self._vocabulary.pieces[token])
        return True

    def fork(self) -> GuidanceMatcher:
        """A copy, which goes on alone."""
        copied = GuidanceMatcher(self._matcher.deep_copy(), self._vocabulary, self._stop_ids)
        copied._scan = replace(self._scan)
        return copied

    def is_completed(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def fill_next_token_bitmask(self, mask: Any) -> None:
        """Write the packed mask of the next token to `mask` [1, ceil(V / 32)] int32, a tensor or array.

        Raises:
            RuntimeError: the matcher failed.
        """
        words: npt.NDArray[np.int32] = np.asarray(mask)[0]
        words[:] = self._mask()
        if self.is_completed():
            words |= self._stop_words

    def _mask(self) -> npt.NDArray[np.int32]:
        """[ceil(V / 32)] packed mask of the tokens that go on with the text."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error().strip().splitlines()[0][:300])
        size = len(self._vocabulary.pieces)
        words = mask[: -(-size // 32)].copy()
        if size % 32:  # else the extra token is in a separate word
            words[-1] &= (1 << size % 32) - 1
        excess = self._excess()
        if excess:
            shorter = words & ~_words_of(excess, size)
            if shorter.any() or self.is_completed():
                return shorter
        return words

    def _excess(self) -> list[int]:
        """Tokens with which a number here would have too many digits."""
        if self._scan.in_string or self._scan.room >= self._vocabulary.most_digits:
            return []
        return [token for token, digits in self._vocabulary.digits.items() if digits > self._scan.room]


def _words_of(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """A packed mask with the bits of `tokens` set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
