"""Finishing a job: exactly the expected rows, in order, atomically, for any memory limit."""

from __future__ import annotations

import errno
import io
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.files import FileSystem
from batchgen.data.out import merge_sort as merge_sort_module
from batchgen.data.out.finish import finish
from batchgen.data.results_file import parquet_writer, read_footer
from batchgen.data.schema import SCHEMA, SCHEMA_VERSION, VERSION_KEY
from batchgen.data.store.committed import Committed
from batchgen.data.store.work_folder import WorkFolder, is_complete, output_paths
from batchgen.data.store.work_owner import open_work
from batchgen.errors import BatchgenError, OutputError, UsageError
from tests.data.helpers import IDENTITY, begin, commit, expect, failed, group, stored, stored_keys

KEYS = [(row, prompt, 1 + (row + prompt) % 3) for row in range(20) for prompt in range(1 + row % 2)]


def run(out: Path, keys: list[tuple[int, int, int]] = KEYS, every: int = 7, shuffle: int = 0, **options: Any) -> None:
    order = [*keys]
    random.Random(shuffle).shuffle(order)
    with begin(out) as work:
        commit(work, [group(row, prompt, samples, size=1 + row % 9) for row, prompt, samples in order], every)
        finish(work, expect(keys), {"model": "m"}, **options)


def test_the_finished_file(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    run(out)
    assert stored_keys(out) == [(row, prompt, i) for row, prompt, n in KEYS for i in range(n)]
    assert [*tmp_path.iterdir()] == [out]
    schema = pq.read_schema(out)
    assert schema.remove_metadata() == SCHEMA
    assert schema.metadata[VERSION_KEY] == SCHEMA_VERSION.encode()
    assert read_footer(out) == {
        "model": "m",
        "fingerprint": "f00d",
        "shard": None,
        "rows": len(stored(out)),
        "states": 0,
    }
    assert is_complete(output_paths(out), IDENTITY)
    first = stored(out)[0]
    assert first["text"] == "text of 0.0.0 \u2028 é"
    assert first["extra"] == '{"k":1}'
    with begin(tmp_path / "empty.parquet") as work:
        finish(work, expect([]), {})
    assert stored(tmp_path / "empty.parquet") == []
    assert pq.read_schema(tmp_path / "empty.parquet").remove_metadata() == SCHEMA
    assert is_complete(output_paths(tmp_path / "empty.parquet"), IDENTITY)


@pytest.mark.parametrize(("memory_bytes", "every"), [(1, 2), (3000, 2), (3000, 1000), (20_000, 1000)])
def test_sorting_on_disk_gives_the_same_bytes(tmp_path: Path, memory_bytes: int, every: int) -> None:
    run(tmp_path / "a.parquet", shuffle=1)
    run(tmp_path / "b.parquet", every=every, shuffle=2, memory_bytes=memory_bytes)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_row_groups_are_bounded_by_rows_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_sort_module, "ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(merge_sort_module, "ROW_GROUP_BYTES", 20_000)
    keys = [(row, 0, 1) for row in range(50)]
    sizes = [1 if row < 25 else 1000 for row in range(50)]
    sizes[30] = 50_000
    out = tmp_path / "r.parquet"
    with begin(out) as work:
        commit(work, [group(row, size=sizes[row]) for row in range(50)])
        finish(work, expect(keys), {})
    metadata = pq.read_metadata(out)
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert groups[:2] == [10, 10]
    assert 1 in groups, "a row that is too large is a separate group"
    assert max(groups) == 10
    for i in range(metadata.num_row_groups):
        group_of_rows = metadata.row_group(i)
        assert group_of_rows.num_rows == 1 or group_of_rows.total_byte_size <= 20_000
    assert stored_keys(out) == [(row, 0, 0) for row in range(50)]


def test_compression_dictionaries_and_statistics(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    run(out)
    columns = pq.read_metadata(out).row_group(0)
    found = {columns.column(i).path_in_schema: columns.column(i) for i in range(columns.num_columns)}
    assert {column.compression for column in found.values()} == {"ZSTD"}
    dictionaries = {name for name, column in found.items() if "RLE_DICTIONARY" in column.encodings}
    assert dictionaries == {"status", "finish_reason", "stop_kind", "error.code"}
    assert found["row_index"].statistics.has_min_max
    assert not found["text"].is_stats_set


def test_pages_have_checksums(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    run(out)
    data = bytearray(out.read_bytes())
    column = pq.read_metadata(out).row_group(0).column(0)
    data[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    out.write_bytes(bytes(data))
    with pytest.raises(OSError, match=r"(?i)crc"):
        pq.read_table(out, page_checksum_verification=True)


def test_one_error_row_replaces_all_samples(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    with begin(out) as work:
        commit(work, [[failed(0)], group(1, samples=2)])
        finish(work, expect([(0, 0, 5), (1, 0, 2)]), {})
    assert [row["status"] for row in stored(out)] == ["error", "ok", "ok"]


@pytest.mark.parametrize(
    ("groups", "part"),
    [
        ([group(0, samples=2)], "1 prompts are missing and 0"),
        ([group(0, samples=2), group(1), group(2)], "0 prompts are missing and 1"),
        ([group(0, samples=2), group(2)], "1 prompts are missing and 1"),
        ([group(0, samples=1), group(1)], "row 0, prompt 0 \\(1 of 2 samples\\)"),
        ([group(0, samples=3), group(1)], "row 0, prompt 0 \\(3 of 2 samples\\)"),
        ([group(0, samples=3)[1:], group(1)], "row 0, prompt 0 \\(2 of 2 samples\\)"),
        ([group(0, samples=2), group(1, 1)], "1 prompts are missing and 1"),
        ([], "2 prompts are missing"),
    ],
)
def test_nothing_is_replaced_if_rows_are_missing_or_unexpected(tmp_path: Path, groups: Any, part: str) -> None:
    out = tmp_path / "r.parquet"
    with begin(out) as work:
        commit(work, groups)
        with pytest.raises(BatchgenError, match=part) as caught:
            finish(work, expect([(0, 0, 2), (1, 0, 1)]), {})
        assert caught.value.exit_code == 1
        assert not out.exists()


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ([], None),
        ([group(5), group(0, samples=2), [failed(0, 1)]], None),
        ([[failed(0)]], None),
        ([group(1)], "row 1, prompt 0 is not in this job"),
        ([group(0, 2), group(0, samples=2)], "row 0, prompt 2 is not in this job"),
        ([[failed(7)]], "row 7, prompt 0 is not in this job"),
        ([group(5), group(0, samples=3)], "row 0, prompt 0 has 3 samples, but this job has 2"),
        ([group(0)], "row 0, prompt 0 has 1 samples, but this job has 2"),
        ([group(0, samples=3)[1:]], "row 0, prompt 0 has 2 samples, but this job has 2"),
    ],
)
def test_committed_work_must_be_part_of_the_job(tmp_path: Path, groups: Any, problem: str | None) -> None:
    with begin(tmp_path / "r.parquet") as work:
        commit(work, groups)
        committed = Committed.read(work)
        job = expect([(5, 0, 1), (0, 1, 4), (0, 0, 2)])
        if problem is None:
            job.check_resumable(committed, work.paths.work)
            return
        with pytest.raises(UsageError, match=f"cannot continue: {problem}.*another output") as caught:
            job.check_resumable(committed, work.paths.work)
        assert caught.value.exit_code == 2
        if groups:
            with pytest.raises(UsageError):
                expect([]).check_resumable(committed, work.paths.work)


def test_a_part_that_is_damaged_before_the_end_is_set_aside_and_computed_again(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    keys = [(row, 0, 1) for row in range(4)]
    with begin(out) as work:
        commit(work, [group(row, size=500) for row in range(4)], every=2)
        assert len(Committed.read(work)) == 4
        part = work.part_files()[1]
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(bytes(data))
        with pytest.raises(OutputError, match=f"{part}, were set aside in {out}.damaged.*Run the same command again"):
            finish(work, expect(keys), {})
    assert not out.exists()
    assert (tmp_path / "r.parquet.damaged" / f"{part.name}.damaged").read_bytes() == bytes(data)
    with begin(out) as work:
        missing = [row for row in range(4) if (row, 0) not in Committed.read(work)]
        assert missing == [2, 3]
        commit(work, [group(row, size=500) for row in missing])
        finish(work, expect(keys), {})
    assert stored_keys(out) == [(row, 0, 0) for row in range(4)]


def test_an_intact_part_that_cannot_be_read_is_not_reported_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FileSystem.open

    def failing(self: FileSystem, path: Path, flags: int) -> io.FileIO:
        if path.name == "part-000000.parquet":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, path, flags)

    with begin(tmp_path / "r.parquet") as work:
        commit(work, [group(0)])
        monkeypatch.setattr(FileSystem, "open", failing)
        with pytest.raises(OutputError, match=r"part-000000\.parquet cannot be read \(Permission denied\).*kept"):
            finish(work, expect([(0, 0, 1)]), {})
        monkeypatch.undo()
        assert len(work.part_files()) == 1
    assert not (tmp_path / "r.parquet.damaged").exists()


def without_texts(table: pa.Table) -> pa.Table:
    return table.drop_columns(["text"])


def miscounted(table: pa.Table) -> pa.Table:
    return table


@pytest.mark.parametrize(("change", "reason"), [(without_texts, "no column text"), (miscounted, "the nulls that were")])
def test_a_part_is_never_repaired(tmp_path: Path, change: Callable[[pa.Table], pa.Table], reason: str) -> None:
    """A column that is missing is not filled, and one with other nulls than were counted is not believed."""
    notes: list[str] = []
    out = tmp_path / "r.parquet"
    with begin(out, note=notes.append) as work:
        commit(work, [group(row) for row in range(4)], every=2)
        part = work.part_files()[0]
        table = change(pq.read_table(part))
        with part.open("wb") as stream, parquet_writer(stream, table.schema) as writer:
            writer.write_table(table)
            writer.nulls["matched_stop"] += change is miscounted
        with pytest.raises(OutputError, match="Run the same command again"):
            finish(work, expect((row, 0, 1) for row in range(4)), {})
        assert len(work.part_files()) == 1
    assert not out.exists()
    assert reason in notes[0]


@pytest.mark.parametrize("place", [0.3, 0.999])
def test_an_output_that_is_read_back_otherwise_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: float
) -> None:
    """As on a disk that changes a bit of what it was given."""
    out = tmp_path / "r.parquet"

    def fsync(_: FileSystem, descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "result.parquet":
            at = int(place * os.fstat(descriptor).st_size)
            os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 1]), at)

    with begin(out) as work:
        commit(work, [group(0)])
        with monkeypatch.context() as patched:
            patched.setattr(FileSystem, "fsync", fsync)
            with pytest.raises(OutputError, match=r"result\.parquet was read back, and is not what was written"):
                finish(work, expect([(0, 0, 1)]), {})
        assert not out.exists()
        assert len(work.part_files()) == 1
        finish(work, expect([(0, 0, 1)]), {})
    assert stored_keys(out) == [(0, 0, 0)]


class Killed(BaseException):
    """Simulates the death of the process."""


@pytest.mark.parametrize("when", ["before replace", "after replace", "half removed"])
def test_a_crash_while_finishing_leaves_the_work_or_the_output_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    run(tmp_path / "good.parquet")
    out = tmp_path / "r.parquet"
    work = begin(out)
    commit(work, [group(row, prompt, samples, size=1 + row % 9) for row, prompt, samples in KEYS])
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target == out and when == "before replace":
            raise Killed
        return real(self, target)

    def remove(_: object) -> None:
        if when == "half removed":
            (work.paths.work / "run.json").unlink()
        raise Killed

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(WorkFolder, "remove", remove)
    with pytest.raises(Killed):
        finish(work, expect(KEYS), {"model": "m"})
    monkeypatch.undo()
    work.close()
    assert out.exists() == (when != "before replace")
    again = open_work(output_paths(out), IDENTITY, {})
    if when == "before replace":
        assert again is not None
        finish(again, expect(KEYS), {"model": "m"})
    else:
        assert again is None
    assert out.read_bytes() == (tmp_path / "good.parquet").read_bytes()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "good.parquet", out]


def test_a_full_disk_while_finishing_keeps_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r.parquet"
    with begin(out) as work:
        commit(work, [group(0)])
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OutputError, match="Free some space"):
            finish(work, expect([(0, 0, 1)]), {})
        monkeypatch.undo()
        assert not out.exists()
        assert [*work.scratch.iterdir()] == []
        finish(work, expect([(0, 0, 1)]), {})
    assert stored_keys(out) == [(0, 0, 0)]
