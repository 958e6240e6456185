"""Random texts of a grammar, generated token by token without an engine."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import torch
import xgrammar

from batchgen.kernels.bitmask import bitmask_width

_STOP = 256
_PIECES = [bytes([byte]) for byte in range(256)] + [b""]
_PIECES += [
    t.encode() for t in ('": "', '", "', '": ', '{"', '"}', "é", "日本", "true", "null", "12", "\\u00", "ab", "], [")
]


@cache
def _compiler() -> Any:
    # The JSON vocabulary has no control characters.
    pieces = [b"" if piece and min(piece) < 0x20 else piece for piece in _PIECES]
    json_info = xgrammar.TokenizerInfo(pieces, vocab_size=len(pieces), stop_token_ids=[])
    info = xgrammar.TokenizerInfo(_PIECES, vocab_size=len(_PIECES), stop_token_ids=[])
    options = {"max_threads": 1, "cache_enabled": False}
    return xgrammar.GrammarCompiler(info, **options), xgrammar.GrammarCompiler(json_info, **options)


def compile_pattern(pattern: str) -> Any:
    return _compiler()[0].compile_regex(pattern)


def compile_schema(schema: str) -> Any:
    return _compiler()[1].compile_json_schema(schema, any_whitespace=False)


def accepts(grammar: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text)) and bool(matcher.is_completed())


def random_text(grammar: Any, seed: int, steps: int = 60) -> bytes | None:
    """A random text of the grammar; None if it became too long.

    Raises:
        AssertionError: no token is allowed before the text is complete.
    """
    rng = Random(seed)
    matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[_STOP])
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


def _allowed(matcher: Any) -> list[int]:
    mask = torch.zeros(1, bitmask_width(len(_PIECES)), dtype=torch.int32)
    matcher.fill_next_token_bitmask(mask)
    words = mask[0].tolist()
    return [token for token in range(len(_PIECES)) if words[token // 32] >> token % 32 & 1]
