"""Every Arrow type with values and the JSON values that they become."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from typing import Any

import numpy as np
import pyarrow as pa

D = decimal.Decimal
LONG = "12345678901234567890.123"
HAS_JSON = hasattr(pa, "json_")
"""Whether pyarrow has the type; tests of it are skipped where it has not."""


def extension(kind: pa.DataType, storage: list[Any]) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, pa.array(storage, kind.storage_type))


def plain(kind: pa.DataType, values: list[Any], expected: list[Any] | None = None) -> tuple[pa.Array, list[Any]]:
    """An array of a type, and its values as JSON, which are the same unless others are given."""
    return pa.array(values, kind), values if expected is None else expected


TEXT = ["a", None, "ü{["]
NUMBERS = [[1, 2], None, [], [3, None]]
BERLIN = dt.datetime(2024, 2, 29, 12, 0, 1, 250, dt.UTC)

CASES: dict[str, tuple[pa.Array, list[Any]]] = {
    "null": plain(pa.null(), [None, None]),
    "bool": plain(pa.bool_(), [True, None, False]),
    **{str(kind): plain(kind, [1, None, 100]) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{str(kind): plain(kind, [1, None, 200]) for kind in (pa.uint8(), pa.uint16(), pa.uint32())},
    "uint64": plain(pa.uint64(), [2**64 - 1, None]),
    **{str(kind): plain(kind, [0.5, None, -2.0]) for kind in (pa.float32(), pa.float64())},
    "halffloat": plain(pa.float16(), [np.float16(0.5), None, np.float16(-2.0)], [0.5, None, -2.0]),
    **{str(kind): plain(kind, TEXT) for kind in (pa.string(), pa.large_string(), pa.string_view())},
    **{
        str(kind): plain(kind, ["ü".encode(), None, b"\xff\x00"], ["ü", None, "/wA="])
        for kind in (pa.binary(), pa.large_binary(), pa.binary_view())
    },
    "binary[2]": plain(pa.binary(2), [b"ab", None], ["ab", None]),
    "decimal128": plain(pa.decimal128(38, 3), [D(LONG), None], [LONG, None]),
    "decimal256": plain(pa.decimal256(70, 3), [D("-" + LONG), None], ["-" + LONG, None]),
    "decimal without fraction": plain(pa.decimal128(38, 0), [D(2**80), None], [2**80, None]),
    "date32": plain(pa.date32(), [dt.date(2024, 2, 29), None], ["2024-02-29", None]),
    "date64": plain(pa.date64(), [dt.date(2024, 2, 29), None], ["2024-02-29", None]),
    "time32[s]": plain(pa.time32("s"), [dt.time(1, 2, 3), None], ["01:02:03", None]),
    "time32[ms]": plain(pa.time32("ms"), [dt.time(1, 2, 3), None], ["01:02:03.000", None]),
    "time64[us]": plain(pa.time64("us"), [dt.time(1, 2, 3), None], ["01:02:03.000000", None]),
    "time64[ns]": plain(pa.time64("ns"), [5, None], ["00:00:00.000000005", None]),
    "timestamp[s]": plain(pa.timestamp("s"), [90, None], ["1970-01-01 00:01:30", None]),
    "timestamp[ns]": plain(pa.timestamp("ns"), [1, None], ["1970-01-01 00:00:00.000000001", None]),
    "timestamp with a zone": plain(
        pa.timestamp("us", "Europe/Berlin"), [BERLIN, None], ["2024-02-29 12:00:01.000250Z", None]
    ),
    "timestamp with an offset": plain(pa.timestamp("ms", "+05:30"), [BERLIN], ["2024-02-29 12:00:01.000Z"]),
    "duration[s]": plain(pa.duration("s"), [90, None], ["PT90S", None]),
    "duration[ns]": plain(pa.duration("ns"), [-1, None], ["PT-0.000000001S", None]),
    "interval": plain(pa.month_day_nano_interval(), [(1, 2, 3), None], ["P1M2DT0.000000003S", None]),
    **{
        str(kind): plain(kind, NUMBERS)
        for kind in (
            pa.list_(pa.int32()), pa.large_list(pa.int32()), pa.list_view(pa.int32()), pa.large_list_view(pa.int32()),
        )
    },
    "fixed_size_list": plain(pa.list_(pa.int32(), 2), [[1, 2], None, [3, None]]),
    "list of lists": plain(pa.list_(pa.list_(pa.string_view())), [[["a"], []], None, [None, ["b", None]]]),
    "list_view of structs": plain(
        pa.list_view(pa.struct([("t", pa.date32()), ("n", pa.int8())])),
        [[{"t": dt.date(2024, 2, 29), "n": None}], None],
        [[{"t": "2024-02-29"}], None],
    ),
    "struct": plain(
        pa.struct([("a", pa.string_view()), ("b", pa.list_(pa.decimal128(38, 3)))]),
        [{"a": None, "b": [D(LONG)]}, None, {"a": "x", "b": None}],
        [{"b": [LONG]}, None, {"a": "x"}],
    ),
    "map": plain(pa.map_(pa.int32(), pa.float32()), [[(7, 0.5), (8, None)], None, []], [{"7": 0.5}, None, {}]),
    "map of times": plain(
        pa.map_(pa.date32(), pa.time32("s")), [[(dt.date(2024, 2, 29), dt.time(1))]], [{"2024-02-29": "01:00:00"}]
    ),
    "dictionary": plain(pa.dictionary(pa.int8(), pa.string()), ["a", None, "b", "a"]),
    "dictionary of times": (
        pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.int8()), pa.array([0, 1], pa.timestamp("s"))),
        ["1970-01-01 00:00:01", None, "1970-01-01 00:00:00"],
    ),
    "run_end_encoded": (
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 5], pa.int32()), pa.array(["a", None, "b"])),
        ["a", "a", None, "b", "b"],
    ),
    "uuid": (extension(pa.uuid(), [uuid.UUID(int=1).bytes, None]), [str(uuid.UUID(int=1)), None]),
    "bool8": (extension(pa.bool8(), [1, None, 0]), [True, None, False]),
}  # fmt: skip
"""Name -> (array, its values as JSON)."""
if hasattr(pa, "decimal32"):  # pyarrow 18 has neither these nor JSON
    CASES |= {
        "decimal32": plain(pa.decimal32(5, 2), [D("0.50"), None], [0.5, None]),
        "decimal64": plain(pa.decimal64(18, 3), [D("123456789012345.678"), None], ["123456789012345.678", None]),
    }
if HAS_JSON:
    CASES |= {
        "json": (
            extension(pa.json_(), ['{"a": [1, null]}', None, '"text"', "1.5"]),
            [{"a": [1, None]}, None, "text", 1.5],
        ),
        "json in a list of structs": (
            pa.ListArray.from_arrays(
                [0, 1, 2],
                pa.StructArray.from_arrays(
                    [pa.array(["user", "user"]), extension(pa.json_(), ['"Hi"', '[{"type":"text"}]'])],
                    ["role", "content"],
                ),
            ),
            [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": [{"type": "text"}]}]],
        ),
    }


def column(name: str, rows: int) -> tuple[pa.Array, list[Any]]:
    """The values of a case, repeated up to a number of rows."""
    array, expected = CASES[name]
    times = rows // len(array) + 1
    if isinstance(array, pa.RunEndEncodedArray):
        return array, expected
    return pa.concat_arrays([array] * times).slice(0, rows), (expected * times)[:rows]
