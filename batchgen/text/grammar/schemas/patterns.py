r"""Translation of regular expressions from Python's syntax to the subset that every dialect reads alike.

xgrammar has a different dialect, in which `.` matches a line break, `\S` matches most Unicode whitespace and an anchor
in the middle is dropped. The translation therefore consists of literals, explicit classes, groups, `|` and repeats. It
matches only texts that the pattern matches, in Python with and without `re.ASCII` and in ECMA-262 with the flag `u`:
where dialects differ (`\w`, `\d`, `\s`, `.`) it takes the narrower meaning, and what they read as different things
(`[[:alpha:]]`, `[a&&b]`, in schemas `[]a]`) is refused.
"""

from __future__ import annotations

import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

Ranges = tuple[tuple[int, int], ...]
"""Code points as sorted, disjoint, inclusive ranges."""

_MAX_CODE_POINT = 0x10FFFF
_UTF8_ZONES = ((0, 0x7FF), (0x800, 0xFFF), (0x1000, 0xFFFF), (0x10000, 0x3FFFF), (0x40000, _MAX_CODE_POINT))
"""Code point ranges by first byte of their UTF-8: at most two bytes, E0, E1 to EF, F0, F1 to F4."""
_SURROGATES = (0xD800, 0xDFFF)
_ANCHORS_BEFORE = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
_ANCHORS_AFTER = (sre.AT_END, sre.AT_END_STRING)
_REPEATS = re.compile(r"[*+}]")
"""Finds a repeat in a written pattern; literal characters of these are written as escapes."""
_REFUSED = {
    sre.ASSERT: "look-around",
    sre.ASSERT_NOT: "look-around",
    sre.GROUPREF: "a back-reference",
    sre.GROUPREF_EXISTS: "a conditional group",
    sre.ATOMIC_GROUP: "an atomic group",
    sre.POSSESSIVE_REPEAT: "a possessive repeat",
}


_EQUAL_PATTERNS = {
    # pydantic's pattern for Decimal: at least one digit
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}
"""Usual patterns of schemas with look-around -> patterns without it that match the same strings."""


class PatternError(ValueError):
    """A pattern that is invalid, or that a grammar cannot express."""

    def __init__(self, problem: str, *, invalid: bool = False) -> None:
        super().__init__(problem)
        self.invalid = invalid
        """Whether the pattern itself is invalid, not just beyond what grammars support."""


class _NoCharacter(PatternError):
    """A part of a pattern that no text can have, since its characters are barred."""

    def __init__(self) -> None:
        super().__init__("needs a character that the text cannot hold unescaped")


_PART = re.compile(
    r"\\.|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\]?)|(?P<count>\{(?:\d+(?:,\d*)?|,\d*)\})|(?P<brace>\{)|.", re.DOTALL
)
"""Parts of a pattern: an escape, a bracketed class, a counted repeat, a brace that begins none, another character."""


def with_escaped_braces(pattern: str) -> str:
    """`pattern` with a backslash before each brace that is a literal character."""
    return _PART.sub(lambda part: "\\{" if part["brace"] else part[0], pattern)


def explicit_pattern(pattern: str, *, json_string: bool = False) -> str:
    """`pattern` in plain ASCII and without anything that dialects read differently, to be matched whole.

    Args:
        pattern: pattern in Python's syntax, matched whole.
        json_string: the pattern is a schema's: exclude characters that JSON strings must escape, and let a pattern that
            is anchored at one end only go on at the other.

    Raises:
        PatternError: the pattern is invalid, or a grammar cannot express it.
    """
    if json_string:
        pattern = _EQUAL_PATTERNS.get(pattern, pattern)
    _refuse_other_readings(pattern, is_schema=json_string)
    parsed = _parse(pattern)
    if parsed.state.flags & ~re.UNICODE.value:
        raise PatternError("uses inline flags, which grammars do not support")
    barred = _union([_SURROGATES], [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)] if json_string else [])
    writer = _PatternWriter(barred)
    written = writer.sequence(list(parsed), first=True, last=True)
    open_end = _open_end(parsed) if json_string else None
    if open_end is None:
        return written
    rest = f"{writer.any_character()}*"
    return f"{rest}(?:{written})" if open_end == 0 else f"(?:{written}){rest}"


def pattern_width(pattern: str) -> tuple[int, float]:
    """Fewest and most characters of a string that follows a schema's pattern, which `explicit_pattern` accepts."""
    parsed = _parse(_EQUAL_PATTERNS.get(pattern, pattern))
    low, high = parsed.getwidth()
    return low, math.inf if high >= int(sre.MAXREPEAT) or _open_end(parsed) is not None else high


def _parse(pattern: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # of classes that a later Python may read differently
            return _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"is not a valid pattern: {error}", invalid=True) from None


def has_one_reading(pattern: str) -> bool:
    """Whether all dialects read a schema's pattern as the same thing, or refuse it."""
    try:
        _refuse_other_readings(pattern, is_schema=True)
    except PatternError:
        return False
    return True


def _refuse_other_readings(pattern: str, *, is_schema: bool) -> None:
    """Refuse classes that Python, ECMA-262 or the POSIX tools read as different things."""
    for part in _PART.finditer(pattern):
        text = part["set"]
        if text is None:
            continue
        if re.search(r"\[[:.=]", text[1:]):
            raise PatternError(f"uses {text}], which is read in different ways; write the characters, such as [A-Za-z]")
        if re.search(r"&&|~~|\|\||(?<!\[)--(?!\])", text):
            raise PatternError(f"uses the class {text}, which is read in different ways; write each character once")
        if is_schema and text[1:].removeprefix("^")[:1] == "]":
            raise PatternError(f"uses the class {text}, which is read in different ways; write the first ] as \\]")


def _open_end(parsed: Any) -> int | None:
    """The end (0 the beginning, -1 the end) that has no anchor while all alternatives have one at the other."""
    counts = {end: _anchored(list(parsed), end) for end in (0, -1)}
    return next((end for end, other in ((0, -1), (-1, 0)) if (counts[end], counts[other]) == (0, 2)), None)


def _anchored(items: list[tuple[Any, Any]], end: int) -> int:
    """Whether every alternative (2), some (1) or none (0) has an anchor at `end`: 0 the beginning, -1 the end."""
    if not items:
        return 0
    op, argument = items[end]
    if op is sre.AT:
        return 2 if argument in (_ANCHORS_BEFORE if end == 0 else _ANCHORS_AFTER) else 0
    if op is sre.SUBPATTERN:
        return _anchored(list(argument[3]), end)
    if op is sre.BRANCH:
        kinds = {_anchored(list(branch), end) for branch in argument[1]}
        return kinds.pop() if len(kinds) == 1 else 1
    return 0


class _PatternWriter:
    """Writer of a parsed pattern as text, without the characters in `barred`."""

    def __init__(self, barred: Ranges) -> None:
        self._barred = barred

    def sequence(self, items: list[tuple[Any, Any]], *, first: bool, last: bool) -> str:
        """Text of consecutive items; `first`, `last`: whether the match begins and ends with them."""
        written = []
        for place, (op, argument) in enumerate(items):
            # Only other anchors may come before a leading or after a trailing anchor.
            at_first = first and all(o is sre.AT for o, _ in items[:place])
            at_last = last and all(o is sre.AT for o, _ in items[place + 1 :])
            written.append(self._item(op, argument, at_first, at_last))
        return "".join(written)

    def _possible(self, items: list[tuple[Any, Any]], *, first: bool, last: bool) -> str | None:
        """`sequence` of items that may be left out; None if no text can have them."""
        try:
            return self.sequence(items, first=first, last=last)
        except _NoCharacter:
            return None

    def any_character(self) -> str:
        """Text of a class of all characters, line breaks too."""
        return f"(?:{self._characters(((0, _MAX_CODE_POINT),))})"

    def _item(self, op: Any, argument: Any, first: bool, last: bool) -> str:
        if op is sre.LITERAL:
            return self._characters(((argument, argument),))
        if op is sre.NOT_LITERAL:
            return self._characters(_complement(((argument, argument),)))
        if op is sre.ANY:
            return self._characters(_complement(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))))
        if op is sre.IN:
            return self._characters(_class_ranges(argument))
        if op is sre.BRANCH:
            branches = [self._possible(list(branch), first=first, last=last) for branch in argument[1]]
            written = [branch for branch in branches if branch is not None]
            if not written:
                raise _NoCharacter
            return f"(?:{'|'.join(written)})"
        if op is sre.SUBPATTERN:
            _, added, removed, inner = argument
            if added or removed:
                raise PatternError("uses inline flags, which grammars do not support")
            return f"(?:{self.sequence(list(inner), first=first, last=last)})"
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeat(*argument)
        if op is sre.AT:
            return self._anchor(argument, first, last)
        raise PatternError(f"uses {_REFUSED.get(op, op)}, which grammars do not support")

    def _repeat(self, low: int, high: Any, inner: Any) -> str:
        body = self._possible(list(inner), first=False, last=False)
        if body is None and low:
            raise _NoCharacter
        if not body or high == 0:
            return ""
        # In a schema's pattern, xgrammar 0.2 allows other texts where `?`, or an open count of 2 or more, is around
        # another repeat. Exact and finite counts, `*` and `+` are right.
        body = f"(?:{body})"
        if high is sre.MAXREPEAT and low < 2:
            return f"{body}{'*' if low == 0 else '+'}"
        if high is sre.MAXREPEAT:
            return f"{body}{{{low}}}{body}*" if _REPEATS.search(body) else f"{body}{{{low},}}"
        return f"{body}{{{low},{high}}}" if low < high else f"{body}{{{low}}}"

    def _anchor(self, where: Any, first: bool, last: bool) -> str:
        if (where in _ANCHORS_BEFORE and first) or (where in _ANCHORS_AFTER and last):
            return ""
        if where in (*_ANCHORS_BEFORE, *_ANCHORS_AFTER):
            raise PatternError("has an anchor inside, which grammars do not support")
        raise PatternError("uses a word boundary, which grammars do not support")

    def _characters(self, ranges: Ranges) -> str:
        left = _complement(_union(_complement(ranges), self._barred))
        if not left:
            raise _NoCharacter
        if len(left) == 1 and left[0][0] == left[0][1]:
            return _escape(left[0][0])
        # xgrammar allows overlong UTF-8 if one class spans several zones; alternatives of one class per zone are exact.
        parts = [_intersection(left, zone) for zone in _UTF8_ZONES]
        classes = [f"[{''.join(map(_escape_range, part))}]" for part in parts if part]
        return classes[0] if len(classes) == 1 else f"(?:{'|'.join(classes)})"


def _escape(code: int) -> str:
    if code < 0x80 and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\u{{{code:x}}}"


def _escape_range(span: tuple[int, int]) -> str:
    low, high = span
    return _escape(low) if low == high else f"{_escape(low)}-{_escape(high)}"


def _class_ranges(items: list[tuple[Any, Any]]) -> Ranges:
    """Code points of a bracketed class. In a negated class every category has its wider meaning."""
    negated = bool(items) and items[0][0] is sre.NEGATE
    spans: list[tuple[int, int]] = []
    for op, argument in items[1:] if negated else items:
        if op is sre.LITERAL:
            spans.append((argument, argument))
        elif op is sre.RANGE:
            spans.append(argument)
        else:
            spans += _category_ranges(argument, wide=negated)
    ranges = _union(spans)
    return _complement(ranges) if negated else ranges


_NARROW: dict[Any, Ranges] = {
    sre.CATEGORY_DIGIT: ((0x30, 0x39),),
    sre.CATEGORY_SPACE: ((0x09, 0x0D), (0x20, 0x20)),
    sre.CATEGORY_WORD: ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
}
_WIDE: dict[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: lambda c: unicodedata.category(c) == "Nd",
    sre.CATEGORY_SPACE: lambda c: c.isspace() or c == "\ufeff",
    sre.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
}
_NEGATED = {
    sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
    sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
    sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
}


def _category_ranges(category: Any, *, wide: bool) -> Ranges:
    r"""Code points of `\d`, `\S` and so on that every dialect includes, or any dialect if `wide`."""
    if category in _NEGATED:
        return _complement(_category_ranges(_NEGATED[category], wide=not wide))
    return _wide_category(category) if wide else _NARROW[category]


@lru_cache
def _wide_category(category: Any) -> Ranges:
    """Code points that some dialect includes in a category."""
    test = _WIDE[category]
    return _union((code, code) for code in range(_MAX_CODE_POINT + 1) if test(chr(code)))


def _union(*groups: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for group in groups for pair in group):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _intersection(ranges: Ranges, zone: tuple[int, int]) -> Ranges:
    return tuple((max(a, zone[0]), min(b, zone[1])) for a, b in ranges if a <= zone[1] and b >= zone[0])


def _complement(ranges: Ranges) -> Ranges:
    left, begin = [], 0
    for low, high in ranges:
        if low > begin:
            left.append((begin, low - 1))
        begin = high + 1
    if begin <= _MAX_CODE_POINT:
        left.append((begin, _MAX_CODE_POINT))
    return tuple(left)
