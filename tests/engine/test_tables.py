"""`Engine.generate` with tables of Python libraries: the rows of the table, never its column names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from batchgen.engine.row_reader import python_rows
from batchgen.errors import ErrorCode, UsageError

ROWS: list[dict[str, Any]] = [
    {"id": "a", "text": "Hi", "max_new_tokens": 3, "messages": None, "stop": ["x"]},
    {"id": "b", "text": None, "max_new_tokens": None, "messages": [{"role": "user", "content": "Yo"}], "stop": None},
]
EXPECTED = [{name: value for name, value in row.items() if value is not None} for row in ROWS]

TABLES: dict[str, Callable[[], Any]] = {
    "list": lambda: EXPECTED,
    "generator": lambda: iter(EXPECTED),
    "pandas": lambda: pd.DataFrame(ROWS),
    "pandas with an index": lambda: pd.DataFrame(ROWS).set_index("id"),
    "polars": lambda: pl.DataFrame(ROWS),
    "pyarrow table": lambda: pa.Table.from_pylist(ROWS),
    "pyarrow batch": lambda: pa.RecordBatch.from_pylist(ROWS),
    "pyarrow reader": lambda: pa.Table.from_pylist(ROWS).to_reader(max_chunksize=1),
    "duckdb": lambda: duckdb.from_arrow(pa.Table.from_pylist(ROWS)),
    "datasets": lambda: datasets.Dataset.from_list(ROWS),
    "iterable dataset": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "pandas series of structs": lambda: pd.Series(EXPECTED),
}


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_tables(name: str) -> None:
    rows = [*python_rows(TABLES[name]())]
    assert [row.index for row in rows] == [0, 1]
    found = [{key: value for key, value in (row.value or {}).items() if value is not None} for row in rows]
    assert found == EXPECTED


def test_missing_values_of_pandas_are_null() -> None:
    frame = pd.DataFrame(
        {
            "text": ["a", None],
            "seed": [1.0, np.nan],
            "when": [pd.NaT, pd.Timestamp("2024-02-29 12:00:01")],
            "params": [np.nan, {"top_k": 3}],
            "flag": pd.array([True, None], dtype="boolean"),
        }
    )
    first, second = [row.value for row in python_rows(frame)]
    assert first == {"text": "a", "seed": 1, "flag": True}
    assert second.pop("when").startswith("2024-02-29 12:00:01")
    assert second == {"params": {"top_k": 3}}


SERIES: dict[str, Callable[[], Any]] = {
    "tuple": lambda: ("one", "two"),
    "pandas": lambda: pd.Series(["one", "two"]),
    "polars": lambda: pl.Series(["one", "two"]),
    "pyarrow array": lambda: pa.array(["one", "two"]),
    "pyarrow chunks": lambda: pa.chunked_array([["one"], ["two"]]),
    "numpy": lambda: np.array(["one", "two"]),
    "datasets column": lambda: datasets.Dataset.from_dict({"q": ["one", "two"]})["q"],
}


@pytest.mark.parametrize("name", SERIES)
def test_a_column_of_strings_is_a_list_of_prompts(name: str) -> None:
    values = [row.value for row in python_rows(SERIES[name]())]
    assert values == [{"text": "one"}, {"text": "two"}]
    assert all(value is not None and type(value["text"]) is str for value in values)


class UnknownTable:
    """A data frame of a library that batchgen does not know."""

    columns = ("text", "seed")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "string": (lambda: "Hello", r"got one str; call generate\(\[row\]\)"),
    "bytes": (lambda: b"Hello", "got one bytes"),
    "one row": (lambda: EXPECTED[0], r"got one dict; call generate\(\[row\]\)"),
    "columns": (lambda: {"text": ["a", "b"]}, r"for columns, give a table, such as pandas.DataFrame\(columns\)"),
    "dataset dict": (lambda: datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "got one DatasetDict"),
    "unknown table": (UnknownTable, "of the type UnknownTable, whose iteration gives strings and not rows"),
    "lazy frame": (lambda: pl.LazyFrame(EXPECTED), "LazyFrame, which cannot be iterated; collect it first"),
    "number": (lambda: 7, "got int, which cannot be iterated"),
    "mixed types": (
        lambda: pd.DataFrame({"content": ["a", ["b"]], "text": ["x", "y"]}),
        r"DataFrame cannot be read as an Arrow table .*to_dict\(\"records\"\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_but_rows_is_refused_by_name(name: str) -> None:
    make, problem = REFUSED[name]
    with pytest.raises(UsageError, match=problem):
        [*python_rows(make())]


def test_values_that_cannot_be_read_are_error_rows() -> None:
    kind = pa.json_()
    values = pa.ExtensionArray.from_storage(kind, pa.array(['[{"role": "user", "content": "Hi"}]', "[{"]))
    first, second = python_rows(pa.table({"messages": values}))
    assert first.value == {"messages": [{"role": "user", "content": "Hi"}]}
    assert second.error.code == ErrorCode.INVALID_JSON
    text = pl.DataFrame({"messages": [json.dumps([{"role": "user", "content": "Hi"}])], "stop": ['["a"]']})
    (refused,) = python_rows(text)
    assert "`stop` is a string that is also JSON" in refused.error.message
