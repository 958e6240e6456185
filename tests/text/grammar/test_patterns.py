"""`explicit_pattern`: its result matches in every dialect, and unsupported patterns are refused."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from batchgen.text.grammar.schemas.patterns import PatternError, explicit_pattern
from batchgen.text.grammar.schemas.validation import matches_whole
from tests.cases import each, examples
from tests.text.grammar.walk import Walk, compile_pattern, compile_schema

CLASSES = [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "[ab]", "[^a]", r"[^\s\d]", r"[\w-]", "[b-é]"]
ATOMS = st.sampled_from(["a", "b", "1", " ", "é", "日", ".", r"\.", *CLASSES])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "+?", "{0,2}?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map(lambda part: f"(?P<g{abs(hash(part))}>{part})"),
    ),
    max_leaves=8,
)


def grammar_of(pattern: str, json_string: bool) -> Walk:
    """The grammar of a pattern, as the field `regex` or in a schema."""
    return compile_schema({"type": "string", "pattern": pattern}) if json_string else compile_pattern(pattern)


@examples(150)
@given(PATTERNS, st.booleans())
@example(".", False)
@example(r"[^\S\n]+", False)
@example(r"^(a|^b)$", False)
@pytest.mark.field("regex")
def test_texts_of_the_grammar_match_the_pattern(pattern: str, json_string: bool) -> None:
    try:
        re.compile(pattern)
    except re.error:  # the same group name twice
        assume(False)
    assert explicit_pattern(pattern, json_string=json_string).isascii()
    grammar = grammar_of(pattern, json_string)
    for seed in range(6):
        found = grammar.random_text(seed, steps=12)
        if found is None:
            continue
        text = json.loads(found) if json_string else found.decode()
        for flags in (0, re.ASCII):
            assert re.fullmatch(pattern, text, flags), (pattern, text)


@examples(150)
@given(PATTERNS, st.text(alphabet="ab1 é.日\n-", max_size=6))
def test_the_grammar_accepts_what_the_pattern_matches_in_ascii(pattern: str, text: str) -> None:
    """Only for patterns that all dialects read alike: no categories and no dot."""
    assume(not re.search(r"\\[DWSdws]|\.", pattern.replace(r"\.", "")))
    try:
        expected = re.fullmatch(pattern, text) is not None
    except re.error:
        assume(False)
    assert compile_pattern(pattern).accepts(text) == expected


@each(
    "pattern, message, invalid",
    [
        ("(", "unterminated", True),
        ("a{3,2}", "min repeat", True),
        (r"\p{L}", "bad escape", True),
        ("(?<name>a)", "unknown extension", True),
        ("(" * 5000 + ")" * 5000, "not a valid pattern", True),
        ("(?=a)", "look-around", False),
        ("(?<!a)b", "look-around", False),
        (r"(a)\1", "back-reference", False),
        ("(a)?(?(1)b|c)", "conditional", False),
        ("(?>ab|a)", "atomic", False),
        ("a*+", "possessive", False),
        (r"\bfoo", "word boundary", False),
        ("(?i)a", "flags", False),
        ("(?s:.)", "flags", False),
        ("(?:^a)+", "anchor", False),
        ("a$b", "anchor", False),
    ],
)
def test_unsupported_patterns_are_refused(pattern: str, message: str, invalid: bool) -> None:
    with pytest.raises(PatternError, match=message) as caught:
        explicit_pattern(pattern)
    assert caught.value.invalid is invalid


@pytest.mark.parametrize(
    "pattern", ["[[:alpha:]]", "[a[:digit:]b]+", "[[.a.]]", "[a&&b]", "[a--z]", "[a||b]", "[a~~b]"]
)
def test_classes_that_dialects_read_differently_are_refused(pattern: str) -> None:
    for json_string in (False, True):
        with pytest.raises(PatternError, match="read in different ways"):
            explicit_pattern(pattern, json_string=json_string)
    with pytest.raises(PatternError, match="read in different ways"):
        explicit_pattern("[]a]", json_string=True)


@pytest.mark.parametrize("pattern", ["a{e}", "{a}", "x{", "a{,2}", "[{]{2}", r"\{1}"])
def test_a_brace_means_the_same_to_the_grammar_and_to_the_check(pattern: str) -> None:
    """Another dialect takes `a{e}` for an approximate match."""
    grammar = compile_pattern(pattern)
    for text in ("a{e}", "a", "b", "{a}", "x{", "aa", "aaa", "{{", "{", ""):
        assert grammar.accepts(text) == matches_whole(pattern, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^ab", ["ab", "abc", "ab ab"], ["a", "cab"]),
        ("ab$", ["ab", "cab"], ["abc", "b"]),
        ("ab", ["ab"], ["cab", "abc"]),
        ("^ab$", ["ab"], ["cab", "abc"]),
        ("^(?:a|b)", ["a", "bb"], ["", "cb"]),
        ("^(a$|b)", ["a", "b"], ["aa"]),
        ("^", ["", "a"], []),
    ],
)
def test_a_schema_s_pattern_goes_on_where_only_one_end_is_anchored(
    pattern: str, good: list[str], bad: list[str]
) -> None:
    grammar = compile_schema({"type": "string", "pattern": pattern})
    assert {text: grammar.accepts(json.dumps(text)) for text in (*good, *bad)} == {t: t in good for t in (*good, *bad)}
    assert all(re.search(pattern, text) for text in good)


@pytest.mark.parametrize("pattern", ['"', r"a\\b", r"\x00", "[\n\t]", r"(?:\n|\t)a", r"\n{2,}"])
def test_characters_that_json_escapes_are_refused_in_strings(pattern: str) -> None:
    explicit_pattern(pattern)
    with pytest.raises(PatternError, match="needs a character"):
        explicit_pattern(pattern, json_string=True)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^.*\$\{\{(.|[\r\n])*\}\}.*$", ["${{ a.b }}", "x${{}}y"], ["", "${ a }", "${{ a }"]),
        (r"^a(?:\n|b)c$", ["abc"], ["ac"]),
        (r'^a(?:"|b)?$', ["a", "ab"], []),
        (r"^a\n*$", ["a"], ["ab"]),
        (r"^(?:a|\t+)(?:\\|[\n\r]|b)$", ["ab"], ["a"]),
    ],
)
def test_parts_that_need_escapes_are_left_out_where_others_do(pattern: str, good: list[str], bad: list[str]) -> None:
    """The grammar allows fewer texts than the pattern, never others."""
    grammar = compile_schema({"type": "string", "pattern": pattern})
    assert {text: grammar.accepts(json.dumps(text)) for text in (*good, *bad)} == {t: t in good for t in (*good, *bad)}
    assert [bool(re.search(pattern, text)) for text in (*good, *bad)] == [text in good for text in (*good, *bad)]
    assert not grammar.accepts(json.dumps(good[0] + "\n"))


@pytest.mark.parametrize("pattern", ["^a$", r"\Aa\Z", "(?:^a$)", "(^a|^b)$", "^$", "^(a|b$)"])
def test_anchors_around_the_whole_pattern_have_no_effect(pattern: str) -> None:
    grammar = compile_pattern(pattern)
    for text in ("a", "b", ""):
        assert grammar.accepts(text) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize("pattern", [r"[߀-ꯍ]{2}", r"\D{3}", "[^a]{2}", "[\U0001f000-\U0010ffff]", r"\W{2}"])
def test_texts_are_always_valid_utf8(pattern: str) -> None:
    for json_string in (False, True):
        grammar = grammar_of(pattern, json_string)
        for seed in range(150):
            found = grammar.random_text(seed)
            assert found is not None
            found.decode()
