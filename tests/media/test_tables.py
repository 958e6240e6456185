"""Images and sounds in columns of tables: binary, as structs of bytes and path, in messages, and as JSON text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.read.input_files import find_inputs
from batchgen.data.read.input_set import open_inputs
from batchgen.request.media import MediaItem
from batchgen.request.parser import parse_row
from batchgen.request.row_values import RowDefaults
from batchgen.tables.arrow_values import table_items
from tests.media.samples import pixels, recorded, saved

PNG = saved(pixels(), "PNG")
WAV = recorded("wav", 8000, frames=8)
TEXT = b"RIFF$\0\0\0WAVEfmt "
"""Bytes of a file that are also UTF-8."""
FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""Storage of the image and audio columns of Hugging Face datasets."""


def sources(row: Any) -> list[Any]:
    prompts = parse_row(row, 0, RowDefaults()).prompts
    items: list[MediaItem] = [item for prompt in prompts for item in getattr(prompt, "media", ())]
    return [item.source for item in items]


def column(values: list[Any], kind: pa.DataType, name: str = "image_data") -> pa.Table:
    messages = {} if name == "messages" else {"text": ["a"] * len(values)}
    return pa.table({**messages, name: pa.array(values, kind)})


MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.list_(pa.struct([("type", pa.string()), ("text", pa.string()), ("image", FILE)]))),
    ]
)
COLUMNS: list[tuple[pa.Table, list[list[Any]]]] = [
    (column([PNG, None, TEXT], pa.binary()), [[PNG], [], [TEXT]]),
    (column([WAV], pa.large_binary(), "audio_data"), [[WAV]]),
    (column([{"bytes": PNG, "path": "a.png"}, {"bytes": None, "path": "b.png"}, None], FILE), [[PNG], ["b.png"], []]),
    (column([{"bytes": TEXT, "path": None}], FILE, "audio_data"), [[TEXT]]),
    (column([[PNG, TEXT], []], pa.list_(pa.binary())), [[PNG, TEXT], []]),
    (column([[{"bytes": PNG, "path": None}]], pa.list_(FILE)), [[PNG]]),
    (column([["a.png", "b.png"]], pa.list_(pa.string())), [["a.png", "b.png"]]),
    (column(["a.png", '["a.png", "b.png"]', '{"url": "c.png"}'], pa.string()),
     [["a.png"], ["a.png", "b.png"], ["c.png"]]),
    (column([PNG, PNG, TEXT], pa.binary()).set_column(1, "image_data", pa.array([PNG, TEXT, PNG]).dictionary_encode()),
     [[PNG], [TEXT], [PNG]]),
    (column([[{"role": "user", "content": [
        {"type": "image", "text": None, "image": {"bytes": TEXT, "path": "a.wav"}}, {"type": "text", "text": "What?"},
    ]}]], pa.list_(MESSAGE), "messages"), [[TEXT]]),
]  # fmt: skip


@pytest.mark.field("image_data", "audio_data", "messages")
@pytest.mark.parametrize(("table", "expected"), COLUMNS)
def test_columns(table: pa.Table, expected: list[list[Any]], tmp_path: Path) -> None:
    pq.write_table(table, tmp_path / "in.parquet")
    rows = [raw.value for raw in open_inputs(find_inputs([str(tmp_path / "in.parquet")])).rows()]
    assert [sources(row) for row in rows] == expected
    assert [sources(row) for row in table_items(table)] == expected


@pytest.mark.field("image_data")
def test_other_binary_columns_stay_text() -> None:
    (row,) = table_items(pa.table({"text": [b"a"], "note": [PNG[:4]], "image_data": [PNG]}))
    assert (row["text"], row["note"], row["image_data"]) == ("a", "iVBORw==", PNG)


@pytest.mark.field("image_data")
def test_a_cell_of_csv(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('text,image_data\na,a.png\nb,"[""a.png"", ""b.png""]"\nc,\n')
    rows = [raw.value for raw in open_inputs(find_inputs([str(tmp_path / "in.csv")])).rows()]
    assert [sources(row) for row in rows] == [["a.png"], ["a.png", "b.png"], []]


@pytest.mark.field("image_data")
def test_a_table_of_large_images_is_read_in_pieces() -> None:
    size = 1 << 20
    table = pa.table({"text": ["a"] * 40, "image_data": [bytes([i]) * size for i in range(40)]})
    assert [row["image_data"][0] for row in table_items(table)] == list(range(40))


@pytest.mark.field("image_data")
def test_json_lines_hold_what_a_table_would(tmp_path: Path) -> None:
    rows = [{"text": "a", "image_data": {"bytes": None, "path": "a.png"}}, {"text": "a", "image_data": ["a.png", None]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = [raw.value for raw in open_inputs(find_inputs([str(tmp_path / "in.jsonl")])).rows()]
    assert [sources(row) for row in read] == [["a.png"], ["a.png"]]
