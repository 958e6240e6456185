"""llguidance as a grammar compiler: matchers with the interface of xgrammar's.

llguidance has no compiled form to store: a matcher is made from the schema's text, and matchers of further samples are
copies of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.request.foreign_text import read_json

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON in one line, spaced as xgrammar does."""
_HEADER = '%llguidance {"no_forcing": true}'
"""Allow every token that fits, also where the text is forced."""


class _Pieces:
    """The vocabulary as llguidance reads it: the bytes of every token, and one more token for the end of the text."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.tokens = [*pieces, b"<end>"]
        self.eos_token_id = len(pieces)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        raise ValueError("texts are not tokenised here")


def guidance_tokenizer(pieces: Sequence[bytes]) -> Any:
    """Llguidance's form of a vocabulary, given the bytes of each token; tokens without bytes are never allowed."""
    from llguidance import LLTokenizer, TokenizerWrapper

    end = len(pieces)
    slices = LLTokenizer.json_slices()
    return LLTokenizer(TokenizerWrapper(_Pieces(pieces)), n_vocab=end + 1, eos_token=end, slices=slices)


@cache
def byte_tokenizer() -> Any:
    """Llguidance's form of the vocabulary of all bytes."""
    return guidance_tokenizer([bytes([code]) for code in range(256)])


def guidance_matcher(schema: str, tokenizer: Any) -> Any:
    """Llguidance's matcher for the JSON text of a schema of `GuidanceWriter`.

    Raises:
        ValueError: it does not compile.
    """
    from llguidance import LLMatcher

    options = json.dumps({**read_json(schema), "x-guidance": _OPTIONS})
    matcher = LLMatcher(tokenizer, f"{_HEADER}\nstart: %json {options}", log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


class GuidanceMatcher:
    """Matcher of one sample, with the methods of `xgrammar.GrammarMatcher` that are used here."""

    def __init__(self, matcher: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        """`matcher`: of this sample alone; `stop_ids`: tokens that are allowed where the text may end."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._stop_words = _words_of(stop_ids, vocab_size)

    def accept_token(self, token: int) -> bool:
        """Accept a token; False if the grammar does not allow it.

        Raises:
            RuntimeError: the matcher failed.
        """
        if self._matcher.is_stopped() or not self._matcher.validate_tokens([token]):
            return False
        return bool(self._matcher.consume_token(token))

    def fork(self) -> GuidanceMatcher:
        """A copy, which goes on alone."""
        return GuidanceMatcher(self._matcher.deep_copy(), self._vocab_size, self._stop_ids)

    def is_completed(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def fill_next_token_bitmask(self, mask: Any) -> None:
        """Write the packed mask of the next token to `mask` [1, ceil(V / 32)] int32, a tensor or array.

        Raises:
            RuntimeError: the matcher failed.
        """
        words: npt.NDArray[np.int32] = np.asarray(mask)[0]
        found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error().strip().splitlines()[0][:300])
        words[:] = found[: len(words)]
        if self._vocab_size % 32:  # else the extra token is in a separate word
            words[-1] &= (1 << self._vocab_size % 32) - 1
        if self.is_completed():
            words |= self._stop_words


def _words_of(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """A packed mask with the bits of `tokens` set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
