"""Stop patterns: refused patterns, and the properties of plain ones."""

from __future__ import annotations

import re

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from batchgen.errors import RowError
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.stop_patterns import compile_pattern, is_plain
from tests.cases import each, examples

REFUSED = [
    ("(", "missing ) at position 1"),
    ("a)", "at position 1"),
    ("*a", "nothing to repeat at position 0"),
    ("a{2,1}", "at position 2"),
    ("[z-a]", "bad character range at position 4"),
    (r"\L<words>", "undefined named list"),
    (r"\N{NO SUCH SIGN}", "at position"),
    ("(" * 3000 + "a" + ")" * 3000, "RecursionError"),
    ("a" * 10_001, "10001 characters; at most 10000"),
    ("(?r)ab", "backwards"),
    ("", "must not contain an empty string"),
    ("a*", "empty text"),
    ("^", "empty text"),
    ("x|", "empty text"),
    ("(?=a)?", "empty text"),
]


@pytest.mark.field("stop_regex")
@each("pattern, problem", REFUSED)
def test_invalid_patterns_are_refused(pattern: str, problem: str) -> None:
    with pytest.raises(RowError, match="`stop_regex`") as caught:
        SamplingParams(stop_regex=["fine", pattern])  # type: ignore[arg-type]
    assert caught.value.info.code == "invalid_field"
    assert caught.value.info.param == "stop_regex"
    assert problem in caught.value.info.message
    assert len(caught.value.info.message) < 300


@pytest.mark.field("stop_regex")
def test_at_most_32_patterns() -> None:
    assert len(SamplingParams(stop_regex=["a"] * 32).stop_regex) == 32  # type: ignore[arg-type]
    with pytest.raises(RowError, match="at most 32 patterns, got 33"):
        SamplingParams(stop_regex=["a"] * 33)  # type: ignore[arg-type]


PLAIN = [
    "a", "a+b", r"\d{2,}",
    "[^]a-z]+?x", "(?:ab|c)+d", "(?i)End", "(?P<name>x)y", r"\.\s*\n", "(?s:a.b)", "a{3}", "[[]x", "é東",
]  # fmt: skip
NOT_PLAIN = [
    "^a", "a$",
    r"\ba", r"a\b", "(?=a)a", "(?<!b)a", r"(a)\1", "a++b", "(?>a|b)c", r"\Ka", "(?:foo){e<=1}", "(?x) a", "(?b)a",
    r"\Aa", r"a\Z", r"\Xa", "(?|a|b)", "(?R)?a", "a*+b", "a{1,2}+", "(?e)a", "(?P<n>a)(?P=n)",
]  # fmt: skip


def test_is_plain() -> None:
    assert all(is_plain(pattern) for pattern in PLAIN)
    for pattern in NOT_PLAIN:
        assert not is_plain(pattern), pattern


def atoms() -> st.SearchStrategy[str]:
    return st.sampled_from(
        ["a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"\s", r"\W", " ", "é", r"\.", "(?s:.)", "(?i:A)"]
    )


def plain_patterns() -> st.SearchStrategy[str]:
    repeat = st.sampled_from(["", "", "+", "*", "?", "+?", "*?", "??", "{2}", "{1,3}", "{2,}", "{1,2}?"])

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        group = st.tuples(st.sampled_from(["(", "(?:"]), inner, repeat).map(lambda g: f"{g[0]}{g[1]}){g[2]}")
        return st.lists(group | inner, min_size=1, max_size=3).map("".join) | st.tuples(inner, inner).map("|".join)

    return st.recursive(st.tuples(atoms(), repeat).map("".join), grow, max_leaves=6)


@examples(400)
@given(plain_patterns(), st.text("aabc é.\n", max_size=24))
def test_plain_patterns_report_where_a_match_may_begin(pattern: str, text: str) -> None:
    """Searching from there after each character finds the same match as `re` in the whole text."""
    try:
        compiled = compile_pattern(pattern)
    except ValueError:
        return
    assert is_plain(pattern)
    start = 0
    for length in range(1, len(text) + 1):
        match = compiled.search(text[:length], start, partial=True, timeout=5)
        whole = re.search(pattern, text[:length])
        if whole is not None:
            assert match is not None
            assert not match.partial
            assert match.span() == whole.span()
            return
        assert match is None or match.partial
        start = length if match is None else match.start()


def test_positions_follow_the_regex_package() -> None:
    """The search needs this: anchors and look-behind see text before `pos`, and a full match precedes a partial one."""
    assert regex.compile("(?<=x)foo").search("xfoo", 1).span() == (1, 4)
    assert regex.compile("^foo").search("xfoo", 1) is None
    assert regex.compile("ab|b").search("xab a", partial=True).span() == (1, 3)
