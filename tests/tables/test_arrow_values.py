"""Values of every Arrow type become the documented JSON values, whole and in slices."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from batchgen.errors import ErrorCode, InputError, RowError
from batchgen.tables.arrow_values import read_rows, table_items
from batchgen.tables.text_fields import TextFields
from tests.cases import each
from tests.tables.arrow_types import CASES, HAS_JSON, extension

NO_FIELDS = TextFields(())


def read(array: pa.Array, name: str = "x") -> list[Any]:
    rows = read_rows(pa.record_batch([array], [name]), NO_FIELDS)
    return [row if isinstance(row, RowError) else row.get(name) for row in rows]


@each("name", CASES)
def test_every_type_whole_and_in_slices(name: str) -> None:
    array, expected = CASES[name]
    assert [json.dumps(value) for value in read(array)] == [json.dumps(value) for value in expected]
    for start in range(len(array) + 1):
        for size in range(len(array) - start + 1):
            assert read(array.slice(start, size)) == expected[start : start + size]


def test_every_type_of_arrow_is_in_the_table() -> None:
    made = {array.type.id for array, _ in CASES.values()}
    types = {value for name, value in vars(pa.lib).items() if name.startswith("Type_")}
    names = {value: name for name, value in vars(pa.lib).items() if name.startswith("Type_")}
    left_out = {"Type_SPARSE_UNION", "Type_DENSE_UNION", "Type_INTERVAL_MONTHS", "Type_INTERVAL_DAY_TIME"}
    assert {names[kind] for kind in types - made} <= left_out, "pyarrow cannot write these to a file"


def test_a_union_is_refused_by_name() -> None:
    union = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])])
    with pytest.raises(InputError, match="column 'x' has the type sparse_union"):
        read(union)


@pytest.mark.parametrize("name", ["temperature", "logit_bias", "sampling_params"])
def test_decimals_are_numbers_in_fields(name: str) -> None:
    values = pa.array([{"7": 0.5}], pa.struct([("7", pa.float64())])).cast(pa.struct([("7", pa.decimal128(38, 9))]))
    assert read(values, name) == [{"7": 0.5}]
    assert read(values, "price") == [{"7": "0.500000000"}]


@pytest.mark.skipif(not HAS_JSON, reason="this pyarrow has no type for JSON")
def test_json_that_is_not_json_is_an_error_of_its_row() -> None:
    values = extension(pa.json_(), ["1", "{", '{"a":1,"a":2}', "NaN"])
    found = read(values)
    assert found[0] == 1
    errors = [error.info for error in found[1:]]
    assert {error.code for error in errors} == {ErrorCode.INVALID_JSON}
    assert all(error.message.startswith("`x` has the type JSON, but its text is not JSON (") for error in errors)
    assert "'a' occurs twice" in errors[1].message


def test_the_dictionary_of_a_file_is_not_converted_for_every_batch() -> None:
    entries = pa.array([f"text {i}" for i in range(1000)] + [json.dumps({})])
    part = pa.DictionaryArray.from_arrays(pa.array([5, None, 1000, 5], pa.int32()), entries)
    assert read(part) == ["text 5", None, "{}", "text 5"]


def test_tables_and_single_columns_give_their_items() -> None:
    table = pa.table({"text": ["a", "b"], "stop": ['["x"]', None], "messages": [None, '[{"role": "user"}]']})
    for source in (table, table.to_batches()[0], table.to_reader()):
        first, second = table_items(source)
        assert isinstance(first, RowError)
        assert "`stop` is a string that is also JSON" in first.info.message
        assert second == {"text": "b", "messages": [{"role": "user"}]}
    assert [*table_items(pa.array(["a", None]))] == [*table_items(pa.chunked_array([["a"], [None]]))] == ["a", None]
