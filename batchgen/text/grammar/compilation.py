"""Compilation of one constraint, inside the compiler process.

Patterns in schemas become rules of the grammar, written as for the field `regex`: the way in which xgrammar itself
compiles a schema's patterns allows texts that they do not match.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from batchgen.errors import ErrorInfo, RowError
from batchgen.request.checks import invalid_grammar
from batchgen.request.fields.constraint import Constraint
from batchgen.request.foreign_text import read_json
from batchgen.text.grammar.guidance import GuidanceMatcher, byte_vocabulary, guidance_matcher
from batchgen.text.grammar.kinds import KINDS, ONE_LINE, Source
from batchgen.text.grammar.schemas.rules import can_end, left_recursive_rule, with_bounded_digits, with_prefix

XGRAMMAR, LLGUIDANCE = b"x", b"l"
"""First byte of a compiled constraint: which compiler it is for."""
_SUBSCHEMAS = ("additionalProperties", "items", "propertyNames")
_SUBSCHEMA_LISTS = ("anyOf", "prefixItems")
_SUBSCHEMA_MAPS = ("$defs", "properties", "patternProperties")
_PLAIN = {"type", "json_schema", "max_whitespace_cnt"}
"""Keys of a schema in a structural tag that leave it JSON."""


def compile_constraint(constraint: Constraint, tokenizer: Any, *, lenient: bool, max_size: int) -> bytes | ErrorInfo:
    """The compiler's first byte and what it needs, compressed; or the constraint's error.

    Args:
        constraint: what to compile.
        tokenizer: `xgrammar.TokenizerInfo` of the vocabulary.
        lenient: accept schemas with keywords that cannot be enforced.
        max_size: most bytes of a compiled grammar.
    """
    try:
        for source in KINDS[constraint.kind].sources(constraint.text, lenient):
            if source.form != "guidance_schema":
                return _compiled(constraint, _compile_xgrammar(source, tokenizer), max_size)
            if _guidance_follows(source.text):
                return LLGUIDANCE + zlib.compress(source.text.encode(), 1)
    except RowError as error:
        return error.info
    except (RuntimeError, ValueError) as error:
        return invalid_grammar(constraint.kind, f"does not compile: {_reason(error)}").info
    except (MemoryError, RecursionError):
        return invalid_grammar(constraint.kind, "is too large to compile; make it smaller").info
    return invalid_grammar(constraint.kind, "does not compile").info


def schema_grammar(schema: Any) -> Any:
    """`xgrammar.Grammar` of JSON in one line, of a schema of `XgrammarWriter`."""
    import xgrammar

    def made(marked: Any) -> Any:
        return xgrammar.Grammar.from_json_schema(json.dumps(marked), any_whitespace=False)

    return _rewritten(schema, made)


def _rewritten(schema: Any, grammar_of: Callable[[Any], Any]) -> Any:
    """`grammar_of(schema)` with its patterns as rules, and with bounded numbers."""
    import xgrammar

    patterns: dict[str, str] = {}
    grammar = grammar_of(_with_marks(schema, patterns))
    printed = str(grammar)
    written = with_bounded_digits(printed)
    for pattern, name in patterns.items():
        written = written.replace(f'Regex("{name}", json_string=true)', f"({name})")
        written += with_prefix(str(xgrammar.Grammar.from_regex(pattern)), name)
    return grammar if written == printed else xgrammar.Grammar.from_ebnf(written)


def _with_marks(schema: Any, patterns: dict[str, str]) -> Any:
    """`schema` with the name of a rule in place of each pattern; new ones are added to `patterns`."""
    if not isinstance(schema, dict):
        return schema

    def name(pattern: str) -> str:
        return patterns.setdefault(pattern, f"pattern_rule_{len(patterns)}_")

    marked = dict(schema)
    if "pattern" in schema:
        marked["pattern"] = name(schema["pattern"])
    for key in _SUBSCHEMAS:
        if key in schema:
            marked[key] = _with_marks(schema[key], patterns)
    for key in _SUBSCHEMA_LISTS:
        if key in schema:
            marked[key] = [_with_marks(part, patterns) for part in schema[key]]
    for key in _SUBSCHEMA_MAPS:
        if key in schema:
            named = {name(n) if key == "patternProperties" else n: part for n, part in schema[key].items()}
            marked[key] = {n: _with_marks(part, patterns) for n, part in named.items()}
    return marked


def _compile_xgrammar(source: Source, tokenizer: Any) -> Any:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    if source.form == "json_schema":
        grammar = schema_grammar(read_json(source.text))
        if "$ref" in source.text and not can_end(str(grammar)):
            raise ValueError("every value that it allows contains another one without end")
        return compiler.compile_grammar(grammar)
    if source.form == "regex":
        return compiler.compile_regex(source.text)
    if source.form == "structural_tag":
        return compiler.compile_structural_tag(json.dumps(_with_schema_grammars(read_json(source.text))))
    grammar = xgrammar.Grammar.from_ebnf(source.text)
    rule = left_recursive_rule(source.text, str(grammar))
    if rule is not None:
        raise ValueError(f"rule {rule[:100]} is left-recursive; rewrite it so that it does not begin with itself")
    if not can_end(str(grammar)):
        raise ValueError("it allows no text that ends")
    return compiler.compile_grammar(grammar)


def _with_schema_grammars(part: Any) -> Any:
    """A part of a structural tag, with schemas as grammars; `ONE_LINE` says which are JSON in one line."""
    import xgrammar

    if isinstance(part, list):
        return [_with_schema_grammars(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") != "json_schema" or "json_schema" not in part:
        return {key: _with_schema_grammars(value) for key, value in part.items()}
    if part.get(ONE_LINE):
        return {"type": "grammar", "grammar": str(schema_grammar(part["json_schema"]))}
    patterns: dict[str, str] = {}
    _with_marks(part["json_schema"], patterns)
    if patterns and not {key for key, value in part.items() if value and (key, value) != ("style", "json")} <= _PLAIN:
        raise ValueError(
            "a schema with patterns or formats allows no other options in a structural tag than its style json"
        )

    def made(marked: Any) -> Any:
        tag = {"type": "structural_tag", "format": {**part, "json_schema": marked}}
        return xgrammar.Grammar.from_structural_tag(json.dumps(tag))

    return {"type": "grammar", "grammar": str(_rewritten(part["json_schema"], made))}


def _compiled(constraint: Constraint, compiled: Any, max_size: int) -> bytes:
    """The compiler's first byte and the compressed grammar, unless it allows no first token, or JSON that is empty."""
    import xgrammar

    if compiled.memory_size_bytes > max_size:
        problem = f"compiles to {compiled.memory_size_bytes:,} bytes, more than {max_size:,}; make it smaller"
        raise invalid_grammar(constraint.kind, problem)
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = np.full(xgrammar.get_bitmask_shape(1, compiled.tokenizer_info.vocab_size), -1, np.int32)
    matcher.fill_next_token_bitmask(mask)
    completed = matcher.is_completed()
    if (completed and KINDS[constraint.kind].vocabulary == "json") or not (completed or mask.any()):
        raise invalid_grammar(constraint.kind, "allows no text at all")
    return XGRAMMAR + zlib.compress(compiled.serialize_json().encode(), 1)


def _guidance_follows(schema: str) -> bool:
    """Whether llguidance compiles a schema, and allows a first character."""
    mask = np.zeros((1, 8), np.int32)
    try:
        vocabulary = byte_vocabulary()
        matcher = GuidanceMatcher(guidance_matcher(schema, vocabulary), vocabulary, ())
        matcher.fill_next_token_bitmask(mask)
    except (RuntimeError, ValueError):
        return False
    return bool(mask.any())


def _reason(error: Exception) -> str:
    """The compiler's message without the position in its source."""
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return re.sub(r"^\[.*?\.cc:\d+: |Check failed: \(.*?\) is false: ", "", line)[:300]
