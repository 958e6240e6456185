"""Results in Python: rows with arrays, and tables of pandas, polars and pyarrow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from batchgen.config.urls import path_of
from batchgen.data.files import is_file
from batchgen.data.out.view import Results, open_results, read_errors
from batchgen.data.results_file import open_parquet
from batchgen.data.schema import KEY_COLUMNS
from batchgen.data.states_result import records_of_result
from batchgen.data.store.work_folder import output_paths
from batchgen.errors import ErrorInfo, UsageError
from batchgen.request.completion import CachedTokens, Completion, StateBlock
from batchgen.request.foreign_text import read_json
from batchgen.request.html import html_table
from batchgen.tables.temporal import temporal_to_text

_SHOWN: Final = 10
"""Rows that a notebook shows."""
_COLUMNS: Final = ("row_index", "id", "status", "finish_reason", "completion_tokens", "text")


@dataclass(frozen=True, slots=True, repr=False)
class ResultRow(Completion):
    """A row of an output: a `Completion`, with what only an output has.

    Numbers are arrays, null where they are masked. `scores` is an array with the fields `sum`, `mean`, `tokens` and
    `is_greedy`, or `label` and `score`.
    """

    status: str = "ok"
    """`ok` or `error`."""
    prompt: str | None = None
    """The rendered prompt, with `--include-prompt`."""
    extra: Mapping[str, Any] | None = None
    """Carried fields."""
    request_hash: int | None = None
    """Hash of everything that the result depends on."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns of `--carry`, by name."""


_FIELDS: Final = frozenset(each.name for each in fields(ResultRow))


class ResultTable:
    """The results of a job, which are read when they are asked for. Iterate it for its rows.

    `len()` is their number. Rows come in input order, and in order of completion from a job that is not finished.
    """

    def __init__(self, out: Path, results: Results) -> None:
        self._out = out
        self._results = results

    @property
    def footer(self) -> Mapping[str, Any]:
        """How the results were computed, as in the output's footer; empty for a job that is not finished."""
        return self._results.footer or {}

    @property
    def complete(self) -> bool:
        """Whether the job is finished, with all its shards."""
        return self._results.complete

    @cached_property
    def _length(self) -> int:
        return len(self._results)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ResultRow]:
        for file in self._results.files:
            states = self._states(file)
            with read_errors(file), open_parquet(file) as stored:
                head = next(states, None)
                for values in (values for table in stored.groups() for values in _rows(table)):
                    key = tuple(values[name] for name in KEY_COLUMNS)
                    own = None
                    if head is not None and head[0] == key:
                        own, head = head[1], next(states, None)
                    yield ResultRow(**values, states=own)

    def _states(self, file: Path) -> Iterator[tuple[tuple[int, int, int], list[StateBlock]]]:
        """The hidden states of each row of a finished file that has any, by the key of the row."""
        paths = output_paths(self._out)
        path = paths.states if file == paths.result or file == self._out else paths.states / file.name
        if self.complete and is_file(path):
            for key, records in groupby(records_of_result(path), lambda record: record.key):
                yield key, [record.block for record in records]

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows as a table of pyarrow; `columns`: only these.

        Raises:
            UsageError: there is no such column.
            InputError: a file is damaged.
        """
        tables = []
        for file in self._results.files:
            with read_errors(file), open_parquet(file) as stored:
                if missing := [name for name in columns or () if name not in stored.schema.names]:
                    raise UsageError(f"{file} has no column `{missing[0]}`; it has {', '.join(stored.schema.names)}")
                tables.append(stored.read(columns))
        return pa.concat_tables(tables).replace_schema_metadata(None)

    def to_pandas(self, columns: Sequence[str] | None = None) -> Any:
        """All rows as a DataFrame of pandas, with arrays in the cells of lists; otherwise as `to_arrow`."""
        with _needs("pandas"):
            import pandas  # noqa: F401 - pyarrow uses it
        table = self.to_arrow(columns)
        frame = table.to_pandas()
        if "scores" in table.schema.names:
            frame["scores"] = _cells(table["scores"])
        return frame

    def to_polars(self, columns: Sequence[str] | None = None) -> Any:
        """All rows as a DataFrame of polars; otherwise as `to_arrow`."""
        with _needs("polars"):
            import polars
        return polars.from_arrow(self.to_arrow(columns))

    def __repr__(self) -> str:
        return f"ResultTable({str(self._out)!r}, {len(self):,} rows{'' if self.complete else ', not finished'})"

    def _repr_html_(self) -> str:
        rows = ([getattr(row, name) for name in _COLUMNS] for row in islice(self, _SHOWN))
        return html_table(_COLUMNS, rows, f"{min(_SHOWN, len(self))} of {len(self):,} rows")


def read(out: str | os.PathLike[str], *, finished: bool = False) -> ResultTable:
    """The results of a job: of its output, of a folder of shards, or so far, if it is not finished.

    Args:
        out: the output, as given to `batchgen run -o`.
        finished: read finished output only, even if newer, unfinished work exists.

    Raises:
        InputError: there are no results, or the file is not batchgen's.
        UsageError: the folder contains no results.
    """
    path = path_of(os.fspath(out))
    return ResultTable(path, open_results(path, finished=finished))


@contextmanager
def _needs(library: str) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise UsageError(f"{library} is not installed: `pip install {library}`, or use `to_arrow`.") from None


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The fields of each row, but for its states."""
    columns = {name: _cells(table[name]) for name in table.schema.names}
    own, carried = columns.keys() & _FIELDS, columns.keys() - _FIELDS
    for index in range(len(table)):
        values = {name: columns[name][index] for name in own}
        values["columns"] = {name: columns[name][index] for name in carried}
        if values["error"] is not None:
            values["error"] = ErrorInfo(**values["error"])
        if (details := values.get("cached_tokens_details")) is not None:
            values["cached_tokens_details"] = CachedTokens(**details)
        if values["extra"] is not None:
            values["extra"] = read_json(values["extra"], unwritable=True)
        yield values


def _cells(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column: arrays for its lists of numbers and of scores."""
    column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if not pat.is_list(column.type) or not (pat.is_primitive(inner := column.type.value_type) or pat.is_struct(inner)):
        return cast("list[Any]", temporal_to_text(column).to_pylist())
    flat = _structs(column.values) if pat.is_struct(inner) else _numbers(column.values)
    offsets, valid = column.offsets.to_numpy(), column.is_valid().to_numpy(zero_copy_only=False)
    return [flat[a:b] if ok else None for a, b, ok in zip(offsets[:-1], offsets[1:], valid, strict=True)]


def _numbers(values: pa.Array) -> npt.NDArray[Any]:
    if not values.null_count:
        return cast("npt.NDArray[Any]", values.to_numpy(zero_copy_only=False))
    filled = values.fill_null(0).to_numpy(zero_copy_only=False)
    return np.ma.MaskedArray(filled, ~values.is_valid().to_numpy(zero_copy_only=False))  # type: ignore[no-untyped-call]


def _structs(values: pa.StructArray) -> npt.NDArray[Any]:
    columns = {each.name: values.field(each.name).to_numpy(zero_copy_only=False) for each in values.type}
    out = np.empty(len(values), [(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        out[name] = column
    return out
