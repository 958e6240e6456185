"""Reading results: finished files, shards and unfinished work, filtered without loading them."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.out import merge_sort
from batchgen.data.out.export import write_jsonl
from batchgen.data.out.finish import finish
from batchgen.data.out.view import open_results
from batchgen.data.read.parquet import parquet_rows
from batchgen.data.schema import OutputRow, completions_to_table, with_footer
from batchgen.data.store.work_folder import RunIdentity, output_paths
from batchgen.errors import InputError, UsageError
from batchgen.job.results.show import show_row
from tests.data.helpers import begin, commit, expect, failed, group


def groups() -> list[list[OutputRow]]:
    return [[failed(row)] if row % 5 == 2 else group(row, samples=2) for row in (7, 3, 2, 0, 1, 6, 4, 5)]


def write(out: Path, end: bool) -> None:
    with begin(out) as work:
        commit(work, groups())
        if end:
            finish(work, expect((row, 0, 2) for row in range(8)), {"model": "m"})


def test_a_finished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_sort, "ROW_GROUP_ROWS", 4)
    out = tmp_path / "r.parquet"
    write(out, end=True)
    results = open_results(out)
    assert results.complete
    assert results.footer is not None
    assert results.footer["model"] == "m"
    assert len(results) == 14
    assert [row["row_index"] for row in results.rows()] == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7]
    assert [(row["row_index"], row["sample_index"]) for row in results.rows(row=3)] == [(3, 0), (3, 1)]
    assert [row["row_index"] for row in results.rows(errors=True)] == [2, 7]
    assert [row["row_index"] for row in results.rows(row=7, errors=True)] == [7]
    assert [*results.rows(row=99)] == []
    assert next(results.rows(columns=["text", "id"])) == {"id": "id-0", "text": "text of 0.0.0 \u2028 é"}


def test_unfinished_work_in_order_of_completion(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    write(out, end=False)
    work = tmp_path / "r.parquet.work"
    (work / "parts" / "part-000099.parquet").write_bytes(b"just being written")
    results = open_results(out)
    assert not results.complete
    assert results.footer is None
    assert len(results) == 14
    assert next(results.rows())["row_index"] == 7
    assert [row["row_index"] for row in results.rows(errors=True)] == [7, 2]
    assert [row["sample_index"] for row in results.rows(row=4)] == [0, 1]
    assert [*open_results(work).rows()] == [*results.rows()]
    assert (work / "parts" / "part-000099.parquet").exists(), "reading changes nothing"


def rows_of(out: Path, **which: bool) -> list[int]:
    return [row["row_index"] for row in open_results(out, **which).rows()]


def test_newer_work_is_opened_instead_of_a_finished_file(tmp_path: Path) -> None:
    """A run that replaces the output and stopped because of errors points the user to `show`."""
    out = tmp_path / "r.parquet"
    write(out, end=True)
    with begin(out, RunIdentity("beef"), "overwrite") as work:
        commit(work, [[failed(70)], [failed(71)]])
    results = open_results(out)
    assert (results.complete, len(results)) == (False, 2)
    assert results.note == "newer, unfinished work is shown; --finished shows the finished file"
    assert rows_of(out) == [70, 71]
    finished = open_results(out, finished=True)
    assert (finished.complete, finished.note, len(finished)) == (True, None, 14)


def test_newer_work_is_known_whatever_the_clock_says(tmp_path: Path) -> None:
    """Its parts say what they will replace."""
    out = tmp_path / "r.parquet"
    write(out, end=True)
    with begin(out, RunIdentity("beef"), "overwrite") as work:
        commit(work, [[failed(70)]])
        for part in work.part_files():
            os.utime(part, (0, 0))
    assert rows_of(out) == [70]
    os.utime(out, (0, 0))
    moved = shutil.copytree(tmp_path, tmp_path / "moved")
    (moved / "r.parquet.work" / "run.json").write_bytes(b"damaged")
    assert rows_of(moved / "r.parquet") == [70]


def test_work_older_than_its_output_is_not_opened(tmp_path: Path) -> None:
    """A run may be killed after it has written its output and before it has removed its work folder."""
    out = tmp_path / "r.parquet"
    write(out, end=False)
    part = min((tmp_path / "r.parquet.work" / "parts").iterdir())
    kept = part.read_bytes()
    with begin(out) as work:
        finish(work, expect((row, 0, 2) for row in range(8)), {})
    part.parent.mkdir(parents=True)
    part.write_bytes(kept)
    os.utime(part, (0, 0))
    assert open_results(out).complete


def shard(out: Path, index: int, count: int = 2, end: bool = True, job: str = "f") -> Path:
    """Write a shard, finished or not, whose only row failed."""
    identity = RunIdentity(job, (index, count))
    with begin(out, identity, "overwrite") as work:
        if not work.part_files():
            commit(work, [[failed(index + (0 if job == "f" else 50))]])
        if end:
            finish(work, expect([(index, 0, 1)]), {})
    return output_paths(out, identity.shard).result


def test_a_folder_of_shards_is_complete_when_all_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    shard(out, 1)
    results = open_results(out)
    assert (results.complete, results.note) == (False, "1 of 2 shards are finished")
    stopped = shard(out, 0, end=False)
    assert not open_results(out).complete
    assert rows_of(out) == [0, 1], "finished rows of one shard, committed rows of the other"
    assert (rows_of(out, finished=True), rows_of(stopped)) == ([1], [0])
    with pytest.raises(InputError, match="not finished"):
        open_results(stopped, finished=True)
    shard(out, 0)
    assert open_results(out).complete
    shard(out, 1, end=False, job="other")
    results = open_results(out)
    assert (results.complete, rows_of(out), rows_of(out, finished=True)) == (False, [0, 51], [0, 1])
    assert results.note == (
        "1 of 2 shards are finished, 1 being computed again: unfinished work is shown; "
        "--finished shows the finished files"
    )
    monkeypatch.chdir(out)
    assert rows_of(Path()) == rows_of(Path("../out/.")) == [0, 51]
    assert rows_of(Path("part-00001-of-00002.parquet")) == [51]


def test_a_folder_without_results_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (".", "..", "/", str(tmp_path)):
        with pytest.raises(UsageError, match="is a folder without results"):
            open_results(Path(folder))


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        open_results(tmp_path / "r.parquet")
    (tmp_path / "r.parquet").write_bytes(b"x")
    with pytest.raises(InputError, match="not a batchgen output"):
        open_results(tmp_path / "r.parquet")


MOMENTS = {
    "day": (pa.date32(), 19782, "2024-02-29"),
    "milli": (pa.timestamp("ms"), 1709208001250, "2024-02-29 12:00:01.250"),
    "nano": (pa.timestamp("ns", "UTC"), 1709208001000000250, "2024-02-29 12:00:01.000000250Z"),
}


def test_carried_dates_are_strings_with_full_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The strings are equal in every command, and equal to those in `extra`."""
    table = completions_to_table([failed(0)])
    source = pa.table({name: pa.array([value], kind) for name, (kind, value, _) in MOMENTS.items()})
    for name in source.schema.names:
        table = table.append_column(source.schema.field(name), source[name])
    out, read = tmp_path / "r.parquet", io.BytesIO()
    pq.write_table(table.cast(with_footer({}, table.schema)), out)
    pq.write_table(source, read)
    expected = {name: text for name, (_, _, text) in MOMENTS.items()}
    (row,) = [row.value for row in parquet_rows(read, "in") if row is not None]
    assert row == expected
    lines = io.BytesIO()
    write_jsonl(open_results(out), lines)
    show_row(out, 0)
    for line in (lines.getvalue(), capsys.readouterr().out):
        assert {name: json.loads(line)[name] for name in expected} == expected


def test_a_damaged_file_is_an_input_error(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    write(out, end=True)
    data = bytearray(out.read_bytes())
    data[4:40] = bytes(36)
    out.write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"r\.parquet is damaged"):
        [*open_results(out).rows()]
