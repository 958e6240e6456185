"""Usual output types of pydantic: a text of the grammar is a value of the type, or the schema is refused by name."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import pathlib
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest
from pydantic import BaseModel, Field, TypeAdapter

from batchgen.errors import RowError
from batchgen.text.grammar.schemas.validation import Schema
from tests.cases import each
from tests.text.grammar.walk import compile_schema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Node(BaseModel):
    value: bool
    children: list[Node] = Field(default=[], max_length=1)


class Base(BaseModel):
    item: Annotated[Cat, Field(description="which")]
    colour: Colour = Colour.RED


Code = Annotated[str, Field(pattern="^[A-Z]{2}[0-9]+$", min_length=3, max_length=6)]
Share = Annotated[float, Field(gt=0, le=2, multiple_of=0.05)]
Key = Annotated[str, Field(pattern="^k_")]

ENFORCED: list[tuple[Any, str]] = [
    (bool, "xgrammar"),
    (int, "xgrammar"),
    (float, "xgrammar"),
    (str, "xgrammar"),
    (bytes, "xgrammar"),
    (uuid.UUID, "xgrammar"),
    (pydantic.UUID4, "xgrammar"),
    (datetime.datetime, "xgrammar"),
    (datetime.date, "xgrammar"),
    (datetime.time, "xgrammar"),
    (datetime.timedelta, "xgrammar"),
    (pydantic.AnyUrl, "xgrammar"),
    (ipaddress.IPv4Address, "xgrammar"),
    (ipaddress.IPv6Address, "xgrammar"),
    (ipaddress.IPv4Network, "xgrammar"),
    (pydantic.SecretStr, "xgrammar"),
    (pathlib.Path, "xgrammar"),
    (Colour, "xgrammar"),
    (Literal["a", 1, None], "xgrammar"),
    (int | None, "xgrammar"),
    (int | str, "xgrammar"),
    (Annotated[Cat | Dog, Field(discriminator="kind")], "xgrammar"),
    (dict[str, bool], "xgrammar"),
    (dict[Key, bool], "xgrammar"),
    (dict[uuid.UUID, bool], "xgrammar"),
    (dict[Literal["a", "b"], bool], "xgrammar"),
    (tuple[int, bool], "xgrammar"),
    (tuple[bool, ...], "xgrammar"),
    (Annotated[list[int], Field(min_length=1, max_length=3)], "xgrammar"),
    (Node, "xgrammar"),
    (Base, "xgrammar"),
    (Code, "llguidance"),
    (Annotated[int, Field(multiple_of=5, ge=0, le=100)], "llguidance"),
    (Share, "llguidance"),
    (list[Share], "llguidance"),
    (dict[Key, Code], "llguidance"),
]


@pytest.mark.field("json_schema")
@each("kind, backend", ENFORCED)
def test_texts_are_values_of_the_type(kind: Any, backend: str) -> None:
    values = TypeAdapter(kind)
    grammar = compile_schema(values.json_schema())
    assert grammar.backend == backend
    texts = {grammar.random_text(seed, steps=40) for seed in range(12)} - {None}
    assert texts
    for text in texts:
        values.validate_json(text.decode(errors="replace"))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_web_address_with_its_length(scheme: str) -> None:
    """The schema does not say which schemes the type accepts."""
    grammar = compile_schema(TypeAdapter(pydantic.HttpUrl).json_schema())
    assert grammar.backend == "llguidance"
    assert grammar.accepts(f'"{scheme}://example.com/a?b=c"')
    assert not grammar.accepts(f'"{scheme}://example.com/{"a" * 2083}"')


def test_a_decimal_of_any_version() -> None:
    """As text it has a pattern with look-ahead in some versions."""
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    grammar = compile_schema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern}]})
    for text, good in {'"12.5"': True, "12.5": True, '".5"': True, '"+1."': True, '"."': False, '"-"': False}.items():
        assert grammar.accepts(text) is good, text


@pytest.mark.parametrize("kind", [set[int], frozenset[str]], ids=str)
def test_sets_are_refused_or_checked_afterwards(kind: Any) -> None:
    schema = TypeAdapter(kind).json_schema()
    with pytest.raises(RowError, match=r"`uniqueItems`.* finished texts are checked"):
        compile_schema(schema)
    assert compile_schema(schema, lenient=True).accepts("[]")
    second = Schema.parse(json.dumps(schema), "json_schema")
    assert [second.satisfied_by(text) for text in ("[]", "[1, 1]", '["a", "a"]')] == [True, False, False]
