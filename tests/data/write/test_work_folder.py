"""The work folder: its owner, when it is refused, and its lock."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.data.files import FileSystem
from batchgen.data.out.finish import finish
from batchgen.data.store.committed import Committed
from batchgen.data.store.lock import RunLock
from batchgen.data.store.work_folder import RunIdentity, WorkFolder, is_complete, output_paths
from batchgen.data.store.work_owner import Policy, open_work
from batchgen.errors import FingerprintError, OutputError
from tests.data.helpers import IDENTITY, begin, commit, expect, failed, group

OTHER = RunIdentity("other")


def finished(out: Path, identity: RunIdentity = IDENTITY) -> None:
    with begin(out, identity, "overwrite") as work:
        commit(work, [group(0)])
        finish(work, expect([(0, 0, 1)]), {})


def test_output_paths() -> None:
    assert output_paths(Path("a/r.parquet")).work == Path("a/r.parquet.work")
    shard = output_paths(Path("a/out"), (7, 16))
    assert shard.result == Path("a/out/part-00007-of-00016.parquet")
    assert shard.work == Path("a/out.work/part-00007-of-00016")


def test_the_work_folder_of_a_new_output(tmp_path: Path) -> None:
    out = tmp_path / "new" / "r.parquet"
    with begin(out, model="m") as work:
        assert work.part_files() == []
        state = json.loads((work.paths.work / "run.json").read_text())
        assert state["fingerprint"] == "f00d"
        assert state["info"] == {"model": "m"}
    assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["r.parquet.work"]


def test_work_left_by_a_finished_job_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    finished(out)
    before = out.stat().st_mtime_ns
    for _ in range(2):  # with the work folder, and without it
        assert open_work(output_paths(out), IDENTITY, {}) is None
        assert out.stat().st_mtime_ns == before
        assert [*tmp_path.iterdir()] == [out]


def test_parts_of_another_job_are_set_aside(tmp_path: Path) -> None:
    """This job may reuse those of their rows whose request is the same."""
    out = tmp_path / "r.parquet"
    for number, job in enumerate((OTHER, IDENTITY, OTHER)):
        with begin(out, job, "resume-anyway") as work:
            assert work.part_files() == []
            assert len(work.earlier_parts()) == number
            commit(work, [group(number)])
    with begin(out, OTHER) as work:
        assert len(work.part_files()) == 1, "the same command continues"
        assert len(work.earlier_parts()) == 2, "until the output is complete"
        assert [*work.scratch.iterdir()] == []
        finish(work, expect([(2, 0, 1)]), {})
    assert [*tmp_path.iterdir()] == [out]


def test_work_without_a_finished_row_is_dropped(tmp_path: Path) -> None:
    """Whatever job left it: nothing was computed."""
    out = tmp_path / "r.parquet"
    with begin(out, OTHER) as work:
        commit(work, [[failed(0)], [failed(1)]])
    with begin(out) as work:
        assert work.part_files() == []
        commit(work, [[failed(0)], group(1)])
    with pytest.raises(FingerprintError):
        open_work(output_paths(out), OTHER, {})


def test_overwrite_drops_work_that_another_job_has_continued(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    finished(out, RunIdentity("first"))
    with begin(out, OTHER, "overwrite") as work:
        commit(work, [group(0)])
    begin(out, IDENTITY, "resume-anyway").close()
    with begin(out, OTHER, "overwrite") as work:
        assert work.part_files() == work.earlier_parts() == []


def test_a_complete_shard_does_not_complete_other_shards(tmp_path: Path) -> None:
    out = tmp_path / "out"
    identity = RunIdentity("f00d", (1, 2))
    finished(out, identity)
    result = out / "part-00001-of-00002.parquet"
    assert [*tmp_path.iterdir()] == [out]
    assert [*out.iterdir()] == [result]
    assert is_complete(output_paths(out, (1, 2)), identity)
    assert not is_complete(output_paths(out, (1, 2)), RunIdentity("f00d", (0, 2)))
    assert not is_complete(output_paths(out, (1, 2)), IDENTITY)


@pytest.mark.parametrize("retry", [False, True])
def test_a_finished_job_keeps_the_work_that_will_replace_its_output(
    tmp_path: Path, retry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.parquet"
    finished(out)
    with begin(out, policy="overwrite") as work:
        commit(work, [group(0)])
    assert open_work(output_paths(out), IDENTITY, {}, retry_errors=retry) is None
    with begin(out, policy="overwrite") as work:
        assert len(Committed.read(work)) == 1
        with monkeypatch.context() as killed:  # just before the folder is removed
            killed.setattr(WorkFolder, "remove", lambda _: None)
            finish(work, expect([(0, 0, 1)]), {})
    assert len(work.part_files()) == 1
    assert open_work(output_paths(out), IDENTITY, {}, retry_errors=retry) is None
    assert [*tmp_path.iterdir()] == [out]


def test_an_output_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a folder"):
        open_work(output_paths(tmp_path), IDENTITY, {})


@pytest.mark.parametrize("policy", ["resume", "overwrite", "resume-anyway"])
@pytest.mark.parametrize("of", ["result", "states"])
def test_an_output_that_is_not_a_regular_file_is_refused_and_kept(tmp_path: Path, policy: Policy, of: str) -> None:
    paths = output_paths(tmp_path / "r.parquet")
    os.mkfifo(getattr(paths, of))  # reading it would block
    for retry in (False, True):
        with pytest.raises(OutputError, match=r"not a regular file.* Name a file with -o\.$"):
            open_work(paths, IDENTITY, {}, policy, retry_errors=retry)
    assert [*tmp_path.iterdir()] == [getattr(paths, of)]
    assert getattr(paths, of).is_fifo()


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be written"):
        open_work(output_paths(tmp_path / "file" / "r.parquet"), IDENTITY, {})


@pytest.mark.parametrize("damage", [None, b"", b"{}", b"\xff"])
def test_parts_record_their_job_if_run_json_is_missing_or_damaged(tmp_path: Path, damage: bytes | None) -> None:
    out = tmp_path / "r.parquet"
    with begin(out) as work:
        commit(work, [group(0)])
    run_file = work.paths.work / "run.json"
    run_file.unlink() if damage is None else run_file.write_bytes(damage)
    with pytest.raises(FingerprintError, match="unfinished work of a different job"):
        open_work(output_paths(out), RunIdentity("0ther"), {})
    with begin(out) as work:
        assert len(Committed.read(work)) == 1
    run_file.unlink() if damage is None else run_file.write_bytes(damage)
    with begin(out, RunIdentity("0ther"), "resume-anyway") as work:
        assert len(work.earlier_parts()) == 1


def test_an_interrupted_start_can_be_repeated(tmp_path: Path) -> None:
    work = output_paths(tmp_path / "r.parquet").work
    work.mkdir()
    (work / "lock").touch()
    (work / "run.json.tmp").write_text("{")
    begin(tmp_path / "r.parquet").close()


HOLD = """
import sys, time
from pathlib import Path
from batchgen.data.store.lock import RunLock
lock = RunLock(Path(sys.argv[1]), Path(sys.argv[1]).with_name("out"))
print("held", flush=True)
time.sleep(60)
"""


def test_the_kernel_releases_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(OutputError, match=rf"another run \(pid {other.pid} on ") as caught:
                RunLock(folder, folder.with_name("results.parquet"))
            assert "results.parquet" in str(caught.value)
        finally:
            other.send_signal(signal.SIGKILL)
    lock = RunLock(folder, folder.with_name("out"))
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    lock.release()
    lock.release()


def test_the_lock_of_a_folder_that_is_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that opened the lock file just before another run removed it does not hold the lock."""
    first = RunLock(tmp_path / "w", tmp_path / "out")
    real_open = FileSystem.open
    opened: list[Path] = []

    def open_then_remove(system: FileSystem, path: Path, flags: int) -> io.FileIO:
        file = real_open(system, path, flags)
        if not opened:
            first.release(remove=True)
            (tmp_path / "w").rmdir()
        opened.append(path)
        return file

    monkeypatch.setattr(FileSystem, "open", open_then_remove)
    second = RunLock(tmp_path / "w", tmp_path / "out")
    monkeypatch.undo()
    assert len(opened) == 2
    with pytest.raises(OutputError):
        RunLock(tmp_path / "w", tmp_path / "out")
    second.release()
