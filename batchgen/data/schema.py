"""The output's Arrow schema, fixed by version, and the way from completions to a table in it.

Columns are never inferred from data: every column of the contract is always there, null where it was not asked for.
Carried fields all stand in `extra`, one JSON object per row, unless `--carry COL,...` gives them columns of their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.types as pat

from batchgen.printable import encodable
from batchgen.request import Completion

__all__ = [
    "KEY_COLUMNS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "STATES_CONTENTS",
    "OutputRow",
    "completions_to_table",
    "extra_json",
    "finite",
    "results_schema",
    "with_footer",
]

SCHEMA_VERSION = "1"
VERSION_KEY = b"batchgen.schema_version"
RUN_KEY = b"batchgen.run"
FINGERPRINT_KEY = b"batchgen.fingerprint"
"""In a committed part: the key of the job that it belongs to."""
STATES_CONTENTS = "hidden states"
"""`contents` in the run record of a file of states; that of results has none."""

KEY_COLUMNS = ("row_index", "prompt_index", "sample_index")
"""Together they name an output row; a file is sorted by them."""

_IDS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("row_index", pa.int64()),
        ("prompt_index", pa.int32()),
        ("sample_index", pa.int32()),
        ("status", pa.string()),
        ("finish_reason", pa.string()),
        ("stop_kind", pa.string()),
        ("matched_stop", pa.string()),
        ("matched_text", pa.string()),
        ("error", pa.struct([("code", pa.string()), ("message", pa.string()), ("param", pa.string())])),
        ("text", pa.string()),
        ("output_ids", _IDS),
        ("prompt_ids", _IDS),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("output_logprobs", _LOGPROBS),
        ("input_logprobs", _LOGPROBS),
        ("cumulative_logprob", pa.float64()),
        ("mean_logprob", pa.float64()),
        ("output_top_ids", _IDS),
        ("output_top_logprobs", _LOGPROBS),
        ("input_top_ids", _IDS),
        ("input_top_logprobs", _LOGPROBS),
        ("output_ids_logprobs", _LOGPROBS),
        ("input_ids_logprobs", _LOGPROBS),
        ("output_tokens_text", pa.list_(pa.string())),
        ("input_tokens_text", pa.list_(pa.string())),
        ("routed_experts", _IDS),
        (
            "scores",
            pa.list_(
                pa.struct(
                    [("sum", pa.float64()), ("mean", pa.float64()), ("tokens", pa.int32()), ("is_greedy", pa.bool_())]
                )
            ),
        ),
        ("score_logprobs", _LOGPROBS),
        ("constraint_ok", pa.bool_()),
        ("min_new_tokens_unmet", pa.bool_()),
        ("seed", pa.int64()),
        ("effective_max_new_tokens", pa.int32()),
        ("dropped_tokens", pa.int32()),
        ("dedup_of", pa.int64()),
        ("prompt", pa.string()),
        ("extra", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class OutputRow:
    """A completion with what only the job knows of its row."""

    completion: Completion
    id: str
    extra: str | None = None
    """Carried fields as one JSON object."""
    prompt: str | None = None
    """The rendered prompt, where asked for."""


def _status(row: OutputRow) -> str:
    return "ok" if row.completion.error is None else "error"


def _error(row: OutputRow) -> dict[str, str | None] | None:
    error = row.completion.error
    return None if error is None else {"code": str(error.code), "message": error.message, "param": error.param}


def _scores(row: OutputRow) -> list[dict[str, Any]] | None:
    scores = row.completion.scores
    return None if scores is None else [asdict(score) for score in scores]


_DERIVED: dict[str, Callable[[OutputRow], Any]] = {
    "id": attrgetter("id"),
    "status": _status,
    "error": _error,
    "scores": _scores,
    "prompt": attrgetter("prompt"),
    "extra": attrgetter("extra"),
}
_COMPLETION_FIELDS = frozenset(field.name for field in dataclass_fields(Completion))


def results_schema(carried: Sequence[pa.Field]) -> pa.Schema:
    """`SCHEMA`, and behind it the columns of carried fields that have their own."""
    return pa.schema([*SCHEMA, *carried])


def completions_to_table(rows: Sequence[OutputRow]) -> pa.Table:
    """A table [len(rows)] in `SCHEMA`. Columns that `Completion` has no field for are null."""
    completions = [row.completion for row in rows]
    columns = []
    for field in SCHEMA:
        if field.name in _DERIVED:
            values = list(map(_DERIVED[field.name], rows))
        elif field.name in _COMPLETION_FIELDS:
            values = list(map(attrgetter(field.name), completions))
        else:
            values = [None] * len(rows)
        columns.append(_column(values, field.type))
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if all(value is None for value in values):
        return pa.nulls(len(values), kind)
    if pat.is_list(kind) and pat.is_primitive(kind.value_type):
        return _number_lists(values, kind)
    return pa.array(values, kind)


def _number_lists(values: list[Sequence[float] | None], kind: pa.DataType) -> pa.Array:
    """Lists of numbers by way of one flat array; lists that hold nulls go the slow way."""
    present = [value for value in values if value is not None]
    flat = _flat(present, kind.value_type)
    if flat is None:
        return pa.array(values, kind)
    lengths = np.fromiter((0 if value is None else len(value) for value in values), np.int32, len(values))
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    missing = None if len(present) == len(values) else pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=missing)


def _flat(lists: list[Sequence[float]], kind: pa.DataType) -> pa.Array | None:
    """All numbers of the lists, masked ones as nulls; None where they hold a None, or need a conversion's checks."""
    dtype = kind.to_pandas_dtype()
    if all(isinstance(value, np.ndarray) for value in lists):
        return _flat_arrays(lists, kind)  # type: ignore[arg-type]
    try:
        flat = np.fromiter(chain.from_iterable(lists), dtype)
    except TypeError:
        return None
    # numpy reads None as not-a-number.
    suspect = flat.dtype.kind == "f" and np.isnan(flat).any() and any(None in value for value in lists)
    return None if suspect else pa.array(flat)


def _flat_arrays(arrays: list[npt.NDArray[Any]], kind: pa.DataType) -> pa.Array | None:
    flat = np.concatenate([np.asarray(array) for array in arrays])  # a masked array's data
    if flat.dtype != kind.to_pandas_dtype():
        return None
    if not any(isinstance(array, np.ma.MaskedArray) for array in arrays):
        return pa.array(flat)
    masks = [np.ma.getmaskarray(array) for array in arrays]  # type: ignore[no-untyped-call]
    return pa.array(flat, mask=np.concatenate(masks))


_ALIKE = frozenset({str, bool, type(None)})
"""Types whose values both libraries write alike; of numbers they differ in exponents, and in how large they may be."""
_EXTRA = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def extra_json(fields: Mapping[str, Any]) -> str | None:
    """Carried fields as a JSON object for the `extra` column, numbers that JSON lacks as null; None when empty."""
    if not fields:
        return None
    if _ALIKE.issuperset(map(type, fields.values())):
        return orjson.dumps(fields).decode()
    try:
        return _EXTRA.encode(fields)
    except ValueError:
        return json.dumps(finite(fields), ensure_ascii=False, separators=(",", ":"))


def finite(value: Any) -> Any:
    """A JSON value, or one within, with None for numbers that JSON lacks: infinities and not a number."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_footer(run: Mapping[str, Any], schema: pa.Schema = SCHEMA) -> pa.Schema:
    """`schema` with the footer keys `batchgen.schema_version` and `batchgen.run` (JSON)."""
    text = json.dumps(run, ensure_ascii=False, sort_keys=True)
    return schema.with_metadata({VERSION_KEY: SCHEMA_VERSION.encode(), RUN_KEY: encodable(text).encode()})
