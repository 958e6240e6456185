"""`--carry COL,...`: carried fields as separate columns, whose types are known before a row is read.

A column of Parquet files keeps its type if JSON values can represent it: booleans, numbers, strings, dates, timestamps,
and lists of the first three. Other columns, those of CSV and JSONL files, and folders named `key=value` are strings:
strings unchanged, other values as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.types as pat

from batchgen.data.read.input_files import InputFile
from batchgen.data.read.input_paths import partitions_of
from batchgen.data.read.input_set import SOURCE_COLUMNS
from batchgen.data.schema import ASKED, SCHEMA
from batchgen.errors import UsageError
from batchgen.request.fields.declared import LOOKUP
from batchgen.request.fields.named_columns import PROMPT_FIELDS, UNNAMED, NamedColumns
from batchgen.request.foreign_text import read_json

_SOURCE_TYPES = dict(zip(SOURCE_COLUMNS, (pa.string(), pa.int64()), strict=True))

COLUMNS = frozenset({*SCHEMA.names, *ASKED})
"""Names of the columns of results that are not carried fields."""
Carry = Literal["all", "none"] | tuple[str, ...]
"""Value of `--carry`."""


def effective_carry(carry: Carry, columns: Sequence[str], *, include_source: bool) -> Carry:
    """Fields that are carried: those of `--carry`, of `--columns`, and with `--include-source` the row's source.

    The source is in separate columns unless all carried fields go to `extra`.
    """
    if named := [name for name in columns if name not in COLUMNS and (carry == "all" or name not in carry)]:
        carry = (*(() if isinstance(carry, str) else carry), *named)
    if not include_source or carry == "all":
        return carry
    return (*(name for name in (() if carry == "none" else carry) if name not in SOURCE_COLUMNS), *SOURCE_COLUMNS)


def carried_fields(
    names: Sequence[str], files: Sequence[InputFile], columns: NamedColumns = UNNAMED
) -> tuple[pa.Field, ...]:
    """The output columns of the named fields, in the order given.

    Args:
        names: field names given by `--carry` or `--columns`.
        files: the input files, in any layout.
        columns: the fields that options name, which are not carried, unlike those that they replace.

    Raises:
        UsageError: a name is a column of the output, a field that the row uses, or missing from the input.
    """
    free = set(columns.replaced()).difference(PROMPT_FIELDS)
    for name in names:
        if name in COLUMNS:
            raise UsageError(f"`--carry` {name}: the output has a column of that name; rename the field")
        if name in columns or (name in LOOKUP["row"] and name not in free):
            problem = "the row uses that field, and only unused fields are carried; leave it out"
            raise UsageError(f"`--carry` {name}: {problem}")
    folders = {name for file in files for name, _ in partitions_of(file.path)}
    typed = all(file.format.schema is not None for file in files)
    schemas = [file.schema() for file in files if file.format.schema is not None]
    known = [schema for schema in schemas if schema is not None and schema.names]
    if typed and known and all(schema is not None for schema in schemas):
        for name in names:
            if name not in folders and name not in _SOURCE_TYPES and not any(name in schema.names for schema in known):
                raise UsageError(f"`--carry` {name}: the input has no such column; it has {', '.join(known[0].names)}")
    as_text = folders if typed else set(names)
    return tuple(
        pa.field(name, _SOURCE_TYPES.get(name) or (pa.string() if name in as_text else _common_type(name, known)))
        for name in names
    )


def _common_type(name: str, schemas: Sequence[pa.Schema]) -> pa.DataType:
    """The output type that all files agree on for a column; string if they differ."""
    types = {_output_type(schema.field(name).type) for schema in schemas if name in schema.names}
    return types.pop() if len(types) == 1 else pa.string()


def _output_type(arrow_type: pa.DataType) -> pa.DataType:
    """The type of a carried column, given its type in the input."""
    if pat.is_dictionary(arrow_type):
        return _output_type(arrow_type.value_type)
    if pat.is_float16(arrow_type):
        return pa.float32()
    kept = (pat.is_boolean, pat.is_integer, pat.is_floating, pat.is_date, pat.is_timestamp)
    if any(is_kind(arrow_type) for is_kind in kept):
        return arrow_type
    if pat.is_list(arrow_type) or pat.is_large_list(arrow_type) or pat.is_fixed_size_list(arrow_type):
        inner = arrow_type.value_type
        kept = (pat.is_boolean, pat.is_integer, pat.is_floating, pat.is_string, pat.is_large_string)
        return pa.list_(_output_type(inner)) if any(is_kind(inner) for is_kind in kept) else pa.string()
    return pa.string()


def carried_columns(extras: Sequence[str | None], fields: Sequence[pa.Field]) -> list[pa.Array]:
    """The arrays of `fields`, [len(extras)] each; `extras` are the rows' carried fields as JSON objects, or None."""
    rows: list[dict[str, Any]] = [{} if extra is None else read_json(extra) for extra in extras]
    return [_column([row.get(field.name) for row in rows], field.type) for field in fields]


def _column(values: list[Any], arrow_type: pa.DataType) -> pa.Array:
    if pat.is_string(arrow_type):
        return pa.array([v if v is None or isinstance(v, str) else _to_json(v) for v in values], arrow_type)
    if pat.is_temporal(arrow_type):
        return pa.array(values, pa.string()).cast(arrow_type)
    return pa.array(values, arrow_type)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
