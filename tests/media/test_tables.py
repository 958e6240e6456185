"""Images and sounds in columns of tables: binary, as structs of bytes and path, in messages, and as JSON text."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from batchgen.data.read.input_files import find_inputs
from batchgen.data.read.input_set import open_inputs
from batchgen.errors import RowError
from batchgen.request.fields.media import MediaItem
from batchgen.request.fields.named_columns import NamedColumns
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.unknown_keys import CarriedOptions, carried_notes
from batchgen.request.rows.values import RowDefaults
from batchgen.tables.arrow_values import table_items
from tests.cases import each
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


NAMED = {"image_data": NamedColumns(image="picture"), "audio_data": NamedColumns(audio="picture")}


@pytest.mark.field("image_data", "audio_data")
@pytest.mark.parametrize(("table", "expected"), [case for case in COLUMNS if "messages" not in case[0].column_names])
def test_a_named_column_is_read_like_the_field(table: pa.Table, expected: list[list[Any]], tmp_path: Path) -> None:
    """A field whose name it takes is carried."""
    field = table.column_names[1]
    named = table.rename_columns(["text", "picture"]).append_column(field, pa.array([b"other"] * len(table)))
    pq.write_table(named, tmp_path / "in.parquet")
    rows = [*open_inputs(find_inputs([str(tmp_path / "in.parquet")])).rows(NAMED[field])]
    assert [sources(row.value) for row in rows] == expected
    assert {row.displaced[field] for row in rows} == {"other"}


@pytest.mark.field("image_data")
def test_errors_name_the_column(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "a", "pic": 5, "k": 1}, {"text": "a", "pic": ["a.png", "b.png"]}, {"text": "a"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrong, two, none = open_inputs(find_inputs([str(tmp_path / "in.jsonl")])).rows(NamedColumns(image="pic"))
    assert wrong.error is not None
    assert wrong.error.param == "pic"
    assert "line 1: `pic` must be a file below --media-root" in wrong.error.message
    assert (wrong.id, wrong.readable["k"]) == ("a", 1)
    assert two.value is not None
    assert [item.place for item in two.value["image_data"].items] == ["pic[0]", "pic[1]"]
    assert none.value == {"text": "a"}


CARRIED: list[tuple[Any, bool]] = [
    ({"bytes": "aGVsbG8=", "path": None}, True),
    ({"path": "a.png"}, True),
    ([{"bytes": "aGVsbG8=", "path": "a.png"}], True),
    ({"array": [0.5], "sampling_rate": 8000, "path": "a.wav"}, True),
    ("data:image/png;base64,iVBORw0KGgo=", True),
    (base64.b64encode(WAV).decode(), True),
    (Image.new("L", (1, 1)), True),
    ({}, False),
    ({"path": "a.png", "size": 3}, False),
    ("a.png", False),
    ("a picture", False),
    ([], False),
    (None, False),
]


@each("value, is_named", CARRIED)
@each("form", ["row", "line"])
def test_carried_media_are_named(value: Any, is_named: bool, form: str) -> None:
    row: dict[str, Any] = {"custom_id": "a", "url": "/v1/completions", "body": {"model": "*", "prompt": "a"}}
    row = row if form == "line" else {"text": "a"}
    defaults = RowDefaults()
    parse_row({**row, "picture": value}, 0, defaults)
    assert defaults.carried_options.rows == ({"picture": 1} if is_named else {})
    if is_named:
        (note,) = carried_notes(defaults.carried_options.rows, "all")
        assert note["hint"].endswith("or name it with --image-column or --audio-column; carried, not obeyed")
        with pytest.raises(RowError, match="`picture` is not a field of a row; an image or a sound"):
            parse_row({**row, "picture": value}, 0, RowDefaults(carried_options=CarriedOptions(strict=True)))
        meant = RowDefaults(carried_options=CarriedOptions(["picture"], strict=True))
        parse_row({**row, "picture": value}, 0, meant)
        assert not meant.carried_options.rows


@pytest.mark.field("image_data")
def test_other_binary_columns_stay_text() -> None:
    (row,) = table_items(pa.table({"text": [b"a"], "note": [PNG[:4]], "image_data": [PNG]}))
    assert (row["text"], row["note"], row["image_data"]) == ("a", "iVBORw==", PNG)


@pytest.mark.field("image_data")
def test_a_cell_of_csv(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('text,image_data\na,a.png\nb,"[""a.png"", ""b.png""]"\nc,\n')
    rows = [raw.value for raw in open_inputs(find_inputs([str(tmp_path / "in.csv")])).rows()]
    assert [sources(row) for row in rows] == [["a.png"], ["a.png", "b.png"], []]
    (tmp_path / "in.csv").write_text((tmp_path / "in.csv").read_text().replace("image_data", "pic"))
    named = open_inputs(find_inputs([str(tmp_path / "in.csv")])).rows(NamedColumns(image="pic"))
    assert [sources(row.value) for row in named] == [["a.png"], ["a.png", "b.png"], []]


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
