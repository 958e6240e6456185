"""Source text for xgrammar from a row's constraint, checked and rewritten so that it keeps its meaning."""

from __future__ import annotations

import json
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.params import Constraint
from batchgen.text.grammar.patterns import PatternError, explicit_pattern

__all__ = ["grammar_source"]

_TAG_WHITESPACE = 16
"""Most consecutive whitespace characters between JSON tokens inside a structural tag that sets no limit."""
_MAX_TAG_DEPTH = 100


def grammar_source(constraint: Constraint, *, lenient: bool = False) -> str:
    """Text to compile: a schema, pattern, grammar or structural tag according to the kind (`choice`: a grammar).

    Raises:
        RowError: `invalid_grammar` or `unsupported_schema_keyword`, with the field and the reason.
    """
    if constraint.kind == "json_schema":
        return _schema(constraint.text, "json_schema", lenient)
    if constraint.kind == "regex":
        return _pattern(constraint.text, "regex")
    if constraint.kind == "choice":
        return choice_grammar(json.loads(constraint.text))
    if constraint.kind == "structural_tag":
        return _structural_tag(constraint.text, lenient)
    return constraint.text


def choice_grammar(choices: list[str]) -> str:
    """Grammar of exactly these strings."""
    # Grammar strings use JSON's escapes, except for surrogate pairs, so other characters are not escaped.
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _schema(text: str, field: str, lenient: bool) -> str:
    # Imported here: only rows with a schema need jsonschema.
    from batchgen.text.grammar.schemas import enforceable_schema

    return json.dumps(enforceable_schema(text, field, lenient=lenient))


def _pattern(text: str, field: str) -> str:
    try:
        return explicit_pattern(text)
    except PatternError as error:
        raise RowError(ErrorCode.INVALID_GRAMMAR, f"`{field}` {error}", field) from None


def _structural_tag(text: str, lenient: bool) -> str:
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(
            ErrorCode.INVALID_GRAMMAR, f"`structural_tag` is not valid JSON: {error}", "structural_tag"
        ) from None
    if type(tag) is not dict:
        raise RowError(ErrorCode.INVALID_GRAMMAR, "`structural_tag` must be an object", "structural_tag")
    is_older = "format" not in tag and "structures" in tag
    _refuse_unknown_keys(tag, {"type", "structures", "triggers"} if is_older else {"type", "format"})
    if is_older:
        tag = _from_triggers(tag)
    return json.dumps({**tag, "type": "structural_tag", "format": _format(tag.get("format"), lenient, 0)})


def _refuse_unknown_keys(value: dict[str, Any], known: set[str]) -> None:
    """Reject keys that the compiler would ignore; null values are allowed (Parquet gives every object all keys)."""
    unknown = next((key for key, item in value.items() if key not in known and item is not None), None)
    if unknown is not None:
        problem = (
            f"`structural_tag` has the unknown key {unknown[:60]!r} (known: {', '.join(sorted(known))}); remove it"
        )
        raise RowError(ErrorCode.INVALID_GRAMMAR, problem, "structural_tag")


def _from_triggers(tag: dict[str, Any]) -> dict[str, Any]:
    """The older form (`triggers`, and `structures` of begin, schema and end) converted to the newer one."""
    structures = tag["structures"]
    if type(structures) is not list or any(type(item) is not dict for item in structures):
        problem = "`structural_tag` must have a list of objects as `structures`"
        raise RowError(ErrorCode.INVALID_GRAMMAR, problem, "structural_tag")
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


def _format(part: Any, lenient: bool, depth: int) -> Any:
    """A part of a structural tag with its schemas and patterns rewritten."""
    if depth > _MAX_TAG_DEPTH:
        raise RowError(ErrorCode.INVALID_GRAMMAR, "`structural_tag` is nested too deeply", "structural_tag")
    if type(part) is list:
        return [_format(item, lenient, depth + 1) for item in part]
    if type(part) is not dict:
        return part
    if part.get("type") == "json_schema" and "json_schema" in part:
        schema = _schema(json.dumps(part["json_schema"]), "structural_tag", lenient)
        return {"max_whitespace_cnt": _TAG_WHITESPACE, **part, "json_schema": json.loads(schema)}
    if part.get("type") == "regex" and type(part.get("pattern")) is str:
        return {**part, "pattern": _pattern(part["pattern"], "structural_tag")}
    return {key: _format(value, lenient, depth + 1) for key, value in part.items()}
