"""What must hold of every value that is parsed as a row, valid or not."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from typing import Any

from batchgen.data.schema import extra_json
from batchgen.errors import ErrorInfo, RowError
from batchgen.request.fields.declared import LOOKUP
from batchgen.request.rows.model_names import ModelNames
from batchgen.request.rows.parser import is_openai_line, parse_row, row_extra
from batchgen.request.rows.row_ids import row_id
from batchgen.request.rows.values import RowDefaults
from batchgen.request.table.request_table import ParsedRow
from tests.fuzz.fuzzer import BrokenPromise

INDEX = 7
_LONGEST_MESSAGE = 2000
_ENVELOPE = frozenset({"method", "url", "body"})
_NAMES = ModelNames(frozenset({"llama", "models/llama"}))


def new_defaults() -> RowDefaults:
    """The defaults of a run with a model, an adapter, a processor and events."""
    return RowDefaults(names=_NAMES, adapters=frozenset({"fr"}), processors=frozenset({"calm"}), events=True)


_DEFAULTS = new_defaults()


def require(condition: object, promise: str, value: object = "") -> None:
    """Raise `BrokenPromise` unless the condition holds."""
    if not condition:
        raise BrokenPromise(f"{promise} {value!r:.500}")


def check_error(error: ErrorInfo) -> None:
    """An error can be written, and says something short."""
    error.message.encode()
    (error.param or "").encode()
    require(error.message and len(error.message) <= _LONGEST_MESSAGE, "an error has a short message:", error.message)
    require(error.code != "internal", "no row is an internal error:", error.message)


def outcome_of(value: Any, defaults: RowDefaults = _DEFAULTS) -> ParsedRow | RowError:
    """The parsed row, or its error."""
    try:
        return parse_row(value, INDEX, defaults)
    except RowError as error:
        return error


def check_row(value: Any) -> Hashable:
    """Parse a value as a row, check what must hold, and return what became of it."""
    found = outcome_of(value)
    row_id(value, INDEX).encode()
    if isinstance(found, RowError):
        check_error(found.info)
        _check_carried(row_extra(value))
        return found.info.code, found.info.param if found.info.param in LOOKUP["row"] else None
    require(found.prompts, "a row has a prompt:", value)
    require(type(found.id) is str and found.id.encode() is not None, "a row has an id:", value)
    hash(found.params)
    require(found.params.constraint is None or found.params.constraint.text, "a constraint has a text:", value)
    _check_carried(found.extra)
    _check_nothing_ignored(value, found)
    return found.dialect, type(found.prompts[0]).__name__, bool(found.completions), bool(found.extra)


def check_cached(value: Any) -> Hashable:
    """A row means the same whatever rows were parsed before it."""
    found, alone = outcome_of(value), outcome_of(value, new_defaults())
    require(type(found) is type(alone), "a row means the same after other rows:", value)
    if isinstance(found, RowError):
        require(isinstance(alone, RowError) and found.info == alone.info, "an error is the same after others:", value)
    else:
        assert isinstance(alone, ParsedRow)
        # Zero is zero, whatever its sign.
        texts = [repr(one.params).replace("-0.0", "0.0") for one in (found, alone)]
        same = texts[0] == texts[1] and found.seed == alone.seed and found.id == alone.id
        require(same, "parameters are the same after other rows:", value)
    return None


def _check_carried(extra: Mapping[str, Any]) -> None:
    text = extra_json(extra)
    if text is not None:
        text.encode()
        require(type(json.loads(text)) is dict, "carried fields are an object:", text)


def _check_nothing_ignored(value: Mapping[str, Any], row: ParsedRow) -> None:
    """Every key of a valid row is a field of its place, or carried."""
    if is_openai_line(value):
        place = "chat" if row.dialect == "openai-chat" else "completions"
        odd = [key for key, item in value["body"].items() if item is not None and key not in LOOKUP[place]]
        lost = [key for key in value if key not in LOOKUP["row"] and key not in _ENVELOPE and key not in row.extra]
        lost.remove("sampling_params") if "sampling_params" in lost else None
    else:
        odd = []
        known = LOOKUP["row"].keys() | {"sampling_params"}
        lost = [key for key in value if key not in known and key not in row.extra]
    require(not odd and not lost, "no key is ignored:", (odd, lost, value))
