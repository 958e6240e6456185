"""The output's Arrow schema, fixed per version, and the conversion of completions to a table.

Columns are never inferred from data: every column exists in every output, null if it was not requested, but for those
of `ASKED`, which follow from what the rows of a job ask for. Carried fields
are in `extra`, one JSON object per row, unless `--carry COL,...` gives them separate columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from batchgen.request.completion import Completion
from batchgen.request.printable import encodable

SCHEMA_VERSION = "2"
READABLE_VERSIONS = frozenset({b"1", b"2"})
"""Schema versions of finished outputs that can be read. Version 1 lacks some columns, such as `reasoning`."""
VERSION_KEY = b"batchgen.schema_version"
RUN_KEY = b"batchgen.run"
FINGERPRINT_KEY = b"batchgen.fingerprint"
"""Footer key of a committed part: the key of its job (`RunIdentity.key`)."""
STATES_CONTENTS = "hidden states"
"""Value of `contents` in the run record of a hidden-states file; results have no `contents`."""

KEY_COLUMNS = ("row_index", "prompt_index", "sample_index")
"""Columns that identify an output row; outputs are sorted by them."""

_IDS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())
_SCORE = pa.struct([("sum", pa.float64()), ("mean", pa.float64()), ("tokens", pa.int32()), ("is_greedy", pa.bool_())])

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
        ("reasoning", pa.string()),
        ("reasoning_tokens", pa.int32()),
        ("reasoning_cut", pa.bool_()),
        ("tool_calls", pa.string()),
        ("tool_calls_error", pa.string()),
        ("output_ids", _IDS),
        ("prompt_ids", _IDS),
        ("prompt_tokens", pa.int32()),
        ("media_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("cached_tokens_details", pa.struct([("prefix", pa.int32()), ("duplicate", pa.int32())])),
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
        ("scores", pa.list_(_SCORE)),
        ("score_logprobs", _LOGPROBS),
        ("constraint_ok", pa.bool_()),
        ("min_new_tokens_unmet", pa.bool_()),
        ("seed", pa.int64()),
        ("effective_max_new_tokens", pa.int32()),
        ("dropped_tokens", pa.int32()),
        ("dedup_of", pa.int64()),
        ("request_hash", pa.int64()),
        ("prompt", pa.string()),
        ("extra", pa.string()),
    ]
)


_SCORES = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float64())]))
ASKED = {"embedding": pa.field("embedding", _LOGPROBS), "scores": pa.field("scores", _SCORES)}
"""Columns of jobs with rows that return embeddings, or scores of labels: one more, and one of another type."""
Asked = tuple[pa.Field, ...]
"""Those of `ASKED` that a job has, in order."""


def asked_columns(tasks: Iterable[str | None]) -> Asked:
    """The columns of a job whose rows have these tasks."""
    names = {"embedding" if task == "embed" else "scores" for task in tasks if task is not None}
    return tuple(field for name, field in ASKED.items() if name in names)


@dataclass(frozen=True, slots=True)
class OutputRow:
    """A completion with the id, carried fields and prompt text of its row."""

    completion: Completion
    id: str
    extra: str | None = None
    """Carried fields as a JSON object."""
    prompt: str | None = None
    """The rendered prompt, with `--include-prompt`."""
    request_hash: int | None = None
    """Hash of everything that the result depends on; None for failed rows, which are never reused."""


def _error(row: OutputRow) -> dict[str, str | None] | None:
    error = row.completion.error
    return None if error is None else {"code": str(error.code), "message": error.message, "param": error.param}


def _scores(row: OutputRow) -> list[dict[str, Any]] | None:
    scores = row.completion.scores
    return None if scores is None else [asdict(score) for score in scores]


def _cached_details(row: OutputRow) -> dict[str, int] | None:
    details = row.completion.cached_tokens_details
    return None if details is None else asdict(details)


_DERIVED: dict[str, Callable[[OutputRow], Any]] = {
    "id": attrgetter("id"),
    "status": lambda row: "ok" if row.completion.error is None else "error",
    "error": _error,
    "cached_tokens_details": _cached_details,
    "scores": _scores,
    "request_hash": attrgetter("request_hash"),
    "prompt": attrgetter("prompt"),
    "extra": attrgetter("extra"),
}
_COMPLETION_FIELDS = frozenset(field.name for field in dataclass_fields(Completion))


def results_schema(carried: Sequence[pa.Field], asked: Asked = ()) -> pa.Schema:
    """`SCHEMA` with what the job's rows ask for, followed by the separate columns of carried fields."""
    if not asked:
        return pa.schema([*SCHEMA, *carried])
    changed = {field.name: field for field in asked}
    columns = {field.name: changed.get(field.name, field) for field in SCHEMA}
    return pa.schema([*(columns | changed).values(), *carried])


def completions_to_table(rows: Sequence[OutputRow], asked: Asked = ()) -> pa.Table:
    """Convert completions to a table of `results_schema`, one row each, without carried columns.

    Columns without a field in `Completion` are null.
    """
    completions, schema = [row.completion for row in rows], results_schema((), asked)
    columns = []
    for field in schema:
        if field.name in _DERIVED:
            values = list(map(_DERIVED[field.name], rows))
        elif field.name in _COMPLETION_FIELDS:
            values = list(map(attrgetter(field.name), completions))
        else:
            values = [None] * len(rows)
        columns.append(_column(values, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if all(value is None for value in values):
        return pa.nulls(len(values), kind)
    if pat.is_list(kind) and pat.is_primitive(kind.value_type):
        return _number_lists(values, kind)
    return pa.array(values, kind)


_NUMPY = {pa.int32(): np.dtype(np.int32), pa.float32(): np.dtype(np.float32)}
"""numpy's type of the numbers in lists. Arrow's own conversion imports pandas."""


def _number_lists(values: list[Sequence[float] | None], kind: pa.DataType) -> pa.Array:
    """A list column built from one flat array, or element by element if lists contain nulls."""
    present = [value for value in values if value is not None]
    flat = _flat_values(present, kind.value_type)
    if flat is None:
        return pa.array(values, kind)
    lengths = np.fromiter((0 if value is None else len(value) for value in values), np.int32, len(values))
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    missing = None if len(present) == len(values) else pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=missing)


def _flat_values(lists: list[Sequence[float]], kind: pa.DataType) -> pa.Array | None:
    """All numbers of the lists, masked ones as null; None if a list contains None or needs a checked conversion."""
    dtype = _NUMPY[kind]
    if all(isinstance(value, np.ndarray) for value in lists):
        return _flat_arrays(lists, kind)  # type: ignore[arg-type]
    try:
        flat = np.fromiter(chain.from_iterable(lists), dtype)
    except TypeError:
        return None
    # numpy converts None to NaN.
    has_none = flat.dtype.kind == "f" and np.isnan(flat).any() and any(None in value for value in lists)
    return None if has_none else pa.array(flat)


def _flat_arrays(arrays: list[npt.NDArray[Any]], kind: pa.DataType) -> pa.Array | None:
    flat = np.concatenate([np.asarray(array) for array in arrays])  # a masked array's data
    if flat.dtype != _NUMPY[kind]:
        return None
    if not any(isinstance(array, np.ma.MaskedArray) for array in arrays):
        return pa.array(flat)
    masks = [np.ma.getmaskarray(array) for array in arrays]  # type: ignore[no-untyped-call]
    return pa.array(flat, mask=np.concatenate(masks))


_SIMPLE_TYPES = frozenset({str, bool, type(None)})
"""Types that json and orjson write equally; numbers differ in their exponents and their range."""
_EXTRA = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def extra_json(fields: Mapping[str, Any]) -> str | None:
    """Carried fields as a JSON object for the `extra` column, NaN and infinity as null; None if there are no fields."""
    if not fields:
        return None
    if _SIMPLE_TYPES.issuperset(map(type, fields.values())):
        return orjson.dumps(fields).decode()
    try:
        return _EXTRA.encode(fields)
    except ValueError:
        return json.dumps(non_finite_to_none(fields), ensure_ascii=False, separators=(",", ":"))


def non_finite_to_none(value: Any) -> Any:
    """A JSON value with NaN and infinity replaced by None, at any depth."""
    if isinstance(value, Mapping):
        return {key: non_finite_to_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [non_finite_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_footer(run: Mapping[str, Any], schema: pa.Schema = SCHEMA) -> pa.Schema:
    """`schema` with the footer keys `batchgen.schema_version` and `batchgen.run` (JSON of `run`)."""
    text = json.dumps(run, ensure_ascii=False, sort_keys=True)
    return schema.with_metadata({VERSION_KEY: SCHEMA_VERSION.encode(), RUN_KEY: encodable(text).encode()})
