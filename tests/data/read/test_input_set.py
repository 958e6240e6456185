"""Input files: finding, error messages, hashes, order of rows, named columns and selection."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config.run_config import BY_NAME
from batchgen.data.read.formats import BY_KEY
from batchgen.data.read.input_files import find_inputs
from batchgen.data.read.input_set import InputSet
from batchgen.data.read.input_set import open_inputs as open_found
from batchgen.data.read.selection import Selection
from batchgen.data.reserved_paths import ReservedPaths
from batchgen.errors import ErrorCode, ErrorInfo, InputError, UsageError
from batchgen.request.fields.named_columns import NamedColumns
from tests.cases import each


def open_inputs(paths: Sequence[str], reserved: Container[str] = ()) -> InputSet:
    return open_found(find_inputs(paths, reserved))


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def values(*paths: str, prompt_column: str | None = None) -> list[Any]:
    return [row.value for row in open_inputs(paths).rows(NamedColumns(prompt_column))]


def test_rows_of_parquet_are_called_rows(tmp_path: Path) -> None:
    """Whatever is wrong with them; those of other files are lines."""
    folder = tmp_path / "k=2"
    folder.mkdir()
    table = pa.table({"text": ["a", "b", "c"], "k": ["2", "3", "2"], "stop": ['["x"]', None, None]})
    pq.write_table(table, folder / "a.parquet")
    (folder / "cut.parquet").write_bytes(b"PAR1")
    (tmp_path / "b.jsonl").write_text("{}\n{\n")
    found = find_inputs([str(folder), str(tmp_path / "b.jsonl")])
    rows = [*open_found(found).rows()]
    messages = [row.locate(row.error or ErrorInfo(ErrorCode.INTERNAL, "wrong")).message for row in rows]
    places = [f"{folder}/a.parquet, row {number}: " for number in (1, 2, 3)]
    places += [f"{folder}/cut.parquet, row 1: ", f"{tmp_path}/b.jsonl, line 1: ", f"{tmp_path}/b.jsonl, line 2: "]
    assert [row.error is None for row in rows] == [False, False, True, False, True, False]
    assert all(message.startswith(place) for message, place in zip(messages, places, strict=True)), messages


def test_files_of_all_formats_are_read_in_the_order_given() -> None:
    Path("b.jsonl").write_bytes(lines({"n": 0}, {"n": 1}) + b"\n")
    Path("a.jsonl.gz").write_bytes(gzip.compress(lines({"n": 2})))
    Path("c.ndjson.zst").write_bytes(zstandard.compress(lines({"n": 3})))
    Path("d.txt").write_bytes(b"four\n\nfive\n")
    pq.write_table(pa.table({"n": [6, 7]}), "e.parquet")
    Path("f.txt.gz").write_bytes(gzip.compress(b"eight"))
    Path("empty.jsonl").write_bytes(b"")
    paths = ["b.jsonl", "a.jsonl.gz", "empty.jsonl", "c.ndjson.zst", "d.txt", "e.parquet", "f.txt.gz"]
    inputs = open_inputs(paths)
    rows = [*inputs.rows()]
    assert [row.index for row in rows] == [*range(9)]
    assert [row.value for row in rows] == [
        *({"n": i} for i in range(4)),
        {"text": "four"},
        {"text": "five"},
        {"n": 6},
        {"n": 7},
        {"text": "eight"},
    ]
    assert [(row.source, row.line) for row in rows][4:8] == [
        ("d.txt", 1),
        ("d.txt", 3),
        ("e.parquet", 1),
        ("e.parquet", 2),
    ]
    assert [*inputs.rows()] == rows, "an input can be read again"
    assert inputs.count() == 9
    assert [file.path for file in inputs.files] == paths
    for file in inputs.files:
        data = Path(file.path).read_bytes()
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_globs_are_sorted_and_keep_the_order_of_the_arguments() -> None:
    Path("sub").mkdir()
    for name in ("z1.jsonl", "z2.jsonl", "sub/a.jsonl", "a.jsonl"):
        Path(name).write_bytes(lines({"f": name}))
    assert values("z*.jsonl", "a.jsonl") == [{"f": "z1.jsonl"}, {"f": "z2.jsonl"}, {"f": "a.jsonl"}]
    assert values("**/*.jsonl") == [{"f": n} for n in ("a.jsonl", "sub/a.jsonl", "z1.jsonl", "z2.jsonl")]
    Path("odd[1].jsonl").write_bytes(lines({"f": "odd"}))
    assert values("odd[1].jsonl") == [{"f": "odd"}], "the name of an existing file is not a pattern"


REFUSED: dict[str, tuple[bytes | None, str]] = {
    "missing.jsonl": (None, "cannot be read"),
    "*.jsonl": (None, "no file matches"),
    "rows.xlsx": (b"PK", "unknown kind.*--input-format"),
    "twice.csv": (b"a,b,a\n", "two columns are named 'a'"),
    "latin.csv": ("caf\u00e9,b\n".encode("latin-1"), "not UTF-8.*iconv"),
    "quote.tsv": (b'a\t"b\n', "first row.*cannot be read"),
    "rows": (b"{}", "unknown kind"),
    "rows.parquet.gz": (b"\x1f\x8b", "unknown kind"),
    "rows.gz": (b"\x1f\x8b", "unknown kind"),
    "rows.parquet": (b"{}", "not a Parquet file"),
    "empty.parquet": (b"", "not a Parquet file"),
    "plain.jsonl.gz": (b"{}\n", "named as a gzip file"),
    "packed.jsonl": (gzip.compress(b"{}"), "it is gzip"),
    "other.jsonl.gz": (zstandard.compress(b"{}"), "it is zstd"),
    "wide.jsonl": ('{"text":"a"}\n'.encode("utf-16"), "UTF-16"),
}


@each("name", REFUSED)
def test_unreadable_inputs_are_refused_by_name_with_a_remedy(name: str) -> None:
    data, part = REFUSED[name]
    if data is not None:
        Path(name).write_bytes(data)
    with pytest.raises(InputError, match=part) as caught:
        open_inputs([name])
    assert name in str(caught.value)
    assert caught.value.exit_code == 4


def test_no_paths_and_repeated_stdin_are_refused() -> None:
    for paths, part in (([], "No input"), (["-", "-"], "twice")):
        with pytest.raises(InputError, match=part):
            open_inputs(paths)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_refused() -> None:
    Path("secret.jsonl").write_bytes(b"{}\n")
    Path("secret.jsonl").chmod(0)
    with pytest.raises(InputError, match="permissions"):
        open_inputs(["secret.jsonl"])


def test_a_file_that_changes_or_is_removed_before_reading_is_an_input_error() -> None:
    path = Path("a.jsonl")
    path.write_bytes(lines({"n": 0}))
    inputs = open_inputs(["a.jsonl"])
    path.write_bytes(lines({"n": 0}, {"n": 1}))
    with pytest.raises(InputError, match="changed"):
        [*inputs.rows()]
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        [*inputs.rows()]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_standard_input_is_spooled_and_hashed(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack(lines({"n": 0}, {"n": 1}))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    inputs = open_inputs(["-"])
    first = [*inputs.rows()]
    assert [row.value for row in first] == [{"n": 0}, {"n": 1}]
    assert [*inputs.rows()] == first
    assert first[0].source == "standard input"
    assert (inputs.files[0].size, inputs.files[0].sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_parquet_on_standard_input_is_known_by_its_first_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO()
    pq.write_table(pa.table({"n": [*range(3000)]}), stream, row_group_size=1000)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stream.getvalue())))
    inputs = open_inputs(["-"])
    assert [row.value for row in inputs.rows()] == [{"n": n} for n in range(3000)]
    assert [row.value for row in inputs.rows_at([2999])] == [{"n": 2999}]


def test_a_named_pipe_is_spooled() -> None:
    os.mkfifo("pipe")
    writer = threading.Thread(target=Path("pipe").write_bytes, args=(lines({"n": 1}) * 3,))
    writer.start()
    inputs = open_inputs(["pipe"])
    writer.join()
    assert inputs.count() == 3
    assert [row.value for row in inputs.rows()] == [{"n": 1}] * 3


def test_the_named_format_counts_whatever_the_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    array, csv = b'[{"n": 0}, {"n": 1}]', b"text\nfirst\nsecond\n"
    Path("rows").write_bytes(gzip.compress(array))
    Path("rows.txt").write_bytes(csv)
    pq.write_table(pa.table({"n": [0, 1]}), "rows.bin")
    for name, key in (("rows", "json"), ("rows", "jsonl"), ("rows.bin", "parquet")):
        assert [row.value for row in open_found(find_inputs([name], (), key)).rows()] == [{"n": 0}, {"n": 1}]
    assert [row.value for row in open_found(find_inputs(["rows.txt"], (), "csv")).rows()] == [
        {"text": "first"},
        {"text": "second"},
    ]
    for key, expected in (("csv", [{"text": "first"}, {"text": "second"}]), ("txt", 3), ("jsonl", 3)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(zstandard.compress(csv))))
        found = [row.value for row in open_found(find_inputs(["-"], (), key)).rows()]
        assert found == expected or len(found) == expected
    with pytest.raises(InputError, match=r"rows\.txt is not a Parquet file"):
        find_inputs(["rows.txt"], (), "parquet")


@pytest.mark.parametrize("key", BY_KEY)
def test_every_format_is_a_choice_of_the_option(key: str) -> None:
    assert set(BY_NAME["input_format"].choices) == {"auto", *BY_KEY}
    assert BY_KEY[key].key == key


def parquet(name: str, **columns: list[Any]) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), name)


class TestFolders:
    def test_the_files_of_a_folder_sorted_without_hidden_ones(self) -> None:
        for name in ("d/b.parquet", "d/a/z.parquet", "d/_tmp/x.parquet", "d/.git/y.parquet", "d/_metadata.parquet"):
            parquet(name, n=[name])
        for name in ("d/_SUCCESS", "d/.b.parquet.crc", "d/README.md", "d/LICENSE"):
            Path(name).write_text("x")
        Path("d/loop").symlink_to("..", target_is_directory=True)
        found = open_inputs(["d"])
        assert [file.path for file in found.files] == ["d/a/z.parquet", "d/b.parquet"]
        assert [row.value for row in open_inputs(["d/"]).rows()] == [row.value for row in found.rows()]
        reserved = ReservedPaths(Path("d/b.parquet"))
        assert [file.path for file in open_inputs(["d"], reserved).files] == ["d/a/z.parquet"]

    def test_folders_named_key_value_are_carried_and_never_fields(self) -> None:
        parquet("h/lang=de/id=5/a.parquet", text=["x"])
        parquet("h/lang=a%20%C3%BC%2Fb/id=6/b.parquet", text=["y"])
        parquet("h/lang=__HIVE_DEFAULT_PARTITION__/c.parquet", text=["z"])
        rows = [*open_inputs(["h"]).rows()]
        assert {(row.value["text"], *row.displaced.items()) for row in rows if row.value} == {
            ("x", ("lang", "de"), ("id", "5")),
            ("y", ("lang", "a ü/b"), ("id", "6")),
            ("z",),
        }
        for pattern in ("h/*/*/*.parquet", "h/lang=de/id=5/a.parquet"):
            assert next(iter(open_inputs([pattern]).rows())).displaced.keys() == {"lang", "id"}

    def test_a_column_of_the_name_of_a_folder_must_agree(self) -> None:
        parquet("h/year=2024/a.parquet", text=["x", "y", "z"], year=[2024, 2023, None])
        rows = [*open_inputs(["h"]).rows()]
        assert (rows[0].value, rows[0].displaced) == ({"text": "x", "year": 2024}, {})
        assert rows[1].error is not None
        assert "the row has 'year', and its folder year=2024 another value" in rows[1].error.message
        assert (rows[2].value, rows[2].displaced) == ({"text": "z"}, {"year": "2024"})

    def test_the_source_of_a_row_is_carried(self) -> None:
        Path("a.jsonl").write_bytes(b"\n" + lines({"text": "x", "q": "why", "uid": 1}) + b"broken\n")
        Path("b.jsonl").write_bytes(lines({"text": "x", "source_file": "mine"}))
        inputs = open_found(find_inputs(["a.jsonl", "b.jsonl"]), include_source=True)
        first, broken, twice = inputs.rows(NamedColumns("q", "uid"))
        assert first.value == {"text": "why", "id": 1}
        assert first.displaced == {"text": "x", "source_file": "a.jsonl", "source_line": 2}
        assert broken.displaced == {"source_file": "a.jsonl", "source_line": 3}
        assert twice.error is not None
        assert "field 'source_file', which --include-source adds" in twice.error.message

    REFUSED = (
        (("a.parquet", "b.jsonl"), "auto", "d holds files of several formats (JSON lines, Parquet)"),
        (("a.parquet", "b.xlsx"), "auto", "d/b.xlsx is of an unknown kind"),
        (("b.jsonl",), "parquet", "d is a folder that holds no Parquet files"),
        ((), "auto", "d is a folder that holds no input files"),
        (("_a.jsonl",), "auto", "d is a folder that holds no input files"),
    )

    @pytest.mark.parametrize(("names", "key", "problem"), REFUSED)
    def test_other_folders_are_refused(self, names: tuple[str, ...], key: str, problem: str) -> None:
        Path("d").mkdir()
        for name in names:
            Path("d", name).write_bytes(b"")
        with pytest.raises(InputError, match=re.escape(problem)):
            find_inputs(["d"], (), key)

    def test_a_named_format_chooses_among_the_files_of_a_folder(self) -> None:
        parquet("d/a.parquet", n=[1])
        Path("d/b.jsonl.gz").write_bytes(gzip.compress(lines({"n": 2})))
        assert [row.value for row in open_found(find_inputs(["d"], (), "jsonl")).rows()] == [{"n": 2}]


@pytest.mark.parametrize(
    "path", ["ftp://x.org/a.jsonl", "abfss://x/a.jsonl", "http://x.org/a.parquet", "file:///a.csv"]
)
def test_paths_with_a_scheme_are_not_names_of_local_files(path: str) -> None:
    with pytest.raises(UsageError, match=r"local path|without it"):
        find_inputs(["a.jsonl", path])


OWN = ["data/all.parquet", "data/all.hidden.parquet", "data/all.parquet.work/parts/part-000000.parquet"]
OF_SHARDS = ["data/all/part-00001-of-00002.parquet", "data/all.hidden.parquet/part-00000-of-00002.parquet"]


@pytest.mark.parametrize(("out", "shards", "mine"), [("data/all.parquet", None, OWN), ("data/all", 2, OF_SHARDS)])
def test_globs_leave_out_reserved_files_and_naming_them_is_refused(
    out: str, shards: int | None, mine: list[str]
) -> None:
    others = ["data/a.parquet", "data/all.parquet.work.parquet", "data/all/part-00001-of-00003.parquet"]
    for name in [*others, *mine]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": [1]}), name)
    Path("link").symlink_to("data")
    reserved = ReservedPaths(Path(out), shards)
    for pattern in ("data/**/*.parquet", "link/**/*.parquet", f"{Path.cwd()}/data/**/*.parquet"):
        found = [str(Path(file.path).resolve()) for file in open_inputs([pattern], reserved).files]
        assert found == [str(Path(name).resolve()) for name in others]
    for name in mine:
        for spelled in (name, f"./{name}", str(Path(name).resolve()), name.replace("data", "link", 1)):
            with pytest.raises(UsageError, match="is a file of the job's own output; name another input"):
                open_inputs([spelled], reserved)
    with pytest.raises(InputError, match="no file matches but the job's own output"):
        open_inputs(["data/a*/*1-of-00002.parquet" if shards else "data/a*l.parquet"], reserved)
    assert [file.path for file in open_inputs([mine[0]]).files] == mine[:1], "for another job it is an ordinary input"


REPORT = json.dumps({"output": "o", "rows": 1, "rows_ok": 1, "rows_error": 0, "fingerprint": "f"}, indent=2)


@pytest.mark.parametrize(
    ("content", "earlier"),
    [
        ("", True),
        ('{"event":"token","id":"a","row_in', True),
        ('{"event":"finish","id":"a"}\n{"event":"token"}\n', True),
        (REPORT, True),
        ('{"text": "a prompt"}\n', False),
        ('{"text": "a prompt"}\n{"text": "another"}\n', False),
        ('["rows"]', False),
        ("not JSON", False),
    ],
)
def test_globs_leave_out_events_and_reports_of_an_earlier_run(content: str, earlier: bool) -> None:
    """Files with other content under these names are inputs and are never overwritten."""
    Path("a.jsonl").write_text('{"text": "a"}\n')
    Path("b.jsonl").write_text(content)
    os.mkfifo("c.jsonl")
    reserved = ReservedPaths(Path("out.parquet"), None, ["./b.jsonl", "c.jsonl", "none.jsonl"])
    assert ("b.jsonl" in reserved, "a.jsonl" in reserved, "c.jsonl" in reserved) == (earlier, False, False)
    found = [file.path for file in open_inputs(["[ab].jsonl"], reserved).files]
    assert found == (["a.jsonl"] if earlier else ["a.jsonl", "b.jsonl"])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst", "a.parquet"])
def test_the_error_row_of_a_damaged_file_belongs_to_one_shard_and_window(name: str) -> None:
    if name == "a.parquet":
        pq.write_table(pa.table({"n": [*range(9)]}), name)
        Path(name).write_bytes(Path(name).read_bytes()[:-12])
    else:
        pack = gzip.compress if name.endswith(".gz") else zstandard.compress
        Path(name).write_bytes(pack(lines(*({"n": i} for i in range(9))))[:-3])
    Path("b.jsonl").write_bytes(lines({"n": 99}))
    inputs = open_inputs([name, "b.jsonl"])
    rows = [*inputs.rows()]
    damaged = rows[-2].index
    assert rows[-2].error is not None
    assert rows[-2].error.code == ErrorCode.TRUNCATED_INPUT
    assert rows[-1].value == {"n": 99}
    for count in (2, 3):
        shards = [[*inputs.rows(selection=Selection(shard=(i, count)))] for i in range(count)]
        assert sorted(row.index for shard in shards for row in shard) == [row.index for row in rows]
        assert all(row.index % count == i for i, shard in enumerate(shards) for row in shard)
    assert [row.index for row in inputs.rows(selection=Selection(offset=damaged + 1))] == [damaged + 1]
    assert len([*inputs.rows(selection=Selection(sample=1))]) == 1
    assert [row.index for row in inputs.rows_at([damaged + 1])] == [damaged + 1]
    assert [row.index for row in inputs.rows_at([damaged])] == [damaged]


class TestNamedColumns:
    def test_a_named_prompt_column_becomes_text_and_displaces_prompt_fields(self) -> None:
        Path("a.jsonl").write_bytes(lines({"q": "why", "text": "a passage", "prompt": "p", "id": "x"}, {"text": "t"}))
        row, without = open_inputs(["a.jsonl"]).rows(NamedColumns(prompt="q"))
        assert (row.value, row.displaced) == ({"text": "why", "id": "x"}, {"text": "a passage", "prompt": "p"})
        assert (without.value, without.displaced) == ({}, {"text": "t"})

    def test_a_named_prompt_column_with_objects_becomes_messages(self) -> None:
        chat = [{"role": "user", "content": "hi"}]
        Path("a.jsonl").write_bytes(lines({"chat": chat}, {"chat": ["a", "b"]}))
        assert values("a.jsonl", prompt_column="chat") == [{"messages": chat}, {"text": ["a", "b"]}]

    def test_a_named_prompt_column_with_the_json_text_of_a_conversation_becomes_messages(self) -> None:
        chat = [{"role": "user", "content": "hi"}]
        texts = [json.dumps(chat), " " + json.dumps(chat), "[1]", "[not JSON", '["role"]', '{"role": "user"}']
        expected = [{"messages": chat}] * 2 + [{"text": text} for text in texts[2:]]
        pq.write_table(pa.table({"messages": texts, "prompt": [texts[0]] * 6}), "a.parquet")
        Path("a.jsonl").write_bytes(lines(*({"messages": text} for text in texts)))
        for name in ("a.parquet", "a.jsonl"):
            assert values(name, prompt_column="messages") == expected
        assert values("a.parquet", prompt_column="prompt")[0] == {"messages": chat}

    def test_a_conversation_in_text_is_refused_whichever_id_column_is_named(self) -> None:
        chat = json.dumps([{"role": "user", "content": "a"}])
        parquet("c.parquet", uid=["1"], text=[chat], q=["why"])
        Path("c.csv").write_text("uid,text,q\n1," + '"' + chat.replace('"', '""') + '",why\n')
        for name in ("c.parquet", "c.csv"):
            for id_column in (None, "uid"):
                (row,) = open_inputs([name]).rows(NamedColumns(id=id_column))
                assert row.error is not None
                assert "--prompt-column text" in row.error.message
            (row,) = open_inputs([name]).rows(NamedColumns("q", "uid"))
            assert (row.value, row.displaced) == ({"text": "why", "id": "1"}, {"text": chat})

    def test_a_named_id_column_becomes_the_id(self) -> None:
        Path("a.jsonl").write_bytes(lines({"k": 7, "id": "old", "text": "t"}, {"k": "b", "text": "t"}, {"k": True}))
        rows = [*open_inputs(["a.jsonl"]).rows(NamedColumns(id="k"))]
        assert [row.value for row in rows] == [{"text": "t", "id": 7}, {"text": "t", "id": "b"}, {"id": True}]
        assert rows[0].displaced == {"id": "old"}

    def test_naming_the_default_columns_changes_nothing(self) -> None:
        Path("a.jsonl").write_bytes(lines({"id": "i", "text": "t"}))
        (row,) = open_inputs(["a.jsonl"]).rows(NamedColumns("text", "id"))
        assert row.value == {"id": "i", "text": "t"}
        assert row.displaced == {}

    def test_a_parquet_file_without_the_column_is_refused_at_once(self) -> None:
        pq.write_table(pa.table({"q": ["a"]}), "a.parquet")
        assert values("a.parquet", prompt_column="q") == [{"text": "a"}]
        with pytest.raises(UsageError, match="no column 'question'; it has `q`"):
            open_inputs(["a.parquet"]).rows(NamedColumns(prompt="question"))

    def test_text_files_have_no_columns(self) -> None:
        Path("a.txt").write_bytes(b"x\n")
        with pytest.raises(UsageError, match="no columns"):
            open_inputs(["a.txt"]).rows(NamedColumns(id="q"))


class TestSelection:
    @pytest.fixture(autouse=True)
    def _files(self) -> None:
        Path("a.jsonl").write_bytes(lines(*({"n": i} for i in range(60))))
        pq.write_table(pa.table({"n": [*range(60, 100)]}), "b.parquet", row_group_size=7)

    def chosen(self, **options: Any) -> list[int]:
        rows = [*open_inputs(["a.jsonl", "b.parquet"]).rows(selection=Selection(**options))]
        assert [row.value for row in rows] == [{"n": row.index} for row in rows]
        return [row.index for row in rows]

    def test_offset_and_limit(self) -> None:
        assert self.chosen(offset=58, limit=5) == [58, 59, 60, 61, 62]
        assert self.chosen(offset=98, limit=5) == [98, 99]
        assert self.chosen(limit=0) == []
        assert self.chosen(offset=1000) == []

    def test_sample_is_reproducible_and_nested(self) -> None:
        first = self.chosen(sample=10)
        assert len(first) == 10
        assert first == sorted(set(first)) == self.chosen(sample=10)
        assert first != self.chosen(sample=10, sample_seed=1)
        assert set(first) < set(self.chosen(sample=11)), "a larger sample contains the smaller"
        assert self.chosen(sample=1000) == [*range(100)]
        assert all(20 <= i < 50 for i in self.chosen(sample=10, offset=20, limit=30))
        assert self.chosen(sample=0) == []

    def test_shards_partition_the_sample(self) -> None:
        shards = [self.chosen(sample=30, shard=(i, 3)) for i in range(3)]
        assert sorted(itertools.chain(*shards)) == self.chosen(sample=30)

    def test_samples_are_uniform(self) -> None:
        counts = [0] * 100
        for seed in range(200):
            keep = Selection(sample=20, sample_seed=seed).row_filter(lambda: 100)
            assert keep is not None
            for i in filter(keep, range(100)):
                counts[i] += 1
        assert min(counts) > 15
        assert max(counts) < 70

    @pytest.mark.parametrize(
        "options",
        [{"offset": -1}, {"limit": -1}, {"sample": -1}, {"shard": (3, 3)}, {"shard": (-1, 3)}, {"shard": (0, 0)}],
    )
    def test_values_out_of_range_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError):
            Selection(**options)

    @given(
        offset=st.integers(0, 120),
        limit=st.none() | st.integers(0, 120),
        shard=st.none() | st.tuples(st.integers(0, 4), st.just(5)),
    )
    def test_selection_equals_slicing(self, offset: int, limit: int | None, shard: tuple[int, int] | None) -> None:
        keep = Selection(offset, limit, shard=shard).row_filter(lambda: 100)
        window = range(100)[offset : None if limit is None else offset + limit]
        expected = [i for i in window if shard is None or i % shard[1] == shard[0]]
        assert [i for i in range(100) if keep is None or keep(i)] == expected
