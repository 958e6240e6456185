"""Compilation and validation of stop patterns (`stop_regex`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import regex

from batchgen.request.checks import invalid, show

MAX_PATTERN = 10_000
"""Most characters in a pattern."""

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
_EMPTY_TEXT_TIMEOUT = 1.0
"""Seconds that a search in the empty text may take."""


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> Any:
    """Compile a pattern in the syntax of the `regex` package, a superset of `re`.

    Raises:
        ValueError: the pattern is invalid or cannot be used for stopping.
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"has {len(pattern)} characters; at most {MAX_PATTERN} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about syntax that may change in a later version of regex
            compiled = regex.compile(pattern, regex.VERSION0)
    except regex.error as error:
        raise ValueError(f"is not a valid pattern: {error}") from None
    except Exception as error:  # such as RecursionError for thousands of nested groups
        raise ValueError(f"cannot be compiled: {type(error).__name__}") from None
    if compiled.flags & regex.REVERSE:
        raise ValueError("searches backwards (?r), but a stop is the leftmost match; remove the flag")
    try:
        is_empty = compiled.search("", timeout=_EMPTY_TEXT_TIMEOUT) is not None
    except TimeoutError:
        raise ValueError("takes too long even for an empty text; simplify it") from None
    if is_empty:
        raise ValueError("matches the empty text, so every row would end at once; make it match at least one character")
    return compiled


def check_patterns(name: str, patterns: Iterable[str]) -> None:
    """Check the stop patterns of the field `name`.

    Raises:
        RowError: `invalid_field`, naming the first pattern that `compile_pattern` refuses.
    """
    for pattern in patterns:
        try:
            compile_pattern(pattern)
        except ValueError as problem:
            raise invalid(name, f"{show(pattern)} {problem}") from None


def is_plain(pattern: str) -> bool:
    """Whether a match depends on its own characters only.

    This excludes anchors, word boundaries, look-around, back references and atomic groups. For a plain pattern, the
    `regex` package reports reliably where in an incomplete text a match can still begin.
    """
    return not compile_pattern(pattern).flags & ~_PLAIN_FLAGS and _PLAIN.fullmatch(pattern) is not None
