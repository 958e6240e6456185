"""`verify --file`: intact files of every kind, and each way in which one is not what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.out.file_check import check_files, verify_files
from batchgen.data.out.finish import finish
from batchgen.data.results_file import open_parquet, parquet_writer
from batchgen.data.row_shapes import RowShapes
from batchgen.data.store.work_folder import RunIdentity, WorkFolder
from batchgen.errors import InputError
from batchgen.request.completion import StateBlock
from tests.data.helpers import begin, commit, expect, failed, group

ROWS = 6


def finished(out: Path, identity: RunIdentity | None = None, end: bool = True, states: bool = True) -> Path:
    """An output of rows with two samples, hidden states and a failed row."""
    with begin(out, identity or RunIdentity("f00d")) as work:
        block = StateBlock(-1, "last", 0, np.ones((2, 4), np.float32), "float32") if states else None
        rows = [[failed(row)] if row == 3 else group(row, samples=2) for row in range(ROWS)]
        with_states = [
            [replace(each, completion=replace(each.completion, states=(block,))) if block else each for each in its]
            for its in rows
        ]
        commit(work, with_states)
        if end:
            close(work)
        return work.paths.result if end else out


def close(work: WorkFolder) -> None:
    shapes = RowShapes()
    for row in range(ROWS):
        shapes.add(row)
    record = {"row_shapes": shapes.encode(), "input_rows": ROWS, "rows_skipped": 0, "created": 5}
    finish(work, expect((row, 0, 2) for row in range(ROWS)), record)


def problems(out: Path) -> list[str]:
    return [problem for finding in check_files(out) for problem in finding.problems]


def test_intact_files_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = finished(tmp_path / "r.parquet")
    for shard in range(2):
        finished(tmp_path / "shards", RunIdentity("f", (shard, 2)))
    open_work = finished(tmp_path / "open.parquet", end=False)
    places = {
        out: 2,
        tmp_path / "r.hidden.parquet": 1,
        tmp_path / "shards": 4,
        open_work: 3,
        tmp_path / "open.parquet.work": 3,
    }
    for path, files in places.items():
        assert verify_files(path)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == files, lines
        assert all(": intact, " in line for line in lines)
    assert verify_files(out)
    assert capsys.readouterr().out.splitlines()[0] == f"{out}: intact, 11 rows, 1 errors"


def test_files_that_are_not_outputs_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "photo.parquet").write_bytes(b"not one")
    for path, message in (
        (tmp_path, "without results"),
        (tmp_path / "no", "does not exist"),
        (tmp_path / "photo.parquet", "not a batchgen output"),
    ):
        with pytest.raises(InputError, match=message):
            verify_files(path)


def rewritten(out: Path, change: Callable[[pa.Table], pa.Table], **record: Any) -> None:
    """The output with other rows or counts, and right checksums."""
    table = pq.read_table(out)
    metadata = dict(table.schema.metadata)
    run = orjson.loads(metadata[b"batchgen.run"]) | record
    metadata[b"batchgen.run"] = orjson.dumps(run)
    table = change(table).replace_schema_metadata(metadata)
    with out.open("wb") as stream, parquet_writer(stream, table.schema) as writer:
        writer.write_table(table)


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))


def without_errors(table: pa.Table) -> pa.Table:
    return with_column(table, "error", [None] * len(table))


def without_an_id(table: pa.Table) -> pa.Table:
    return with_column(table, "id", [None, *table["id"].to_pylist()[1:]])


SAME: Callable[[pa.Table], pa.Table] = lambda table: table  # noqa: E731
WRONG: list[tuple[Callable[[pa.Table], pa.Table], dict[str, Any], str]] = [
    (lambda table: table.take([1, 0, *range(2, len(table))]), {}, "its rows are not in order"),
    (lambda table: table.take([0, 0, *range(2, len(table))]), {}, "its rows are not in order"),
    (lambda table: table.take([1, *range(2, len(table))]), {}, "a sample is missing"),
    (lambda table: table.slice(0, 9), {}, "it has 9 rows, and its footer says 11"),
    (lambda table: table.slice(0, 9), {"rows": 9}, "it has results of 5 input rows, and there were 6"),
    (SAME, {"row_shapes": RowShapes().encode()}, "its footer describes another number of input rows"),
    (without_errors, {}, "an error without the status, or the status without an error"),
    (without_an_id, {}, "1 rows have no id"),
    (lambda table: table.drop_columns(["status"]), {}, "wrong columns: status"),
    (SAME, {"states": 99}, "they are not the hidden states of the output"),
    (SAME, {"fingerprint": "other"}, "they are not the hidden states of the output"),
]


@pytest.mark.parametrize(("change", "record", "problem"), WRONG, ids=[problem for _, _, problem in WRONG])
def test_rows_that_are_not_those_of_a_whole_output(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], record: dict[str, Any], problem: str
) -> None:
    out = finished(tmp_path / "r.parquet")
    rewritten(out, SAME)
    assert problems(out) == []
    rewritten(out, change, **record)
    assert problem in "; ".join(problems(out))
    assert not verify_files(out)


def test_a_file_that_another_program_wrote_is_read_and_said_to_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = finished(tmp_path / "r.parquet", states=False)
    pq.write_table(pq.read_table(out), out)
    assert verify_files(out)
    assert "without checksums over every byte" in capsys.readouterr().out
    with open_parquet(out) as table:
        assert not table.has_checksums


@pytest.mark.parametrize("loss", ["trailer", "zeros", "table"])
@pytest.mark.parametrize(("rows", "groups"), [(0, 0), (11, 1), (3000, 3)])
def test_a_file_that_lost_its_checksums_is_damaged(tmp_path: Path, loss: str, rows: int, groups: int) -> None:
    """Without its trailer, or the whole table: not one of an earlier version, or one that another program wrote."""
    path, schema = tmp_path / "a.parquet", pa.schema({"row_index": pa.int64(), "text": pa.string()})
    values = [(f"{row} " * 9)[: row % 9] for row in range(rows)]
    table = pa.table({"row_index": [*range(rows)], "text": [value or None for value in values]}, schema)
    with path.open("wb") as stream, parquet_writer(stream, schema) as writer:
        for number in range(groups):
            size = rows // groups
            half = size // 2 + 1
            writer.write_table(table.slice(number * size, half))
            writer.write_table(table.slice(number * size + half, size - half))
    with open_parquet(path) as stored:
        assert stored.has_checksums
        footer = stored.metadata.serialized_size
    data = path.read_bytes()
    end = len(data) - footer - 8
    count = int.from_bytes(data[end - 24 : end - 20], "little")
    cut = {"trailer": (24, b""), "zeros": (24, bytes(24)), "table": (24 + 4 * count, b"")}[loss]
    path.write_bytes(data[: end - cut[0]] + cut[1] + data[end:])
    assert pq.read_table(path) == table
    with pytest.raises(InputError, match="its table of checksums is missing"), open_parquet(path):
        pass


def test_missing_and_damaged_states(tmp_path: Path) -> None:
    out = finished(tmp_path / "r.parquet")
    states = tmp_path / "r.hidden.parquet"
    data = bytearray(states.read_bytes())
    data[20] ^= 1
    states.write_bytes(bytes(data))
    assert problems(out) == ["damaged (the block at byte 0 has a wrong checksum)"]
    states.unlink()
    assert problems(out) == ["the hidden states are missing"]


def test_a_work_folder(tmp_path: Path) -> None:
    out = finished(tmp_path / "r.parquet", end=False)
    work = tmp_path / "r.parquet.work"
    first = work / "parts" / "part-000000.parquet"
    (work / "parts" / "part-000009.parquet").write_bytes(first.read_bytes())
    states = work / "states" / "part-000000.states"
    (work / "states" / "part-000009.states").write_bytes(states.read_bytes())
    assert problems(out) == ["another part holds a row of it as well"]
    states.write_bytes(b"")
    (work / "states" / "part-000009.states").unlink()
    (work / "run.json").write_bytes(b"{")
    found = problems(work)
    assert len(found) == 3
    assert found[0].startswith("damaged (")
    assert found[1:] == [
        f"part-00000{n}.states is damaged ({why})" for n, why in ((0, "it is cut short"), (9, "it is missing"))
    ]
    assert first.exists(), "nothing is moved"


def line(row: int, sample: int = 0, job: str = "f00d", **more: Any) -> bytes:
    keys = {"row_index": row, "prompt_index": 0, "sample_index": sample, "status": "ok"}
    return orjson.dumps({"id": f"id-{row}", **keys, "batchgen": {"job": job}, **more}) + b"\n"


def batch_line(row: int, body: dict[str, Any] | None = None) -> bytes:
    name = f"batch_req_{'a' * 12}{row:012x}"
    return orjson.dumps({"id": name, "custom_id": f"c{row}", "response": {"body": body or {}}}) + b"\n"


LINES: list[tuple[list[bytes], list[bytes], str]] = [
    ([line(0), line(0, 1), line(2)], [], ""),
    ([batch_line(0), batch_line(2)], [batch_line(1, {"error": {"code": "x"}})], ""),
    ([line(0), line(1)[:-9]], [], "line 2 is not a whole line"),
    ([line(0), line(1)[:-1]], [], "line 2 is not a whole line"),
    ([line(1), line(0)], [], "line 2 is not in order"),
    ([line(0), line(0)], [], "line 2 is not in order, or is there twice"),
    ([batch_line(0), batch_line(1)], [batch_line(1)], "line 1 is not in order, or is there twice"),
    ([line(0), line(1, job="beef")], [], "its lines are of several jobs"),
    ([line(0, status="error")], [], "line 1 is not a whole line"),
    ([line(0, batchgen={"job": "f00d", "states": 3})], [], "the hidden states are missing"),
]


@pytest.mark.parametrize(("lines", "errors", "problem"), LINES)
def test_json_lines_as_far_as_they_tell(tmp_path: Path, lines: list[bytes], errors: list[bytes], problem: str) -> None:
    out = tmp_path / "r.jsonl"
    out.write_bytes(b"".join(lines))
    if errors:
        (tmp_path / "r.errors.jsonl").write_bytes(b"".join(errors))
    found = "; ".join(problems(out))
    assert (problem in found) if problem else not found


def test_a_table_of_another_schema_is_not_written(tmp_path: Path) -> None:
    """Also not if Parquet stores both in one form, and the file's schema would give the rows another type."""
    schema = pa.schema({"text": pa.string()})
    with (tmp_path / "a.parquet").open("wb") as stream, parquet_writer(stream, schema) as writer:
        for other in (pa.large_string(), pa.int64()):
            with pytest.raises(ValueError, match="another schema"):
                writer.write_table(pa.table({"text": pa.array([], other)}))
        writer.write_table(pa.table({"text": ["a"]}))
    with open_parquet(tmp_path / "a.parquet") as stored:
        assert stored.read()["text"].to_pylist() == ["a"]
