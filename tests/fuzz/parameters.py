"""Fuzzer of fields: each field of the one table, in every place that it may have, with JSON values of every type.

An input is `[place, {key: value, ...}]`. A value is accepted, or refused by an error that names a key of the input.
"""

from __future__ import annotations

from collections.abc import Hashable
from random import Random
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.declared import FIELDS, LOOKUP
from batchgen.request.fields.params import SAMPLING_FIELDS, SamplingParams
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.mutations import any_value, dump, load, value_mutator
from tests.fuzz.parsing import check_cached, check_error, check_row, outcome_of, require
from tests.fuzz.rows import check_engine
from tests.request.wrong_values import wrong_values
from tests.rows import CHAT, COMPLETIONS, line, text

_PLACES = ("row", "params", "completions", "chat")
_WORDS = tuple(sorted({spelling for field in FIELDS for spelling in field.spellings}))
_INNER = (
    "type", "function", "name", "parameters", "role", "content", "text", "layers", "tokens", "pool", "schema",
    "json_schema",
    "image_url", "tool_calls", "arguments", "tool_call_id", "properties", "required", "items", "$ref", "enum", "format",
    "user",
    "system", "assistant", "tool", "object", "string", "include_usage", "1", "all", "last", "mean", "json_object",
)  # fmt: skip
_PARAMETERS = tuple(field.name for field in SAMPLING_FIELDS if "params" in field.places)
_SOURCES = frozenset({"text", "prompt", "messages", "input_ids", "input_embeds", "body", "sampling_params"})


def _wrong(name: str) -> list[Any]:
    found = []
    for field in SAMPLING_FIELDS:
        if name in field.spellings:
            found += [value for value in wrong_values(field) if not isinstance(value, int) or abs(value) < 10**4000]
    return found


_WRONG = {name: _wrong(name) for name in _WORDS}
_RIGHT: dict[str, tuple[Any, ...]] = {
    "messages": ([{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}]),
    "tools": ([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],),
    "logit_bias": ({"1": 1}, {"1": -100}),
    "json_schema": ({"type": "object"}, '{"type": "string"}'),
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}),
    "return_hidden_states": (True, {"layers": [0], "tokens": "last"}),
    "stop": ("a", ["a", "b"]),
    "stop_regex": ("a+", ["[0-9]"]),
    "input_ids": ([1, 2], [[1], [2]]),
    "input_embeds": ([[0.5, 1.0]], "a.safetensors:x"),
    "structural_tag": ({"type": "structural_tag", "format": {"type": "any_text"}},),
    "custom_logit_processor": ("calm",),
    "custom_params": ({"a": 1},),
    "lora_path": ("fr",),
    "model": ("llama", "llama:fr", "*"),
    "completions": (["a", [1, 2]],),
    "choice": (["a", "b"],),
    "bad_words": (["a", [1, 2]],),
    "stream_options": ({"include_usage": True},),
    "dtype": ("int", "float"),
}


def _value(name: str, rng: Random) -> Any:
    wrong, right = _WRONG.get(name, ()), _RIGHT.get(name, ())
    if wrong and rng.random() < 0.2:
        return rng.choice(wrong)
    return rng.choice(right) if right and rng.random() < 0.4 else any_value(rng, _INNER)


def _make(rng: Random) -> bytes:
    place = rng.choice(_PLACES)
    names = tuple(LOOKUP[place]) if rng.random() < 0.95 else _WORDS  # type: ignore[index]
    fields = {name: _value(name, rng) for name in (rng.choice(names) for _ in range(rng.choice((1, 1, 1, 2, 3))))}
    return dump([place, fields])


def _row(data: bytes) -> tuple[Any, dict[str, Any]] | None:
    """The row of an input, and its keys; None if it is none."""
    try:
        found = load(data)
    except ValueError:
        return None
    if not (type(found) is list and len(found) == 2 and type(found[1]) is dict):
        return None
    place, fields = found
    if place == "params":
        return text(sampling_params=fields), fields
    if place in ("completions", "chat"):
        return line(CHAT if place == "chat" else COMPLETIONS, **fields), fields
    return text(**fields), fields


def _check(data: bytes) -> Hashable:
    found = _row(data)
    if found is None:
        return None
    row, fields = found
    outcome = check_row(row)
    result = outcome_of(row)
    if isinstance(result, RowError):
        info = result.info
        names = (*fields, *(ascii(key)[1:-1] for key in fields), *_SOURCES, *_WORDS)
        shown = (info.param or "").removesuffix("...")  # what is long of a name is cut
        require(any(name.startswith(shown) for name in names), "an error names a key of the row:", info)
        about_value = info.code in (ErrorCode.INVALID_FIELD, ErrorCode.TOKEN_OUT_OF_RANGE, ErrorCode.UNSUPPORTED_FIELD)
        require(not about_value or info.param, "an error names its field:", info)
    return next(iter(fields), None), outcome


def _check_python(data: bytes) -> Hashable:
    """The same values for `SamplingParams`, and its values for itself."""
    found = _row(data)
    for name, value in (found[1] if found else {}).items():
        if name not in _PARAMETERS:
            continue
        try:
            params = SamplingParams(**{name: value})
        except RowError as error:
            check_error(error.info)
            require(error.info.param in _PARAMETERS, "an error names the parameter:", error.info)
            continue
        hash(params)
        again = SamplingParams(**{key: getattr(params, key) for key in _PARAMETERS})
        require(again == params, "stored values are valid, and stored as they are:", (params, again))
    return None


def _check_cached(data: bytes) -> Hashable:
    found = _row(data)
    return None if found is None else check_cached(found[0])


def _rows(stream: Any, source: str) -> Any:
    from batchgen.request.rows.raw_row import RawRow

    found = _row(stream.read())
    return [] if found is None else [RawRow(0, value=found[0])]


FUZZERS = (
    Fuzzer(
        "parameters",
        _check,
        _make,
        value_mutator((*_WORDS, *_INNER, *_PLACES), _make),
        ((2, _check_python), (4, _check_cached), (200, lambda data: check_engine(_rows, data))),
    ),
)
