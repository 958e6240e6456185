"""From a row's constraint to what xgrammar compiles: read, checked and written so that it means what the row means."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.params import Constraint
from batchgen.text.grammar_patterns import PatternError, explicit_pattern

__all__ = ["grammar_source", "left_recursive_rule"]

_TAG_BLANKS = 16
"""Most blanks in a row between the parts of JSON inside a structural tag that sets no limit."""
_TAG_DEPTH = 100


def grammar_source(constraint: Constraint, *, lenient: bool = False) -> str:
    """The text to compile: a schema, a pattern, a grammar or a structural tag, as the kind says (`choice`: a grammar).

    Raises:
        RowError: `invalid_grammar` or `unsupported_schema_keyword`, naming the field and the reason.
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
    """A grammar of exactly these strings."""
    # JSON's escapes are those of the grammar's strings, but for surrogate pairs: other characters stand as they are.
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _schema(text: str, field: str, lenient: bool) -> str:
    # Imported here: jsonschema is needed for rows with a schema alone.
    from batchgen.text.schemas import enforceable

    return json.dumps(enforceable(text, field, lenient=lenient))


def _pattern(text: str, field: str) -> str:
    try:
        return explicit_pattern(text)
    except PatternError as error:
        raise RowError(ErrorCode.INVALID_GRAMMAR, f"`{field}` {error}", field) from None


def _structural_tag(text: str, lenient: bool) -> str:
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(ErrorCode.INVALID_GRAMMAR, f"`structural_tag` is no JSON: {error}", "structural_tag") from None
    if type(tag) is not dict:
        raise RowError(ErrorCode.INVALID_GRAMMAR, "`structural_tag` must be an object", "structural_tag")
    if "format" not in tag and "structures" in tag:
        tag = _of_triggers(tag)
    return json.dumps({**tag, "type": "structural_tag", "format": _format(tag.get("format"), lenient, 0)})


def _of_triggers(tag: dict[str, Any]) -> dict[str, Any]:
    """The older form, triggers and structures of (begin, schema, end), in the newer one."""
    structures = tag["structures"]
    if type(structures) is not list or any(type(item) is not dict for item in structures):
        problem = "`structural_tag` must have a list of objects as `structures`"
        raise RowError(ErrorCode.INVALID_GRAMMAR, problem, "structural_tag")
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
    """A part of a tag with its schemas and patterns written anew."""
    if depth > _TAG_DEPTH:
        raise RowError(ErrorCode.INVALID_GRAMMAR, "`structural_tag` is nested too deeply", "structural_tag")
    if type(part) is list:
        return [_format(item, lenient, depth + 1) for item in part]
    if type(part) is not dict:
        return part
    if part.get("type") == "json_schema" and "json_schema" in part:
        schema = _schema(json.dumps(part["json_schema"]), "structural_tag", lenient)
        return {"max_whitespace_cnt": _TAG_BLANKS, **part, "json_schema": json.loads(schema)}
    if part.get("type") == "regex" and type(part.get("pattern")) is str:
        return {**part, "pattern": _pattern(part["pattern"], "structural_tag")}
    return {key: _format(value, lenient, depth + 1) for key, value in part.items()}


_TOKEN = re.compile(
    r"""(?P<blank>\s+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\]\*?)|(?P<count>\{[^}]*\})"""
    r"""|(?P<ahead>\(=)|(?P<call>[A-Z][A-Za-z]*\()|(?P<name>[A-Za-z_][\w.-]*)|(?P<sign>.)""",
    re.DOTALL,
)
"""Words of a grammar as xgrammar prints it."""
_RULE = re.compile(r"([A-Za-z_][\w.-]*)\s*::=")


def left_recursive_rule(written: str, grammar: str) -> str | None:
    """The first rule that can come to itself before any character is read; xgrammar then bars tokens that it allows.

    Args:
        written: the grammar as the row gives it: only the rules it names count, not those made of its repeats.
        grammar: the same as xgrammar prints it.
    """
    rules: dict[str, list[list[_Element]]] = {}
    for line in grammar.splitlines():
        name, sign, body = line.partition(" ::= ")
        if sign:
            rules[name] = _Reader(body).choices()
    empty: set[str] = set()
    while grown := {name for name, body in rules.items() if name not in empty and _can_be_empty(body, empty)}:
        empty |= grown
    begins = {name: set(_first_rules(body, empty)) for name, body in rules.items()}
    named = set(_RULE.findall(written))
    return next((name for name in rules if name in named and _reaches(name, begins)), None)


_Element = tuple[str, Any, bool]
"""(`rule`, `group` or `text`; the name or the choices; whether it can be left out)"""


class _Reader:
    """Reads the right side of one rule."""

    def __init__(self, body: str) -> None:
        self._words = [(m.lastgroup or "", m.group()) for m in _TOKEN.finditer(body) if m.lastgroup != "blank"]
        self._at = 0

    def choices(self) -> list[list[_Element]]:
        found: list[list[_Element]] = [[]]
        while self._at < len(self._words):
            kind, word = self._words[self._at]
            self._at += 1
            if word == ")":
                break
            if word == "|":
                found.append([])
            elif kind == "ahead":
                self.choices()
            elif kind == "call":
                self._skip()
                found[-1].append(("text", None, False))
            elif word == "(":
                inner = self.choices()
                found[-1].append(("group", inner, self._optional()))
            elif kind == "name":
                found[-1].append(("rule", word, self._optional()))
            else:
                nothing = word in ('""',) or word.endswith("]*")
                found[-1].append(("text", None, nothing or self._optional()))
        return found

    def _optional(self) -> bool:
        """Whether a count or sign that follows lets the element be left out."""
        if self._at < len(self._words):
            kind, word = self._words[self._at]
            if kind == "count" or word in ("*", "?", "+"):
                self._at += 1
                return word in ("*", "?") or bool(re.match(r"\{\s*0\s*[,}]", word))
        return False

    def _skip(self) -> None:
        """Past the arguments of a macro such as TagDispatch, which always reads text before another rule."""
        depth = 1
        while depth and self._at < len(self._words):
            kind, word = self._words[self._at]
            depth += (word == "(" or kind in ("call", "ahead")) - (word == ")")
            self._at += 1


def _can_be_empty(choices: list[list[_Element]], empty: set[str]) -> bool:
    return any(all(_skippable(element, empty) for element in sequence) for sequence in choices)


def _skippable(element: _Element, empty: set[str]) -> bool:
    kind, value, optional = element
    if optional:
        return True
    return value in empty if kind == "rule" else kind == "group" and _can_be_empty(value, empty)


def _first_rules(choices: list[list[_Element]], empty: set[str]) -> Iterator[str]:
    """Rules that the text may begin with."""
    for sequence in choices:
        for element in sequence:
            kind, value, _ = element
            if kind == "rule":
                yield value
            elif kind == "group":
                yield from _first_rules(value, empty)
            if not _skippable(element, empty):
                break


def _reaches(name: str, begins: dict[str, set[str]]) -> bool:
    seen: set[str] = set()
    waiting = list(begins[name])
    while waiting:
        rule = waiting.pop()
        if rule == name:
            return True
        if rule not in seen:
            seen.add(rule)
            waiting.extend(begins.get(rule, ()))
    return False
