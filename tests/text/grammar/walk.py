"""Texts that a constraint allows, found token by token without an engine, over a vocabulary of bytes and some words."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np
import xgrammar

from batchgen.errors import ErrorInfo, RowError
from batchgen.request.fields.constraint import Constraint, ConstraintKind
from batchgen.text.grammar.compilation import LLGUIDANCE, compile_constraint
from batchgen.text.grammar.guidance import GuidanceMatcher, GuidanceVocabulary, guidance_matcher

_STOP = 256
_PIECES = [bytes([byte]) for byte in range(256)] + [b""]
_PIECES += [
    t.encode() for t in ('": "', '", "', '": ', '{"', '"}', "é", "日本", "true", "null", "12", "\\u00", "ab", "], [")
]
# The JSON vocabulary has no control characters.
_JSON_PIECES = [b"" if piece and min(piece) < 0x20 else piece for piece in _PIECES]


@cache
def _vocabulary(is_json: bool) -> tuple[Any, Any]:
    pieces = _JSON_PIECES if is_json else _PIECES
    info = xgrammar.TokenizerInfo(pieces, vocab_size=len(pieces), stop_token_ids=[])
    return info, GuidanceVocabulary.of(pieces)


@dataclass(frozen=True, slots=True)
class Walk:
    """A compiled constraint."""

    backend: str
    """`xgrammar` or `llguidance`."""
    compiled: Any
    vocabulary: GuidanceVocabulary

    def matcher(self) -> Any:
        if self.backend == "llguidance":
            return GuidanceMatcher(self.compiled.deep_copy(), self.vocabulary, [_STOP])
        return xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=[_STOP])

    def accepts(self, text: str) -> bool:
        matcher = self.matcher()
        return all(matcher.accept_token(byte) for byte in text.encode()) and bool(matcher.is_completed())

    def random_text(self, seed: int, steps: int = 60) -> bytes | None:
        """A random text of the grammar; None if it became too long.

        Raises:
            AssertionError: no token is allowed before the text is complete.
        """
        rng = Random(seed)
        matcher = self.matcher()
        text = b""
        for step in range(8 * steps):
            allowed = _allowed(matcher)
            assert allowed, f"no token is allowed after {text!r}"
            if _STOP in allowed and (allowed == [_STOP] or step > steps or rng.random() < 0.3):
                return text
            tokens = [token for token in allowed if token != _STOP]
            closing = [token for token in tokens if _PIECES[token][:1] in b'"}],:' and _PIECES[token]]
            token = rng.choice(closing if closing and (step > steps or rng.random() < 0.3) else tokens)
            assert matcher.accept_token(token)
            text += _PIECES[token]
        return None

    def text_of_preferred(self, letters: str, most: int) -> str:
        """The text of a model that draws the first of `letters` that is allowed, else ends; at most `most` letters."""
        matcher, text = self.matcher(), ""
        while len(text) < most:
            allowed = _allowed(matcher)
            letter = next((each for each in letters if ord(each) in allowed), None)
            if letter is None:
                assert _STOP in allowed, f"no token is allowed after {text!r}"
                break
            assert matcher.accept_token(ord(letter))
            text += letter
        return text

    def texts(self, alphabet: str, longest: int, most: int = 10**9) -> Iterator[str]:
        """Yield every text of at most `longest` characters of an ASCII alphabet, shortest first.

        Of each length only the first `most` beginnings are followed.
        """
        waiting = [("", self.matcher())]
        for length in range(longest + 1):
            longer = []
            for text, matcher in waiting:
                words = _mask(matcher).tolist()
                if words[_STOP // 32] >> _STOP % 32 & 1:
                    yield text
                following = [letter for letter in alphabet if words[ord(letter) // 32] >> ord(letter) % 32 & 1]
                longer += [(text, matcher, letter) for letter in following if length < longest]
            waiting = [(text + letter, self._after(matcher, letter)) for text, matcher, letter in longer[:most]]

    def _after(self, matcher: Any, letter: str) -> Any:
        """A copy of a matcher after one more character."""
        longer = matcher.fork()
        assert longer.accept_token(ord(letter))
        return longer


def compile_constraint_of(kind: ConstraintKind, text: str, *, lenient: bool = False) -> Walk:
    """Compile a constraint.

    Raises:
        RowError: it is refused.
    """
    info, vocabulary = _vocabulary(kind == "json_schema")
    found = compile_constraint(Constraint(kind, text), info, lenient=lenient, max_size=1 << 30)
    if isinstance(found, ErrorInfo):
        raise RowError(found.code, found.message, found.param)
    source = zlib.decompress(found[1:]).decode()
    if found[:1] == LLGUIDANCE:
        return Walk("llguidance", guidance_matcher(source, vocabulary), vocabulary)
    return Walk("xgrammar", xgrammar.CompiledGrammar.deserialize_json(source, info), vocabulary)


def compile_pattern(pattern: str) -> Walk:
    return compile_constraint_of("regex", pattern)


def compile_schema(schema: Any, *, lenient: bool = False) -> Walk:
    return compile_constraint_of("json_schema", json.dumps(schema), lenient=lenient)


def _mask(matcher: Any) -> Any:
    mask = np.zeros((1, -(-len(_PIECES) // 32)), np.int32)
    matcher.fill_next_token_bitmask(mask)
    return mask[0]


def _allowed(matcher: Any) -> list[int]:
    bits = np.unpackbits(_mask(matcher).view(np.uint8), bitorder="little")[: len(_PIECES)]
    return [int(token) for token in np.flatnonzero(bits)]
