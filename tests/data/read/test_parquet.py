"""Parquet rows: nulls are absent, values are JSON values, damage gives error rows for the affected rows."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.read import parquet
from batchgen.data.read.parquet import parquet_rows, parquet_schema
from batchgen.data.read.selection import Selection
from batchgen.errors import ErrorCode, InputError
from batchgen.request.fields.named_columns import NamedColumns
from batchgen.request.rows.raw_row import RawRow
from tests.cases import each
from tests.tables.arrow_types import CASES, column


def write_parquet(table: pa.Table, **options: Any) -> io.BytesIO:
    stream = io.BytesIO()
    pq.write_table(table, stream, **options)
    stream.seek(0)
    return stream


def read(table: pa.Table, **options: Any) -> list[Any]:
    return [row and row.value for row in parquet_rows(write_parquet(table), "in.parquet", **options)]


def read_column(values: list[Any], kind: pa.DataType | None = None, name: str = "x") -> list[Any]:
    return [row.get(name, "absent") for row in read(pa.table({name: pa.array(values, kind)}))]


def test_nulls_are_absent_fields_inside_structs_too() -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi", "name": None}], "sampling_params": {"seed": 1, "stop": None}},
        {"messages": [{"role": "user", "content": None, "name": "x"}], "sampling_params": None},
    ]
    assert read(pa.Table.from_pylist(rows)) == [
        {"messages": [{"role": "user", "content": "hi"}], "sampling_params": {"seed": 1}},
        {"messages": [{"role": "user", "name": "x"}]},
    ]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.int8(), [1, None], [1, "absent"]),
        (pa.uint64(), [2**64 - 1], [2**64 - 1]),
        (pa.float32(), [0.5], [0.5]),
        (pa.bool_(), [True, False], [True, False]),
        (pa.large_string(), ["a"], ["a"]),
        (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"], ["a", "b", "a"]),
        (pa.list_(pa.int32()), [[1, 2], None, [], [3]], [[1, 2], "absent", [], [3]]),
        (pa.list_(pa.int64()), [[1, None]], [[1, None]]),
        (pa.list_(pa.float32()), [[0.5]], [[0.5]]),
        (pa.large_list(pa.int32()), [[1], []], [[1], []]),
        (pa.list_(pa.int32(), 2), [[1, 2]], [[1, 2]]),
        (pa.list_(pa.list_(pa.int32())), [[[1], []], [[2, 3]]], [[[1], []], [[2, 3]]]),
        (pa.list_(pa.string()), [["a", None]], [["a", None]]),
        (pa.map_(pa.string(), pa.int32()), [[("a", 1), ("b", None)]], [{"a": 1}]),
        (pa.map_(pa.int32(), pa.float32()), [[(7, 0.5)]], [{"7": 0.5}]),
        (pa.decimal128(5, 1), [decimal.Decimal("0.7")], [0.7]),
        (pa.decimal128(38, 0), [decimal.Decimal(2**80)], [2**80]),
        (pa.date32(), [dt.date(2020, 1, 2)], ["2020-01-02"]),
        (pa.timestamp("ns"), [1], ["1970-01-01 00:00:00.000000001"]),
        (pa.list_(pa.struct([("t", pa.date32())])), [[{"t": dt.date(2020, 1, 2)}]], [[{"t": "2020-01-02"}]]),
        (pa.map_(pa.string(), pa.date32()), [[("a", dt.date(2020, 1, 2))]], [{"a": "2020-01-02"}]),
        pytest.param(
            *(pa.list_(pa.date32(), 2), [[dt.date(2020, 1, 2), None], None], [["2020-01-02", None], "absent"]),
            marks=pytest.mark.skipif(pa.__version__ < "19", reason="pyarrow 18 reads no null among such lists"),
        ),
        (pa.list_(pa.list_(pa.timestamp("us"), 1), 1), [[[1]]], [[["1970-01-01 00:00:00.000001"]]]),
        (pa.list_(pa.struct([("t", pa.time32("ms"))]), 1), [[{"t": dt.time(1, 2, 3)}]], [[{"t": "01:02:03.000"}]]),
        (pa.map_(pa.binary(), pa.int32()), [[("é".encode(), 1), (b"\xff\x00", 2)]], [{"é": 1, "/wA=": 2}]),
        (pa.map_(pa.date32(), pa.int32()), [[(dt.date(2020, 1, 2), 1)]], [{"2020-01-02": 1}]),
        (pa.time64("us"), [dt.time(1, 2, 3)], ["01:02:03.000000"]),
        (pa.binary(), ["é".encode(), b"\xff\x00"], ["é", "/wA="]),
        (pa.large_binary(), [b"a"], ["a"]),
        (pa.binary(2), [b"ab"], ["ab"]),
        (pa.uuid(), [uuid.UUID(int=1).bytes], ["00000000-0000-0000-0000-000000000001"]),
        (pa.null(), [None], ["absent"]),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)
def test_types_become_json(kind: pa.DataType, values: list[Any], expected: list[Any]) -> None:
    found = read_column(values, kind)
    assert found == expected
    assert [type(value) for value in found] == [type(value) for value in expected]
    json.dumps(found)


def test_lists_of_a_column_are_read_across_row_groups() -> None:
    lists = [[i] * (i % 4) if i % 5 else None for i in range(5000)]
    table = pa.table({"input_ids": pa.array(lists, pa.list_(pa.int32()))})
    rows = [row.value for row in parquet_rows(write_parquet(table, row_group_size=1700), "in") if row is not None]
    assert [None if row is None else row.get("input_ids") for row in rows] == lists


def test_decimals_with_a_fraction_in_their_type_become_floats() -> None:
    decimals = pa.array([decimal.Decimal("128.00"), None, decimal.Decimal("1.50")], pa.decimal128(9, 2))
    assert read(pa.table({"max_new_tokens": decimals, "text": ["a"] * 3})) == [
        {"max_new_tokens": 128.0, "text": "a"},
        {"text": "a"},
        {"max_new_tokens": 1.5, "text": "a"},
    ]


def test_nan_is_left_for_field_validation() -> None:
    assert np.isnan(read_column([float("nan")], name="max_new_tokens")[0])


def invalid_utf8_strings(*values: bytes) -> pa.Array:
    return pa.Array.from_buffers(
        pa.string(),
        len(values),
        pa.array(values, pa.binary()).buffers(),
    )


def test_strings_that_are_not_utf8_are_error_rows() -> None:
    table = pa.table({"text": invalid_utf8_strings(b"a", b"\xff", b"c")})
    rows = [row for row in parquet_rows(write_parquet(table), "in") if row is not None]
    assert [row.value for row in rows] == [{"text": "a"}, None, {"text": "c"}]
    assert rows[1].error is not None
    assert rows[1].error.code == ErrorCode.INVALID_UNICODE
    assert rows[1].line == 2


def test_binary_prompt_columns_must_be_utf8() -> None:
    table = pa.table({"text": pa.array([b"a", b"\xff"]), "q": pa.array([b"\xff", b"b"])})
    assert read(table) == [{"text": "a", "q": "/w=="}, None]
    assert read(table, columns=NamedColumns("q")) == [None, {"text": "/w==", "q": "b"}]


def test_a_map_with_a_repeated_key_is_an_error_row() -> None:
    table = pa.table({"x": pa.array([[("a", 1), ("a", 2)], [("a", 1)]], pa.map_(pa.string(), pa.int32()))})
    rows = [row for row in parquet_rows(write_parquet(table), "in") if row is not None]
    assert [row.value for row in rows] == [None, {"x": {"a": 1}}]


def test_parquet_columns() -> None:
    assert parquet_schema(write_parquet(pa.table({"a": [1], "b": [2]})), "in").names == ["a", "b"]
    assert read(pa.table({"text": pa.array([], pa.string())})) == []
    assert parquet_schema(io.BytesIO(b"PAR1 cut"), "in") is None
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(InputError, match="two columns are named 'a'"):
        parquet_schema(write_parquet(twice), "in")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_struct_fields_with_the_same_name_are_refused(depth: int) -> None:
    kind = pa.struct([pa.field("a", pa.int32()), pa.field("a", pa.int32())])
    twice = pa.StructArray.from_arrays([pa.array([1], pa.int32()), pa.array([2], pa.int32())], fields=[*kind])
    for _ in range(depth):
        twice = pa.ListArray.from_arrays([0, 1], twice)
    with pytest.raises(InputError, match="in: two fields in column 'x' are named 'a'; rename one of them"):
        parquet_schema(write_parquet(pa.table({"x": twice})), "in")
    apart = pa.table({"x": [{"a": 1, "b": {"a": 2}}], "a": [3]})
    assert parquet_schema(write_parquet(apart), "in").names == ["x", "a"]


@pytest.mark.parametrize("keep", [4, 100, -9, -1])
def test_a_cut_file_is_one_error_row(keep: int) -> None:
    data = write_parquet(pa.table({"text": ["a" * 100] * 100})).getvalue()[:keep]
    rows = [row for row in parquet_rows(io.BytesIO(data), "in.parquet", first_index=5) if row is not None]
    assert [(row.index, row.value) for row in rows] == [(5, None)]
    assert rows[0].error is not None
    assert rows[0].error.code == ErrorCode.TRUNCATED_INPUT
    assert "in.parquet" in rows[0].error.message


@pytest.mark.parametrize("total", [0, 4, 6, -5])
def test_a_footer_that_contradicts_itself_is_one_error_row(total: int) -> None:
    """Row groups that count other rows than the file would lose some, or make some up."""
    data = write_parquet(pa.table({"text": ["a"] * 5}), row_group_size=3).getvalue()
    count, groups = bytes([0x16, 2 * 5]), bytes([0x19, 0x2C])  # Thrift: 5 rows, a list of two row groups
    assert data.count(count + groups) == 1
    wrong = bytes([0x16, 2 * total if total >= 0 else -2 * total - 1])
    (row,) = parquet_rows(io.BytesIO(data.replace(count + groups, wrong + groups)), "in.parquet")
    assert row is not None
    assert row.error is not None
    assert row.error.code == ErrorCode.TRUNCATED_INPUT
    assert f"its footer counts {total} rows, and 5 in its row groups" in row.error.message


def test_a_damaged_row_group_gives_error_rows_for_that_group_only() -> None:
    table = pa.table({"text": [f"row {i}" for i in range(300)]})
    stream = write_parquet(
        table, row_group_size=100, compression="none", use_dictionary=False, write_page_checksum=True
    )
    data = bytearray(stream.getvalue())
    at = data.index(b"row 150")
    data[at : at + 7] = b"ROW 999"
    rows: list[RawRow] = [row for row in parquet_rows(io.BytesIO(bytes(data)), "in") if row is not None]
    assert [row.index for row in rows] == [*range(300)]
    assert [row.value for row in rows[:100]] == [{"text": f"row {i}"} for i in range(100)]
    assert [row.value for row in rows[200:]] == [{"text": f"row {i}"} for i in range(200, 300)]
    codes = {row.error.code for row in rows[100:200] if row.error is not None}
    assert codes == {ErrorCode.TRUNCATED_INPUT}


def test_rejected_rows_are_counted(tmp_path: Path) -> None:
    table = pa.table({"n": [*range(10)]})
    rows = [*parquet_rows(write_parquet(table), "in", 100, keep=lambda index: index % 4 == 0)]
    assert [row and (row.index, row.line, row.value) for row in rows] == [
        *((100, 1, {"n": 0}), None, None, None),
        *((104, 5, {"n": 4}), None, None, None),
        *((108, 9, {"n": 8}), None),
    ]


PLAIN = st.fixed_dictionaries(
    {
        "text": st.text(),
        "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "stop": st.none() | st.lists(st.text(), max_size=3),
        "ids": st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=5),
        "deep": st.none() | st.fixed_dictionaries({"a": st.none() | st.booleans(), "b": st.floats(allow_nan=False)}),
    }
)


@given(st.lists(PLAIN, min_size=1, max_size=6))
def test_round_trip(rows: list[dict[str, Any]]) -> None:
    schema = pa.schema(
        [
            ("text", pa.string()),
            ("seed", pa.int64()),
            ("stop", pa.list_(pa.string())),
            ("ids", pa.list_(pa.int32())),
            ("deep", pa.struct([("a", pa.bool_()), ("b", pa.float64())])),
        ]
    )

    def present(value: Any) -> Any:
        return {k: present(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    assert read(pa.Table.from_pylist(rows, schema)) == [present(row) for row in rows]


SELECTIONS = {
    "limit": Selection(limit=5),
    "offset": Selection(offset=3),
    "window": Selection(offset=2, limit=7),
    "sample": Selection(sample=6),
    "shard": Selection(shard=(1, 3)),
}


def writes(name: str) -> bool:
    try:
        write_parquet(pa.table({"x": column(name, 4)[0]}))
    except pa.ArrowException:
        return False
    return True


@each("name", [name for name in CASES if writes(name)])
def test_every_type_with_every_selection_is_as_without(name: str) -> None:
    array, expected = column(name, 40)
    keys = pa.array([*range(len(array))])
    size = None if name == "struct" else 17  # pyarrow's writer cannot cut structs of views into row groups
    stream = write_parquet(pa.table({"i": keys, "x": array}), row_group_size=size)
    every = [row and row.value for row in parquet_rows(stream, "in")]
    if pq.read_schema(stream).field("x").type == array.type:  # Parquet itself has no seconds, for example
        assert every == [{"i": i} if value is None else {"i": i, "x": value} for i, value in enumerate(expected)]
    for selection in SELECTIONS.values():
        keep = selection.row_filter(lambda: len(every))
        assert keep is not None
        found = [row and row.value for row in parquet_rows(stream, "in", keep=keep)]
        assert found == [value if keep(i) else None for i, value in enumerate(every)]


def test_what_pyarrow_cannot_read_is_not_called_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = write_parquet(pa.table({"text": ["a", "b"]}))

    def refuse(*args: Any, **options: Any) -> Any:
        raise pa.ArrowNotImplementedError("no reader for this type")
        yield

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", refuse)
    rows = [row for row in parquet_rows(stream, "in") if row is not None]
    assert [row.error and row.error.code for row in rows] == [ErrorCode.UNSUPPORTED_FIELD] * 2
    assert rows[1].error is not None
    assert "pyarrow" in rows[1].error.message
    monkeypatch.setattr(pq, "ParquetFile", lambda stream: next(refuse()))
    with pytest.raises(InputError, match="cannot be read by pyarrow"):
        parquet_schema(stream, "in.parquet")


CHAT = [{"role": "user", "content": "Hi"}]
AS_TEXT: dict[str, tuple[str, Any]] = {
    "messages": (json.dumps(CHAT), CHAT),
    "tools": ('[{"type":"function"}]', [{"type": "function"}]),
    "sampling_params": ('{"top_k": 3}', {"top_k": 3}),
    "body": ('{"prompt": "Hi"}', {"prompt": "Hi"}),
    "chat_template_kwargs": ('{"a": 1}', {"a": 1}),
    "logit_bias": (' {"7": -1}', {"7": -1}),
    "response_format": ('{"type": "text"}', {"type": "text"}),
    "custom_params": ('{"a": 1}', {"a": 1}),
    "return_hidden_states": ('{"layers": [1]}', {"layers": [1]}),
    "input_ids": ("[1, 2]", [1, 2]),
    "stop_token_ids": ("[1, 2]", [1, 2]),
    "bad_words": ('["a"]', ["a"]),
    "choice": ('["a", "b"]', ["a", "b"]),
    "completions": ('["a", "b"]', ["a", "b"]),
    "json_schema": ('{"type": "object"}', '{"type": "object"}'),
    "structural_tag": ('{"type": "x"}', '{"type": "x"}'),
    "text": ('["a", "b"]', '["a", "b"]'),
    "completion": ("[1]", "[1]"),
    "tool_choice": ('{"type": "function", "name": "f"}', {"type": "function", "name": "f"}),
    "image_data": ('["a.png", "b.png"]', ["a.png", "b.png"]),
    "input_embeds": ("[[0.5, 1.0]]", [[0.5, 1.0]]),
    "stop": ("[", "["),
    "stop_regex": ("[ab]", "[ab]"),
    "regex": ('["a"]', '["a"]'),
    "note": ('{"a": 1}', '{"a": 1}'),
}


@each("name", AS_TEXT)
def test_json_in_columns_of_strings_is_parsed_where_it_cannot_be_the_text(name: str) -> None:
    text, value = AS_TEXT[name]
    assert read(pa.table({name: [text, None]})) == [{name: value}, {}]


REFUSED_TEXT = {
    "stop": ('["END"]', "`stop` is a string that is also JSON", ErrorCode.INVALID_FIELD),
    "stop_regex": ('["a"]', "`stop_regex` is a string that is also JSON", ErrorCode.INVALID_FIELD),
    "messages": ('[{"role": "user"', "`messages` is text that is not JSON (", ErrorCode.INVALID_JSON),
    "tools": ('{"a": 1, "a": 2}', "`tools` is text that is not JSON (the key 'a' occurs twice", ErrorCode.INVALID_JSON),
    "prompt": (json.dumps(CHAT), "conversation as JSON text; name it with --prompt-column", ErrorCode.INVALID_FIELD),
}


@pytest.mark.parametrize("name", REFUSED_TEXT)
def test_text_that_may_mean_two_things_is_refused(name: str) -> None:
    text, part, code = REFUSED_TEXT[name]
    first, second = parquet_rows(write_parquet(pa.table({name: [text, "plain"]})), "in")
    assert first is not None
    assert second is not None
    assert first.error is not None
    assert (first.error.code, part in first.error.message) == (code, True), first.error.message
    assert second.value == {name: "plain"}


def test_the_json_of_strings_and_null_is_read_where_it_cannot_be_the_text() -> None:
    """A column may hold the JSON of each value, also of those that need none."""
    texts = {"tool_choice": ['"auto"', "null", "auto"], "text": ['"Why?"', "null", "Why?"]}
    values = {**texts, "tool_choice": ["auto", None, "auto"]}
    assert read(pa.table(texts)) == [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def test_json_text_inside_bodies_and_parameters_is_read_too() -> None:
    body = {"messages": json.dumps(CHAT), "user": "[me]", "max_tokens": 3, "extra_headers": '["a"]'}
    params = {"stop_token_ids": "[1]", "temperature": 0.5}
    rows = read(pa.table({"custom_id": ["a"], "body": [body], "sampling_params": [params]}))
    assert rows == [
        {"custom_id": "a", "body": {**body, "messages": CHAT}, "sampling_params": {**params, "stop_token_ids": [1]}}
    ]
    either = {"messages": CHAT, "function_call": '{"name": "f"}', "tool_choice": '{"type": "function", "name": "f"}'}
    ((value,),) = (read(pa.table({"custom_id": ["a"], "body": [either]})),)
    assert [value["body"][name] for name in either] == [CHAT, {"name": "f"}, {"type": "function", "name": "f"}]
    mail = {"text": ["Summarise."], "body": ['{"mail": 1}']}
    assert read(pa.table(mail)) == [{"text": "Summarise.", "body": '{"mail": 1}'}], "a column that is carried"


def test_a_row_of_parquet_has_a_largest_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its columns compress well; the rows around it are read."""
    nested = [[0] * 100] * 100
    rows = [{"text": "a", "x": [[1]]}, {"text": "b", "x": nested}, {"text": "c" * 3000, "x": [[1]]}]
    monkeypatch.setattr(parquet, "BATCH_BYTES", 64)
    monkeypatch.setattr(parquet, "ROW_MEMORY", 100 * 40 + 100 * 100 * (40 + 8) - 1)
    first, second, third = parquet_rows(write_parquet(pa.Table.from_pylist(rows)), "in.parquet")
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.value, third.value) == (rows[0], rows[2])
    assert second.error is not None
    assert second.error.code == ErrorCode.INVALID_FIELD
    assert "the row's values take about 0 MiB" in second.error.message
    monkeypatch.setattr(parquet, "ROW_MEMORY", 1 << 20)
    assert read(pa.Table.from_pylist(rows)) == rows
