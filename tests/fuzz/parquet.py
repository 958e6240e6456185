"""Fuzzers of Parquet files: damaged bytes, and tables of every Arrow type under every name.

A damaged file gives an error, or as many rows as its footer says. An intact table gives each row's values.
"""

from __future__ import annotations

import io
import json
from collections.abc import Hashable
from itertools import islice
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.read.parquet import parquet_rows, parquet_schema
from batchgen.errors import ErrorCode, InputError
from batchgen.request.fields.declared import LOOKUP
from batchgen.request.fields.named_columns import UNNAMED, NamedColumns
from batchgen.request.rows.raw_row import RawRow
from tests.fuzz.fuzzer import MAX_BYTES, Fuzzer
from tests.fuzz.mutations import dump, load, mutate_bytes, value_mutator
from tests.fuzz.parsing import check_error, check_row, require
from tests.fuzz.rows import check_engine
from tests.tables.arrow_types import CASES, column

READING = {
    ErrorCode.INVALID_JSON, ErrorCode.INVALID_UNICODE, ErrorCode.TRUNCATED_INPUT, ErrorCode.INVALID_FIELD,
    ErrorCode.UNSUPPORTED_FIELD,
}  # fmt: skip
_MOST_ROWS = 100_000
"""Rows of a damaged file that are looked at."""
_NAMES = ("c0", "c1", "c2", *LOOKUP["row"], "sampling_params", "body", "url", "method", "")
_COMPRESSIONS = ("none", "snappy", "gzip", "zstd", "lz4", "brotli")
_CHANGED = ("[s]", "date64", "duration", "times", "uuid", "zone", "offset")
"""Parts of the names of types that a Parquet file keeps in another form."""
_KINDS = tuple(name for name in CASES if name != "run_end_encoded")
"""Types that pyarrow writes."""


def _rows(data: bytes, columns: NamedColumns = UNNAMED) -> list[RawRow]:
    stream = io.BytesIO(data)
    parquet_schema(stream, "in")
    stream.seek(0)
    found: list[Any] = list(islice(parquet_rows(stream, "in", columns=columns), _MOST_ROWS))
    for index, row in enumerate(found):
        require(row is not None and row.index == index, "rows are counted in order:", row)
        require((row.value is None) != (row.error is None), "a row has a value or an error:", row)
        if row.error is not None:
            check_error(row.error)
            require(row.error.code in READING, "an unreadable row has a reader's error:", row)
            (row.id or "").encode()
    return found


def _check_bytes(data: bytes) -> Hashable:
    """What is intact of a damaged file is read, and the rest is an error row each."""
    try:
        rows = _rows(data)
    except InputError as error:
        return "input error", str(error)[-20:]
    try:
        expected = pq.ParquetFile(io.BytesIO(data)).metadata.num_rows
    except (pa.ArrowException, OSError):
        require(len(rows) == 1 and rows[0].error, "a file without a footer is one error row:", len(rows))
        return "no footer"
    complete = len(rows) == min(expected, _MOST_ROWS)
    damaged = bool(rows) and rows[-1].error is not None and rows[-1].error.code == ErrorCode.TRUNCATED_INPUT
    require(complete or damaged, "a file has the rows that its footer says, or an error:", (len(rows), expected))
    kinds = {row.error.code if row.error else check_row(row.value) for row in rows[:20]}
    return frozenset(kinds), len(rows) > 100


def _write(table: pa.Table, rng: Random) -> bytes | None:
    """A file of the table; None if pyarrow cannot write it in row groups of that size."""
    stream = io.BytesIO()
    try:
        pq.write_table(
            table,
            stream,
            row_group_size=rng.choice((1, 2, 1000)),
            compression=rng.choice(_COMPRESSIONS),
            use_dictionary=rng.random() < 0.5,
            data_page_version=rng.choice(("1.0", "2.0")),
            write_page_checksum=rng.random() < 0.3,
            write_statistics=rng.random() < 0.3,
        )
    except pa.ArrowNotImplementedError:
        return None
    return stream.getvalue()


def _make_bytes(rng: Random) -> bytes:
    rows = rng.choice((1, 2, 5))
    arrays = {}
    for name in rng.sample(("text", "id", "x", "y", "temperature"), rng.choice((1, 1, 2))):
        kind = "string" if name in ("text", "id") else rng.choice(_KINDS)
        arrays[name] = column(kind, rows)[0]
    return _write(pa.table(arrays), rng) or _make_bytes(rng)


def _mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Change bytes anywhere, or, since most bytes there are read, in the footer."""
    size = int.from_bytes(data[-8:-4], "little")
    if rng.random() < 0.5 and 0 < size < len(data) - 8:
        start = len(data) - 8 - size
        footer = mutate_bytes(data[start:-8], rng)
        size = len(footer) if rng.random() < 0.9 else size
        return (data[:start] + footer + size.to_bytes(4, "little") + data[-4:])[:MAX_BYTES]
    return mutate_bytes(data, rng)[:MAX_BYTES]


def _make_table(rng: Random) -> bytes:
    """`[rows, [[name, type], ...], seed of the file's options]`."""
    columns = [[rng.choice(_NAMES), rng.choice(_KINDS)] for _ in range(rng.choice((1, 2, 3)))]
    return dump([rng.choice((0, 1, 3, 7, 1030)), columns, rng.randrange(1000)])


def _table(data: bytes) -> tuple[pa.Table, dict[str, list[Any]], int] | None:
    """The table of an input, the values of its columns, and the seed of its options; None if there is none."""
    try:
        rows, columns, seed = load(data)
        pairs = {str(name): str(kind) for name, kind in columns}
        if type(rows) is not int or not 0 <= rows <= 3000 or type(seed) is not int or set(pairs.values()) - set(_KINDS):
            return None
    except (ValueError, TypeError):
        return None
    made = {name: column(kind, rows) for name, kind in pairs.items()}
    if not made or any("\ud800" <= letter <= "\udfff" for name in made for letter in name):
        return None
    return (
        pa.table({name: array for name, (array, _) in made.items()}),
        {n: values for n, (_, values) in made.items()},
        seed,
    )


def _check_table(data: bytes) -> Hashable:
    found = _table(data)
    if found is None:
        return None
    table, columns, seed = found
    file = _write(table, Random(seed))
    if file is None:
        return "not written"
    try:
        rows = _rows(file)
    except InputError as error:
        return "input error", str(error)[-20:]
    count = len(next(iter(columns.values())))
    require(len(rows) == count, "every row of an intact table is a row:", (len(rows), count))
    kinds = {str(name): str(kind) for name, kind in load(data)[1]}
    free = [
        name for name in columns if name in ("c0", "c1", "c2") and not any(part in kinds[name] for part in _CHANGED)
    ]
    for index, row in enumerate(rows):
        if row.value is None:
            continue
        check_row(row.value)
        for name in free:
            expected = columns[name][index]
            same = json.dumps(row.value.get(name)) == json.dumps(expected)
            require(same, "a column's values are the table's:", (name, row.value.get(name), expected))
    return frozenset(row.error.code if row.error else "ok" for row in rows), tuple(columns)[:1]


def _engine_of_table(data: bytes) -> Hashable:
    found = _table(data)
    file = None if found is None else _write(found[0], Random(found[2]))
    return None if file is None else check_engine(parquet_rows, file)


FUZZERS = (
    Fuzzer(
        "parquet-bytes", _check_bytes, _make_bytes, _mutate_bytes, ((200, lambda d: check_engine(parquet_rows, d)),)
    ),
    Fuzzer(
        "parquet-tables",
        _check_table,
        _make_table,
        value_mutator((*_NAMES, *_KINDS), _make_table),
        ((200, _engine_of_table),),
    ),
)
