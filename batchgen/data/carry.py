"""`--carry COL,...`: carried fields as columns of their own, typed before a row is read.

A column that comes from Parquet files keeps its type where JSON values can say it: booleans, numbers, strings, dates,
timestamps, and lists of the first three. Any other, and every column of a JSONL file, is string: a string as it stands,
other values as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pat

from batchgen.data.inputs import InputFile
from batchgen.data.schema import SCHEMA
from batchgen.errors import UsageError
from batchgen.fields import LOOKUP

__all__ = ["carried_columns", "carried_fields"]

_ID_NAMES = frozenset({"id", "rid", "custom_id"})
"""Fields that are carried where another column is the row's id."""


def carried_fields(
    names: Sequence[str], files: Sequence[InputFile], prompt_column: str | None, id_column: str | None
) -> tuple[pa.Field, ...]:
    """The columns that the named fields become, in the order given.

    Args:
        names: as `--carry` has them.
        files: the inputs, in any layout.
        prompt_column: the field that is the prompt, and so is not carried.
        id_column: likewise the id.

    Raises:
        UsageError: a name is a column of the output, or of no carried field.
    """
    free = _ID_NAMES if id_column is not None else frozenset()
    for name in names:
        if name in SCHEMA.names:
            raise UsageError(f"`--carry` {name}: the output has a column of that name; rename the field")
        if name in (prompt_column, id_column) or (name in LOOKUP["row"] and name not in free):
            raise UsageError(f"`--carry` {name}: that field is used, and only others are carried; leave it out")
    schemas = [_schema(file) for file in files if file.layout == "parquet"]
    known = [schema for schema in schemas if schema is not None]
    typed = all(file.layout != "jsonl" for file in files)
    if typed and known and len(known) == len(schemas):
        for name in names:
            if not any(name in schema.names for schema in known):
                raise UsageError(f"`--carry` {name}: the input has no such column; it has {', '.join(known[0].names)}")
    return tuple(pa.field(name, _agreed(name, known) if typed else pa.string()) for name in names)


def _schema(file: InputFile) -> pa.Schema | None:
    """The columns of a Parquet file; None where it has no readable footer."""
    with file.open_raw() as stream:
        try:
            return pq.ParquetFile(stream).schema_arrow
        except (pa.ArrowException, OSError):
            return None


def _agreed(name: str, schemas: Sequence[pa.Schema]) -> pa.DataType:
    """The type that all files have for a column; string where they differ."""
    kinds = {_kept(schema.field(name).type) for schema in schemas if name in schema.names}
    return kinds.pop() if len(kinds) == 1 else pa.string()


def _kept(kind: pa.DataType) -> pa.DataType:
    if pat.is_dictionary(kind):
        return _kept(kind.value_type)
    if pat.is_float16(kind):
        return pa.float32()
    if pat.is_boolean(kind) or pat.is_integer(kind) or pat.is_floating(kind) or pat.is_date(kind):
        return kind
    if pat.is_timestamp(kind):
        return kind
    if pat.is_list(kind) or pat.is_large_list(kind) or pat.is_fixed_size_list(kind):
        inner = kind.value_type
        plain = pat.is_boolean(inner) or pat.is_integer(inner) or pat.is_floating(inner) or _is_text(inner)
        return pa.list_(_kept(inner)) if plain else pa.string()
    return pa.string()


def _is_text(kind: pa.DataType) -> bool:
    return bool(pat.is_string(kind) or pat.is_large_string(kind))


def carried_columns(extras: Sequence[str | None], fields: Sequence[pa.Field]) -> list[pa.Array]:
    """The columns of `fields`, [len(extras)] each.

    `extras` holds each row's carried fields as a JSON object, or None.
    """
    rows: list[dict[str, Any]] = [{} if extra is None else json.loads(extra) for extra in extras]
    return [_column([row.get(field.name) for row in rows], field.type) for field in fields]


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pat.is_string(kind):
        return pa.array([v if v is None or isinstance(v, str) else _json(v) for v in values], kind)
    if pat.is_temporal(kind):
        return pa.array(values, pa.string()).cast(kind)
    return pa.array(values, kind)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
