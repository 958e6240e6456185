"""Stop patterns: compiled once, refused where they could not be used."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import regex

__all__ = ["MAX_PATTERN", "compile_pattern", "is_plain"]

MAX_PATTERN = 10_000
"""Characters of the longest pattern taken."""

_PLAIN_FLAGS = regex.UNICODE | regex.VERSION0 | regex.IGNORECASE | regex.DOTALL | regex.MULTILINE
_PLAIN = regex.compile(
    r"""(?: [^\\\[(){}^$*+?]                        # a character, or . or |
          | \\ [^0-9A-Za-z] | \\ [dDsSwWntrfv]      # an escaped sign, a class of characters, a control character
          | \[ \^? \]? (?: \\ . | [^\]\\] )* \]     # a set
          | \( (?! [?*] ) | \( \? : | \( \? P? < \w+ > | \( \? [ims]+ [:)] | \)
          | (?: [*+?] | \{ [0-9]+ (?: , [0-9]* )? \} ) \?? (?! [*+?] )
        )*+""",
    regex.VERBOSE | regex.DOTALL | regex.VERSION0,
)
_SECONDS = 1.0
"""Longest search in the empty text."""


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> Any:
    """A compiled pattern in the syntax of the `regex` package, which is that of `re` and more.

    Raises:
        ValueError: what is wrong with it, and at which position.
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"has {len(pattern)} characters; at most {MAX_PATTERN} are taken")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of spellings that later versions may read differently
            compiled = regex.compile(pattern, regex.VERSION0)
    except regex.error as error:
        raise ValueError(f"is no valid pattern: {error}") from None
    except Exception as error:  # such as RecursionError for thousands of groups in one another
        raise ValueError(f"cannot be compiled: {type(error).__name__}") from None
    if compiled.flags & regex.REVERSE:
        raise ValueError("searches backwards (?r), but a stop is the leftmost match; remove the flag")
    if _matches_nothing(compiled):
        raise ValueError("matches the empty text, so that every row would end at once; make it need a character")
    return compiled


def _matches_nothing(compiled: Any) -> bool:
    try:
        return compiled.search("", timeout=_SECONDS) is not None
    except TimeoutError:
        raise ValueError("takes too long even for an empty text; simplify it") from None


def is_plain(pattern: str) -> bool:
    """Whether a match depends on its own characters alone.

    That excludes anchors, word boundaries, look-around, back references and atomic groups. For a plain pattern the
    `regex` package says reliably where in a text that goes on a match may yet begin.
    """
    return not compile_pattern(pattern).flags & ~_PLAIN_FLAGS and _PLAIN.fullmatch(pattern) is not None
