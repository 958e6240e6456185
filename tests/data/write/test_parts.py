"""Parts: whole groups are committed, errors are raised, keys are read back, damaged files are removed."""

from __future__ import annotations

import errno
import io
import os
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.files import FileSystem
from batchgen.data.schema import FINGERPRINT_KEY, SCHEMA, OutputRow
from batchgen.data.store import parts
from batchgen.data.store.committed import Committed
from batchgen.data.store.parts import PartWriter
from batchgen.data.store.work_folder import RunIdentity
from batchgen.errors import OutputError
from batchgen.request.completion import StateBlock
from tests.data.helpers import begin, commit, failed, group, sample


def keys_of(path: Path) -> list[tuple[int, int, int]]:
    table = pq.read_table(path)
    return [*zip(*(table[name].to_pylist() for name in ("row_index", "prompt_index", "sample_index")), strict=True)]


def test_parts_hold_whole_groups_in_order_of_completion(tmp_path: Path) -> None:
    with begin(tmp_path / "r") as work:
        commit(work, [group(5, samples=2), group(1, samples=3), group(0)], every=3)
        found = [keys_of(part) for part in work.part_files()]
        assert sum(found, []) == [(5, 0, 0), (5, 0, 1), (1, 0, 0), (1, 0, 1), (1, 0, 2), (0, 0, 0)]  # noqa: RUF017
        for keys in found:
            for row, prompt, _ in keys:
                assert sum(k[:2] == (row, prompt) for k in keys) == sum(
                    k[:2] == (row, prompt) for f in found for k in f
                )
        for part in work.part_files():
            schema = pq.read_schema(part)
            assert schema.remove_metadata() == SCHEMA
            assert schema.metadata[FINGERPRINT_KEY] == b"f00d"


def test_part_numbers_continue_after_a_resume(tmp_path: Path) -> None:
    for row in range(3):
        with begin(tmp_path / "r") as work:
            commit(work, [group(row)])
    assert [part.name for part in work.part_files()] == [f"part-00000{i}.parquet" for i in range(3)]


def test_flush_commits_everything_added(tmp_path: Path) -> None:
    with begin(tmp_path / "r") as work, PartWriter(work, commit_every=1000) as writer:
        writer.add(group(1))
        writer.flush()
        assert [part.name for part in work.part_files()] == ["part-000000.parquet"]
        assert len(Committed.read(work)) == 1
        writer.flush()
        assert len(work.part_files()) == 1


def test_rows_are_committed_after_commit_seconds(tmp_path: Path) -> None:
    with begin(tmp_path / "r") as work, PartWriter(work, commit_every=1000, commit_seconds=0.05) as writer:
        writer.add(group(1))
        deadline = time.monotonic() + 20
        while not work.part_files() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(work.part_files()) == 1
        assert len(Committed.read(work)) == 1


def test_a_part_is_committed_at_its_byte_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_PART_BYTES", 100_000)
    with begin(tmp_path / "r") as work:
        with PartWriter(work, commit_every=10**9) as writer:
            for row in range(50):
                writer.add(group(row, size=2000))
        assert len(work.part_files()) > 5
        assert len(Committed.read(work)) == 50


def test_an_exception_in_the_block_commits_the_added_rows(tmp_path: Path) -> None:
    def interrupted() -> None:
        with PartWriter(work) as writer:
            writer.add(group(1))
            raise KeyboardInterrupt

    with begin(tmp_path / "r") as work:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert (1, 0) in Committed.read(work)


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Make fsync fail as on a full disk after `after` calls."""
    calls: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_is_an_error_and_keeps_committed_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begin(tmp_path / "r") as work:
        commit(work, [group(0)])
        full_disk(monkeypatch, after=0)
        writer = PartWriter(work, commit_every=1)
        writer.add(group(1))
        with pytest.raises(OutputError, match="Free some space"):
            writer.flush()
        with pytest.raises(OutputError, match="No space left"):
            writer.add(group(2))
        with pytest.raises(OutputError):
            writer.close()
        monkeypatch.undo()
        assert [*work.parts.glob("*.tmp")] == []
        assert len(Committed.read(work)) == 1
        commit(work, [group(1)])
        assert len(Committed.read(work)) == 2


def test_an_add_that_waits_for_a_full_buffer_raises_the_writing_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_forever(writer: PartWriter) -> None:
        for row in range(10_000):
            writer.add(group(row, size=200))

    monkeypatch.setattr(parts, "_PART_BYTES", 10_000)
    with begin(tmp_path / "r") as work:
        full_disk(monkeypatch, after=2)
        writer = PartWriter(work, commit_every=5)
        with pytest.raises(OutputError):
            add_forever(writer)
        with pytest.raises(OutputError):
            writer.close()


class SlowDisk(PartWriter):
    """A writer that commits a part only while `add` waits, so that the buffer always fills up."""

    def _commit(self, rows: list[OutputRow]) -> None:
        while self.stats.writer_stalls <= len(self._work.part_files()) and not self._closing:
            time.sleep(0.001)
        super()._commit(rows)


def test_with_a_slow_disk_add_waits_and_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 20_000
    monkeypatch.setattr(parts, "_PART_BYTES", limit)
    groups = [group(row, samples=2, size=50 + row) for row in range(200)]
    sizes = [sum(map(parts._row_bytes, each)) for each in groups]
    with begin(tmp_path / "r") as work:
        with SlowDisk(work, commit_every=10**9, commit_seconds=3600) as writer:
            for each in groups:
                writer.add(each)
        found = [keys_of(part) for part in work.part_files()]
    assert [key for part in found for key in part] == [row.completion.key for each in groups for row in each]
    assert writer.stats.writer_stalls >= len(found) - 2 > 5
    assert writer.stats.writer_stall_seconds > 0
    assert limit < writer.stats.writer_peak_bytes <= 2 * (limit + max(sizes)) < sum(sizes) / 4
    assert not writer._thread.is_alive()


def test_add_does_not_wait_for_a_fast_disk(tmp_path: Path) -> None:
    with begin(tmp_path / "r") as work:
        with PartWriter(work, commit_every=3) as writer:
            for row in range(20):
                writer.add(group(row))
        assert len(Committed.read(work)) == 20
    assert (writer.stats.writer_stalls, writer.stats.writer_stall_seconds) == (0, 0.0)
    assert 0 < writer.stats.writer_peak_bytes <= sum(parts._row_bytes(row) for n in range(20) for row in group(n))


class TestCommitted:
    def test_an_empty_folder_has_no_keys(self, tmp_path: Path) -> None:
        with begin(tmp_path / "r") as work:
            committed = Committed.read(work)
        assert len(committed) == committed.errors == committed.rows == 0
        assert (0, 0) not in committed
        assert committed.contains(np.array([0, 1]), np.array([0, 0], np.int32)).tolist() == [False, False]

    @settings(max_examples=15, deadline=None)
    @given(st.sets(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=20), st.integers(1, 5))
    def test_membership_against_a_set(
        self, tmp_path_factory: pytest.TempPathFactory, keys: set[tuple[int, int]], every: int
    ) -> None:
        with begin(tmp_path_factory.mktemp("c") / "r") as work:
            commit(work, [group(row, prompt, 1 + row % 3, 1) for row, prompt in keys], every)
            committed = Committed.read(work)
        assert committed.rows == len({row for row, _ in keys})
        assert len(committed) == sum(1 + row % 3 for row, _ in keys)
        asked = [(row, prompt) for row in range(14) for prompt in range(5)]
        assert [key in committed for key in asked] == [key in keys for key in asked]
        rows, prompts = (np.array(column) for column in zip(*asked, strict=True))
        assert committed.contains(rows, prompts.astype(np.int32)).tolist() == [key in keys for key in asked]

    def test_a_copied_part_is_set_aside(self, tmp_path: Path) -> None:
        notes: list[str] = []
        with begin(tmp_path / "r", note=notes.append) as work:
            commit(work, [group(3), group(4)])
            (work.parts / "part-000007.parquet").write_bytes(work.part_files()[0].read_bytes())
            commit(work, [group(5)])
            assert Committed.read(work).row_index.tolist() == [3, 4, 5]
            assert [part.name for part in work.part_files()] == ["part-000000.parquet", "part-000008.parquet"]
        assert len(notes) == 1
        assert "part-000007.parquet is damaged (another part holds a row of it as well): it is set aside" in notes[0]
        assert (tmp_path / "r.damaged" / "part-000007.parquet.damaged").exists()

    def test_interrupted_commits_are_removed_and_damaged_parts_set_aside(self, tmp_path: Path) -> None:
        notes: list[str] = []
        with begin(tmp_path / "r", note=notes.append) as work:
            commit(work, [group(3)])
            whole = work.part_files()[0].read_bytes()
            (work.parts / "part-000001.parquet.tmp").write_bytes(whole[:50])
            (work.parts / "part-000002.parquet").write_bytes(whole[:-5])
            (work.parts / "part-000003.parquet").write_bytes(b"")
            damaged = bytearray(whole)
            damaged[4:200] = bytes(196)
            (work.parts / "part-000004.parquet").write_bytes(bytes(damaged))
            pq.write_table(pa.table({"a": [1]}), work.parts / "part-000005.parquet")
            committed = Committed.read(work)
            assert [path.name for path in work.parts.iterdir()] == ["part-000000.parquet"]
        assert (3, 0) in committed
        kept = sorted(path.name for path in (tmp_path / "r.damaged").iterdir())
        assert kept == [f"part-00000{number}.parquet.damaged" for number in range(2, 6)]
        assert (tmp_path / "r.damaged" / kept[2]).read_bytes() == bytes(damaged)
        reasons = ["its end is not that", "it is cut short", "a wrong checksum", "an earlier version"]
        assert all(reason in note for reason, note in zip(reasons, notes, strict=True)), notes

    @pytest.mark.parametrize(
        ("problem", "message"),
        [
            (OSError(errno.EACCES, "Permission denied"), "Check the permissions"),
            (OSError(errno.EIO, "Input/output error"), "Check the disk"),
            (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
            (MemoryError(), "not enough memory"),
            (pa.ArrowMemoryError("malloc of size 1 failed"), "not enough memory"),
        ],
        ids=lambda value: value if isinstance(value, str) else type(value).__name__,
    )
    def test_intact_parts_that_cannot_be_read_are_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException, message: str
    ) -> None:
        """No permission, a failing disk, too little memory: the committed rows are intact."""
        with begin(tmp_path / "r") as work:
            commit(work, [group(3)])
            commit(work, [[with_states(sample(4))]])
            for file, retry in product((work.part_files()[0], *work.states.iterdir()), (False, True)):
                with monkeypatch.context() as patched:
                    patched.setattr(FileSystem, "open", open_failing_for(file, problem))
                    with pytest.raises(OutputError, match=f"{file.name} cannot be read .*{message}.* kept"):
                        Committed.read(work, retry_errors=retry)
            assert len(Committed.read(work)) == 2

    def test_a_part_of_another_job_is_set_aside(self, tmp_path: Path) -> None:
        with begin(tmp_path / "other", RunIdentity("other")) as other:
            commit(other, [group(3)])
            foreign = other.part_files()[0].read_bytes()
        with begin(tmp_path / "r") as work:
            commit(work, [group(5)])
            (work.parts / "part-000007.parquet").write_bytes(foreign)
        with begin(tmp_path / "r") as work:
            assert Committed.read(work).row_index.tolist() == [5]
        assert (tmp_path / "r.damaged" / "part-000007.parquet.damaged").read_bytes() == foreign

    def test_retry_errors_removes_whole_prompts(self, tmp_path: Path) -> None:
        second = failed(6)
        partly_failed = [sample(6, 0, 0), replace(second, completion=replace(second.completion, sample_index=1))]
        with begin(tmp_path / "r") as work:
            commit(work, [group(3), [failed(1)], group(2, samples=2), partly_failed, group(6, 1)], every=3)
            commit(work, [[failed(8)]])
            found = Committed.read(work)
            assert (len(found), found.errors, int(found.is_error.sum())) == (8, 3, 3)
            before = len(work.part_files())
            committed = Committed.read(work, retry_errors=True)
            assert committed.errors == 0
            assert [key for key in ((1, 0), (2, 0), (3, 0), (6, 0), (6, 1), (8, 0)) if key in committed] == [
                *((2, 0), (3, 0), (6, 1)),
            ]
            assert len(work.part_files()) < before
            commit(work, [group(1), group(6), group(8)])
            assert Committed.read(work, retry_errors=True).rows == 5
            for part in work.part_files():
                assert pq.read_schema(part).metadata[FINGERPRINT_KEY] == b"f00d"


def with_states(row: OutputRow) -> OutputRow:
    block = StateBlock(-1, "last", 0, np.ones((1, 4), np.float32), "float32")
    return replace(row, completion=replace(row.completion, states=(block,)))


def open_failing_for(file: Path, problem: BaseException) -> Any:
    """`FileSystem.open` that raises `problem` when `file` is read."""
    real = FileSystem.open

    class Failing(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise problem

        def readall(self) -> bytes:
            raise problem

    def opens(system: FileSystem, path: Path, flags: int) -> io.FileIO:
        return Failing(path) if path == file else real(system, path, flags)

    return opens
