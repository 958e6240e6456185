"""Inputs at URLs are the rows of local ones; folders that `datasets.save_to_disk` has written."""

from __future__ import annotations

import errno
import gzip
import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchgen.data.read.input_files import find_inputs
from batchgen.data.read.input_set import InputSet, open_inputs
from batchgen.errors import InputError
from tests.cases import each
from tests.data.remote.bucket import Bucket, use
from tests.tables.arrow_types import CASES, column

ROWS = [{"id": str(i), "text": f"Say {i}", "n": i % 3 + 1} for i in range(50)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return use(monkeypatch)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def opened(*names: str, **options: Any) -> InputSet:
    return open_inputs(find_inputs(names), **options)


def values(*names: str) -> list[Any]:
    return [row.value if row.error is None else row.error.code for row in opened(*names).rows()]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.csv", "a.arrow"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_rows_of_every_format(bucket: Bucket, name: str, scheme: str, tmp_path: Path) -> None:
    path = tmp_path / name
    table = pa.Table.from_pylist(ROWS)
    if name == "a.parquet":
        pq.write_table(table, path, row_group_size=7)
    elif name == "a.arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    elif name == "a.csv":
        path.write_text("id,text,n\n" + "".join(f"{r['id']},{r['text']},{r['n']}\n" for r in ROWS))
    else:
        pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(path.suffix[1:], bytes)
        path.write_bytes(pack(LINES))
    bucket.objects[f"b/in/{name}"] = path.read_bytes()
    assert values(f"{scheme}://b/in/{name}") == values(name)
    assert len(values(name)) == 50
    inputs = opened(f"{scheme}://b/in/{name}")
    assert inputs.count() == 50
    (file,) = inputs.files
    assert file.record() == {
        "path": f"{scheme}://b/in/{name}",
        "size": path.stat().st_size,
        "etag": bucket._etag(f"b/in/{name}"),
    }
    assert file.content == f"ETag {bucket._etag(f'b/in/{name}')}"


def test_folders_patterns_and_partitions(bucket: Bucket) -> None:
    for name in ("k=1/b.jsonl", "k=1/a.jsonl", "k=2/a.jsonl"):
        bucket.objects[f"b/in/{name}"] = json.dumps({"text": name}).encode()
    bucket.objects |= {"b/in/_SUCCESS": b"", "b/in/.hidden/x.jsonl": b"{}", "b/in/README.md": b"#", "b/index": b""}
    expected = [f"s3://b/in/{name}" for name in ("k=1/a.jsonl", "k=1/b.jsonl", "k=2/a.jsonl")]
    for name in ("s3://b/in", "s3://b/in/", "S3://b/in/k=*/*.jsonl", "s3://b/in/**/[ab].jsonl"):
        inputs = opened(name)
        assert [file.path for file in inputs.files] == expected
        assert [row.displaced["k"] for row in inputs.rows()] == ["1", "1", "2"]
    assert [row.displaced["source_file"] for row in opened("s3://b/in", include_source=True).rows()] == expected


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("s3://b/none.jsonl", "s3://b/none.jsonl cannot be read (there is no such file; check the name)."),
        ("s3://b/none*.jsonl", "s3://b/none*.jsonl: no file matches."),
        ("s3://b/a.odd", "s3://b/a.odd: unknown kind of file"),
        ("s3://b/a.parquet", "s3://b/a.parquet is not a Parquet file."),
        ("s3://b/a.jsonl.gz", "is named as a gzip file, but it is not"),
    ],
)
def test_problems_are_found_before_any_work(bucket: Bucket, name: str, problem: str) -> None:
    bucket.objects |= {"b/a.odd": b"x", "b/a.parquet": b"x", "b/a.jsonl.gz": LINES}
    with pytest.raises(InputError) as caught:
        opened(name)
    assert problem in str(caught.value)


def test_a_file_that_changes_is_noticed(bucket: Bucket) -> None:
    bucket.objects["b/a.jsonl"] = LINES
    rows = opened("s3://b/a.jsonl").rows()
    next(rows)
    bucket.objects["b/a.jsonl"] = LINES.replace(b"Say", b"Ask")
    with pytest.raises(InputError, match=r"s3://b/a\.jsonl changed while it was read"):
        list(rows)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_network_error_is_not_damage(bucket: Bucket, name: str, tmp_path: Path) -> None:
    random = Random(3)
    table = pa.table({"text": [random.randbytes(100).hex() for _ in range(9000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    (tmp_path / "a.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist()))
    bucket.objects[f"b/{name}"] = (tmp_path / name).read_bytes()
    rows = opened(f"s3://b/{name}").rows()
    next(rows)

    def fail(operation: str, path: str) -> None:
        raise PermissionError("ExpiredToken")

    bucket.before = fail
    with pytest.raises(InputError, match=r"credentials have expired; renew them"):
        list(rows)


@pytest.mark.parametrize("folder", ["saved", "s3://b/saved"])
def test_a_folder_of_save_to_disk(bucket: Bucket, folder: str, tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{**row, "tags": ["a", row["text"]]} for row in ROWS])
    data.save_to_disk("saved", num_shards=3)
    (tmp_path / "saved" / "cache-1.arrow").write_bytes(b"of another step")
    splits = datasets.DatasetDict({"train": data, "test": data.select(range(5))})
    splits.save_to_disk("splits")
    for path in (path for top in ("saved", "splits") for path in (tmp_path / top).rglob("*") if path.is_file()):
        bucket.objects[f"b/{path.relative_to(tmp_path)}"] = path.read_bytes()
    assert values(folder) == [{**row, "tags": ["a", row["text"]]} for row in ROWS]
    assert values(folder.replace("saved", "splits/test")) == values(folder)[:5]
    with pytest.raises(InputError, match=r"splits train, test of a dataset. Name one: .*splits/train"):
        opened(folder.replace("saved", "splits"))


def test_arrow_files_of_both_formats(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    with pa.ipc.new_file(tmp_path / "b.arrow", table.schema) as writer:
        writer.write_table(table)
    assert values("a.arrow") == values("b.arrow") == ROWS
    whole = (tmp_path / "a.arrow").read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 200):
        (tmp_path / "cut.arrow").write_bytes(whole[:size])
        *rows, last = values("cut.arrow")
        assert rows == ROWS[: len(rows)]
        assert last == "truncated_input"
    random = Random(0)
    for _ in range(100):
        hurt = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            hurt[random.randrange(len(hurt))] = random.randrange(256)
        (tmp_path / "hurt.arrow").write_bytes(hurt)
        with suppress(InputError):
            values("hurt.arrow")
    assert [row.index for row in opened("a.arrow").rows_at([3, 21])] == [3, 21]


@each("name", CASES)
def test_values_of_every_arrow_type(name: str) -> None:
    array, expected = column(name, 5)
    table = pa.table({"text": ["x"] * len(array), "c": array})
    with pa.ipc.new_stream("types.arrow", table.schema) as writer:
        writer.write_table(table)
    assert [row.get("c", None) for row in values("types.arrow")] == expected


def test_names_of_arrow_columns_are_checked(tmp_path: Path) -> None:
    for names, problem in ((["text", "text"], "two columns are named 'text'"), (["text", "c"], "is not UTF-8")):
        table = pa.table([pa.array(["x"])] * 2, names=names)
        with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
        (tmp_path / "a.arrow").write_bytes((tmp_path / "a.arrow").read_bytes().replace(b"c\0\0\0", b"\xff\0\0\0"))
        with pytest.raises(InputError, match=problem):
            opened("a.arrow")


def test_a_failing_disk_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    inputs = opened("a.parquet")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    with pytest.raises(InputError, match=r"a\.parquet cannot be read \(Input/output error\)"):
        list(inputs.rows())
