"""Formats: valid and invalid texts by their standards, and that a format's grammar only allows valid ones."""

from __future__ import annotations

import json
import re

import pytest

from batchgen.errors import RowError
from batchgen.text.grammar.schemas.formats import FORMATS, IMPLIED_PATTERNS
from batchgen.text.grammar.schemas.validation import Schema
from tests.cases import each
from tests.text.grammar.walk import compile_constraint_of, compile_schema

# Format -> valid texts, invalid texts.
TEXTS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "0001-01-01"], ["2023-02-29", "2024-13-01", "24-01-01", "2024-1-01", "٢٠٢٤-01-01"]),
    "time": (
        ["00:00:00Z", "23:59:60Z", "08:59:60.5+09:00", "12:30:45.123z"],
        ["12:00", "12:00:00", "24:00:00Z", "12:00:60Z", "12:00:00+24:00", "12:00:00.Z", "1:00:00Z"],
    ),
    "date-time": (
        ["2024-02-29T12:00:00Z", "1985-04-12t23:20:50.52-08:00"],
        ["2024-02-29 12:00:00Z", "2024-02-30T12:00:00Z", "2024-02-29T12:00:00", "2024-02-29", "T"],
    ),
    "duration": (["P1Y2M3D", "P4W", "PT1H30M", "P1DT12H", "PT36S"], ["P", "PT", "P1Y2D", "P1W2D", "1D", "PT1H2S"]),
    "email": (
        ["a@example.com", "a.b+c@x-y.org", '"a b"@example.com', "a@[127.0.0.1]", "a@[IPv6:::1]"],
        ["a", "@b.com", "a@", ".a@b.com", "a..b@c.com", "a b@c.com", "a@b_c.com", "ü@example.com", "a@-b.com"],
    ),
    "idn-email": (["ü@example.com", "a@bücher.de"], ["ü", "ü b@example.com"]),
    "hostname": (["example.com", "a", "a-b.c9", "xn--bcher-kva.de"], ["", "-a", "a-", "a..b", "a_b", "a" * 64, "ü.de"]),
    "idn-hostname": (["bücher.de", "a"], ["-ü", "a b"]),
    "ipv4": (["127.0.0.1", "255.255.255.255"], ["1.2.3", "256.1.1.1", "01.2.3.4", "1.2.3.4 ", "١.2.3.4"]),
    "ipv6": (["::", "::1", "fe80::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4"],
             ["1:2:3", "fe80::1%eth0", "12345::", "::1/64"]),
    "ipvanyaddress": (["1.2.3.4", "::1"], ["1.2.3", "x"]),
    "ipv4network": (["10.0.0.0/8"], ["10.0.0.1/8", "10.0.0.0", "10.0.0.0/33"]),
    "ipv6interface": (["::1/128"], ["::1", "::1/129"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000", "123E4567-E89B-12D3-A456-426614174000"], ["123e4567", "g" * 36]),
    "uuid4": (["123e4567-e89b-42d3-a456-426614174000"], ["123e4567-e89b-12d3-a456-426614174000"]),
    "uri": (
        ["https://example.com/a?b=c#d", "urn:isbn:1", "mailto:a@b.c", "http://[::1]:80/", "a:"],
        ["//example.com", "example.com/a", "http://a b", "http://[::1", "1a:b", "http://a/%zz", "http://a:b:c"],
    ),
    "uri-reference": (["", "a/b", "/a", "?q", "#f", "//h/p", "https://a"], ["a b", "1:b", "\\", "[", "%"]),
    "iri": (["http://ü.de/ä", "https://a"], ["ü.de", "http://ü b"]),
    "iri-reference": (["ü/ä", ""], ["ü b"]),
    "uri-template": (["/a/{b}", "{?x,y*}", "{+p:3}/x", ""], ["{", "{a", "}", "{a b}", "{}", '"']),
    "json-pointer": (["", "/", "/a~0b/~1", "/0"], ["a", "/~", "/~2", "#/a"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["", "01", "-1", "1a", "1#/a", "/a"]),
    "base64": (["", "YQ==", "YWI=", "YWJj"], ["Y", "YQ", "YR==", "YQ==\n", "Y_=="]),
    "base64url": (["_-8="], ["/+8="]),
    "regex": (["a(b)?", ""], ["(", "[a"]),
}  # fmt: skip


@each("name", TEXTS)
def test_checks_follow_the_standard(name: str) -> None:
    schema = Schema.parse(json.dumps({"type": "string", "format": name}), "json_schema")
    valid, invalid = TEXTS[name]
    assert {text: schema.satisfied_by(json.dumps(text)) for text in (*valid, *invalid)} == {
        **dict.fromkeys(valid, True),
        **dict.fromkeys(invalid, False),
    }


@each("name", [name for name, known in FORMATS.items() if known.pattern is not None])
@pytest.mark.field("json_schema")
def test_the_grammar_of_a_format_allows_only_valid_texts(name: str) -> None:
    """Alone, and with a length, which the other compiler takes."""
    found = set()
    for schema, backend in (
        ({"type": "string", "format": name}, "xgrammar"),
        ({"type": "string", "format": name, "minLength": 1, "maxLength": 300, "pattern": "^."}, "llguidance"),
    ):
        grammar = compile_schema(schema)
        assert grammar.backend == backend
        second = Schema.parse(json.dumps(schema), "json_schema")
        for seed in range(10):
            text = grammar.random_text(seed, steps=40)
            if text is not None:
                assert second.satisfied_by(text.decode()) is True, text
                found.add(text)
    assert len(found) > 4


@pytest.mark.parametrize("name", ["int8", "uint16", "int32", "int64"])
def test_formats_of_integers_are_ranges(name: str) -> None:
    grammar = compile_schema({"type": "integer", "format": name})
    bits, signed = int(name.strip("uint")), name[0] != "u"
    most, least = 2 ** (bits - signed) - 1, -(2 ** (bits - 1)) if signed else 0
    assert not any(grammar.accepts(str(value)) for value in (most + 1, least - 1))
    assert grammar.accepts(str(most - 1))
    schema = Schema.parse(json.dumps({"type": "integer", "format": name}), "json_schema")
    assert [schema.satisfied_by(str(value)) for value in (least, most, most + 1)] == [True, True, False]


@pytest.mark.parametrize("name", IMPLIED_PATTERNS)
def test_the_pattern_that_zod_writes_next_to_a_format_holds(name: str) -> None:
    """Of several lengths too, and in a structural tag, which has no place for a pattern next to a format."""
    schema = {"type": "string", "format": name, "pattern": IMPLIED_PATTERNS[name]}
    tag = {"format": {"type": "json_schema", "json_schema": schema}}
    assert compile_constraint_of("structural_tag", json.dumps(tag)).backend == "xgrammar"
    for grammar in (compile_schema(schema), compile_schema({**schema, "maxLength": 200})):
        found = {grammar.random_text(seed, steps=40) for seed in range(10)} - {None}
        assert len(found) > 4
        assert all(re.search(IMPLIED_PATTERNS[name], json.loads(text)) for text in found)
    with pytest.raises(RowError, match="look-around"):
        compile_schema({**schema, "pattern": schema["pattern"] + "|a"})


ZOD = {
    "uuid": (r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$",
             "123e4567-e89b-42d3-a456-426614174000", "123e4567-e89b-12d3-a456-426614174000"),
    "date-time": (r"^\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z)$",
                  "2024-02-29T12:00:00Z", "2024-02-30T12:00:00Z"),
    "ipv4": (r"^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|"
             "[1-9][0-9]|[0-9])$", "10.0.0.1", "10.0.0.256"),
    "base64": ("^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$", "YQ==", "YQ"),
    "e164": (r"^\+[1-9]\d{6,14}$", "+4930123456", "030123456"),
    "cuid2": ("^[0-9a-z]+$", "9msn", "A"),
    "starts_with": (r"^a\.b.*", "a.b c", "b"),
}  # fmt: skip
"""Format -> the pattern that zod writes next to it, a text of both, a text that breaks one."""


@pytest.mark.parametrize("name", ZOD)
def test_formats_of_zod_with_their_patterns(name: str) -> None:
    pattern, good, bad = ZOD[name]
    schema = {"type": "string", "format": name, "pattern": pattern}
    if name == "base64":
        schema["contentEncoding"] = name
    grammar, second = compile_schema(schema), Schema.parse(json.dumps(schema), "json_schema")
    for text in (good, bad):
        assert grammar.accepts(json.dumps(text)) is second.satisfied_by(json.dumps(text)) is (text == good)
    if name not in FORMATS:
        with pytest.raises(RowError, match=rf"the format '{name}' is unknown"):
            compile_schema({"type": "string", "format": name})
        assert Schema({"type": "string", "format": name}).satisfied_by('"a"') is None


def test_a_note_next_to_the_values_of_an_enum() -> None:
    schema = {"type": "string", "format": "enum", "enum": ["a", "b"]}
    assert compile_schema(schema).accepts('"b"')
    assert Schema(schema).satisfied_by('"b"') is True
