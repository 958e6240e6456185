"""The kinds of constraints: one `GrammarKind` each, in `KINDS`. A further kind is one more entry.

A constraint's text is checked and rewritten for a grammar compiler so that it keeps its meaning. Finished texts are
checked by other libraries than the ones that compile grammars, where there are any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import invalid_grammar
from batchgen.request.fields.constraint import ConstraintKind
from batchgen.request.foreign_text import ForeignTextError, read_json
from batchgen.text.calls import Function
from batchgen.text.grammar.schemas.patterns import PatternError, explicit_pattern
from batchgen.text.tools.formats import FORMATS
from batchgen.text.tools.keyed_calls import RAW_STRING, raw_string_format

_TAG_WHITESPACE = 16
"""Most consecutive whitespace characters between JSON tokens inside a structural tag that sets no limit."""
_MAX_TAG_DEPTH = 100
ONE_LINE = "one_line"
"""Key of a schema in a structural tag whose JSON is written as for `json_schema`: in one line, as chat templates do."""

Check = Callable[[str], bool | None]
"""Function that tells whether a finished text satisfies a constraint; None if that cannot be known."""


class Source(NamedTuple):
    """What a compiler reads."""

    form: Literal["json_schema", "guidance_schema", "regex", "ebnf", "structural_tag"]
    """Language of `text`; `guidance_schema` is compiled by llguidance, all others by xgrammar."""
    text: str


@dataclass(frozen=True, slots=True)
class GrammarKind:
    """How constraints of one kind are compiled, and how finished texts are checked."""

    sources: Callable[[str, bool], Iterator[Source]]
    """(text of the constraint, whether schema keywords that cannot be enforced are ignored) -> what to compile, of
    which the first that compiles is used; raises `RowError` `invalid_grammar` or `unsupported_schema_keyword`, with the
    field and the reason."""
    vocabulary: Literal["text", "json", "tag"] = "text"
    """Kind of vocabulary (see `Vocabularies`) that it is compiled for."""
    check: Callable[[str], Check] | None = None
    """Text of the constraint -> check of finished texts; None: the compiled grammar checks them."""


def _choice(text: str, lenient: bool) -> Iterator[Source]:
    """Grammar of exactly the strings of a JSON list."""
    # Grammar strings use JSON's escapes, except for surrogate pairs, so other characters are not escaped.
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in read_json(text))
    yield Source("ebnf", f"root ::= {choices}")


def _schemas(field: str, text: str, lenient: bool) -> Iterator[Source]:
    # Imported here: only rows with a schema need jsonschema.
    from batchgen.text.grammar.schemas.translations import enforceable_schemas

    for backend, schema in enforceable_schemas(text, field, lenient=lenient):
        yield Source("json_schema" if backend == "xgrammar" else "guidance_schema", json.dumps(schema))


def _pattern(text: str, field: str) -> str:
    try:
        return explicit_pattern(text)
    except PatternError as error:
        raise invalid_grammar(field, str(error)) from None


def _structural_tag(text: str, lenient: bool) -> Iterator[Source]:
    try:
        tag = read_json(text)
    except ForeignTextError as error:
        raise invalid_grammar("structural_tag", str(error)) from None
    if type(tag) is not dict:
        raise invalid_grammar("structural_tag", "must be an object")
    is_older = "format" not in tag and "structures" in tag
    _refuse_unknown_keys(tag, {"type", "structures", "triggers"} if is_older else {"type", "format"})
    if is_older:
        tag = _from_triggers(tag)
    written = {**tag, "type": "structural_tag", "format": _format(tag.get("format"), lenient, 0)}
    yield Source("structural_tag", json.dumps(written))


def _required_calls(text: str, lenient: bool) -> Iterator[Source]:
    """Grammar of an answer that calls functions; the text is written by `text/tools/rows.py`."""
    from batchgen.text.grammar.schemas.validation import Schema

    value = read_json(text)
    functions = [
        Function(each["name"], Schema.parse(json.dumps(each["parameters"]), "tools").root)  # formats rely on its form
        for each in value["functions"]
    ]
    try:
        form = FORMATS[value["format"]].grammar(functions, parallel=value["parallel"])
    except RecursionError:
        problem = "`tools` uses `$ref` to a schema that holds itself, which cannot be enforced: the model writes calls "
        remedy = "without JSON; write its values out to the depth that is needed"
        raise RowError(ErrorCode.UNSUPPORTED_SCHEMA_KEYWORD, problem + remedy, "tools") from None
    written = {"type": "structural_tag", "format": _format(form, lenient, 0, "tools")}
    yield Source("structural_tag", json.dumps(written))


def _refuse_unknown_keys(value: dict[str, Any], known: set[str]) -> None:
    """Reject keys that the compiler would ignore; null values are allowed (Parquet gives every object all keys)."""
    unknown = next((key for key, item in value.items() if key not in known and item is not None), None)
    if unknown is not None:
        problem = f"has the unknown key {unknown[:60]!r} (known: {', '.join(sorted(known))}); remove it"
        raise invalid_grammar("structural_tag", problem)


def _from_triggers(tag: dict[str, Any]) -> dict[str, Any]:
    """The older form (`triggers`, and `structures` of begin, schema and end) converted to the newer one."""
    structures = tag["structures"]
    if type(structures) is not list or any(type(item) is not dict for item in structures):
        raise invalid_grammar("structural_tag", "must have a list of objects as `structures`")
    for item in structures:
        _refuse_unknown_keys(item, {"begin", "schema", "end"})
    tags = [
        {
            "type": "tag",
            "begin": item.get("begin"),
            "content": {"type": "json_schema", "json_schema": item.get("schema", True)},
            "end": item.get("end"),
        }
        for item in structures
    ]
    return {"format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}}


def _format(part: Any, lenient: bool, depth: int, field: str = "structural_tag") -> Any:
    """A part of a structural tag with its schemas and patterns rewritten; `field`: where they are given."""
    if depth > _MAX_TAG_DEPTH:
        raise invalid_grammar(field, "is nested too deeply")
    if type(part) is list:
        return [_format(item, lenient, depth + 1, field) for item in part]
    if type(part) is not dict:
        return part
    if part.get("type") == "json_schema" and "json_schema" in part:
        schema = next(_schemas(field, json.dumps(part["json_schema"]), lenient)).text
        blanks = {ONE_LINE: True} if field == "tools" else {"max_whitespace_cnt": _TAG_WHITESPACE}
        return {**blanks, **part, "json_schema": read_json(schema)}
    if part.get("type") == RAW_STRING and field == "tools":
        schema = next(_schemas(field, json.dumps(part["json_schema"]), lenient)).text
        return raw_string_format(read_json(schema), part["excludes"])
    if part.get("type") == "regex" and type(part.get("pattern")) is str:
        return {**part, "pattern": _pattern(part["pattern"], field)}
    return {key: _format(value, lenient, depth + 1, field) for key, value in part.items()}


# Imported in the checks: only finished rows with a schema or pattern need jsonschema.
def _schema_check(text: str) -> Check:
    from batchgen.text.grammar.schemas.validation import Schema

    return Schema(read_json(text)).satisfied_by  # the compiler has checked it


def _pattern_check(text: str) -> Check:
    from batchgen.text.grammar.schemas.validation import matches_whole

    return partial(matches_whole, text)


def _calls_check(text: str) -> Check:
    """Check of the JSON text of an answer's calls."""
    from batchgen.text.grammar.schemas.validation import Schema

    value = read_json(text)
    schemas = {each["name"]: Schema(each["parameters"]) for each in value["functions"]}

    def satisfied(calls: str) -> bool | None:
        functions = [call["function"] for call in read_json(calls or "[]")]
        if (
            not functions
            or (len(functions) > 1 and not value["parallel"])
            or any(each["name"] not in schemas for each in functions)
        ):
            return False
        results = [schemas[each["name"]].satisfied_by(each["arguments"]) for each in functions]
        return False if False in results else None if None in results else True

    return satisfied


def _choice_check(text: str) -> Check:
    return frozenset(read_json(text)).__contains__


KINDS: dict[ConstraintKind, GrammarKind] = {
    "json_schema": GrammarKind(partial(_schemas, "json_schema"), "json", _schema_check),
    "regex": GrammarKind(lambda text, lenient: iter([Source("regex", _pattern(text, "regex"))]), check=_pattern_check),
    "ebnf": GrammarKind(lambda text, lenient: iter([Source("ebnf", text)])),
    "structural_tag": GrammarKind(_structural_tag, "tag"),
    "choice": GrammarKind(_choice, check=_choice_check),
    "tool_choice": GrammarKind(_required_calls, "tag", _calls_check),
}
"""Constraint kind, which is also the name of the row's field -> how it is compiled and checked."""
