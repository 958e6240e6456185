"""What others put in the way of a run: links and files in its work folder, links in place of its output."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from batchgen.data.files import FileSystem
from batchgen.data.out.finish import finish
from batchgen.data.store.lock import RunLock
from batchgen.data.store.work_folder import RunIdentity, output_paths
from batchgen.data.store.work_owner import open_work
from batchgen.data.store.work_state import read_state
from batchgen.errors import OutputError
from tests.data.helpers import IDENTITY, begin, commit, expect, group, stored_keys

PLACES = [
    "lock", "run.json", "run.json.tmp", "parts", "parts/part-000000.parquet", "parts/part-000000.parquet.tmp",
    "parts/part-000001.parquet", "states", "states/part-000000.states", "states/part-000000.states.tmp", "scratch",
    "scratch/result.parquet", "tokenized", "tokenized/tokens", "earlier", "earlier/000", "anything",
]  # fmt: skip


FOLDERS = ["parts", "states", "scratch", "tokenized", "earlier", "earlier/000"]


def run_two_parts(out: Path) -> list[Path]:
    """Run a job of two parts; returns what was set aside."""
    with begin(out) as work:
        for row in range(2):
            if not work.part_files()[row:]:
                commit(work, [group(row)])
        finish(work, expect([(0, 0, 1), (1, 0, 1)]), {})
    assert stored_keys(out) == [(0, 0, 0), (1, 0, 0)]
    return work.foreign


def test_earlier_work_is_numbered_past_what_was_set_aside(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    earlier = output_paths(out).work / "earlier"
    with begin(out) as work:
        commit(work, [group(0)])
    earlier.mkdir()
    (earlier / "000").write_bytes(b"kept")
    for number in range(2):
        with begin(out, RunIdentity(f"another {number}"), policy="resume-anyway") as work:
            commit(work, [group(number)])
    assert {path.name for path in earlier.iterdir()} == {"000", "000.foreign", "001"}


@pytest.mark.parametrize("place", [place for place in PLACES if place not in FOLDERS])
def test_a_folder_in_the_place_of_a_file_is_set_aside(tmp_path: Path, place: str) -> None:
    """With what it holds; so is a folder that is none of the job's, and a file in the place of a folder."""
    out = tmp_path / "r.parquet"
    planted = output_paths(out).work / place
    (planted / "deeper").mkdir(parents=True)
    (planted / "deeper" / "note").write_bytes(b"kept")
    assert read_state(planted.parent) is None
    (found,) = run_two_parts(out)
    assert found.name == f"{planted.name}.foreign"
    assert (found / "deeper" / "note").read_bytes() == b"kept"
    assert run_again(out)


@pytest.mark.parametrize("place", FOLDERS)
def test_a_file_in_the_place_of_a_folder_is_set_aside(tmp_path: Path, place: str) -> None:
    out = tmp_path / "r.parquet"
    planted = output_paths(out).work / place
    planted.parent.mkdir(parents=True)
    planted.write_bytes(b"kept")
    (found,) = run_two_parts(out)
    assert found.read_bytes() == b"kept"
    assert run_again(out)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *((place, "link to a file") for place in PLACES),
        *product(("lock", "parts", "states/part-000000.states.tmp"), ("link to a folder", "dangling link", "pipe")),
    ],
)
def test_links_and_pipes_are_set_aside(tmp_path: Path, place: str, kind: str) -> None:
    """Neither followed nor changed nor removed, whatever it leads to."""
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_bytes(b"kept")
    (outside / "folder" / "part-000000.parquet").write_bytes(b"kept")
    out = tmp_path / "r.parquet"
    planted = output_paths(out).work / place
    planted.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(planted)
    else:
        planted.symlink_to(outside / {"link to a file": "file", "link to a folder": "folder"}.get(kind, "missing"))
    before = planted.lstat()
    foreign = run_two_parts(out)
    assert [path.parent for path in foreign] == [planted.parent]
    assert foreign[0].lstat().st_ino == before.st_ino
    assert sorted(str(path.relative_to(outside)) for path in outside.rglob("*")) == [
        "file", "folder", "folder/part-000000.parquet",
    ]  # fmt: skip
    assert {path.read_bytes() for path in outside.rglob("*") if path.is_file()} == {b"kept"}
    assert run_again(out)


def run_again(out: Path) -> bool:
    """Whether the finished job, run again, does nothing."""
    return open_work(output_paths(out), IDENTITY, {}) is None


def owned_by(user: int, monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let files belong to another user."""
    real = FileSystem.stat
    theirs = {path.lstat().st_ino for path in paths}

    def stat(system: FileSystem, path: Path, *, follow: bool = True) -> os.stat_result:
        found = real(system, path, follow=follow)
        fields = [*found]
        fields[4] = user if found.st_ino in theirs else os.geteuid()
        return os.stat_result(fields)

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(FileSystem, "stat", stat)


@pytest.mark.parametrize("place", [place for place in PLACES if "/" in place or place in ("lock", "anything")])
def test_a_file_of_another_user_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    out = tmp_path / "r.parquet"
    planted = output_paths(out).work / place
    planted.parent.mkdir(parents=True)
    planted.write_bytes(b"theirs")
    owned_by(4711, monkeypatch, planted)
    (found,) = run_two_parts(out)
    assert found.name.startswith(f"{planted.name}.foreign")
    assert found.read_bytes() == b"theirs"


@pytest.mark.parametrize("user", [4711, 0, 1000])
def test_the_work_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    """Root's and one's own are used."""
    work = output_paths(tmp_path / "r.parquet").work
    work.mkdir()
    owned_by(user, monkeypatch, work)
    if user != 4711:
        run_two_parts(tmp_path / "r.parquet")
        return
    with pytest.raises(OutputError, match=r"r\.parquet\.work belongs to another user \(uid 4711\).* chown"):
        begin(tmp_path / "r.parquet")
    assert [*work.iterdir()] == []


def test_a_file_system_that_gives_all_files_one_owner_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of Windows or some of the network do, or root's files on NFS: one's own new files look like another's."""
    real = {name: getattr(FileSystem, name) for name in ("stat", "fstat")}

    def squashed(name: str) -> Callable[..., os.stat_result]:
        def state(*given: Any, **options: Any) -> os.stat_result:
            fields = [*real[name](*given, **options)]
            fields[4] = 65534
            return os.stat_result(fields)

        return state

    for name in real:
        monkeypatch.setattr(FileSystem, name, squashed(name))
    out = tmp_path / "r.parquet"
    with begin(out) as work:
        commit(work, [group(0)])
    assert run_two_parts(out) == []


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_work_folder_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    work = output_paths(tmp_path / "r.parquet").work
    (tmp_path / "elsewhere").mkdir()
    work.symlink_to("elsewhere") if kind == "link" else work.write_bytes(b"kept")
    with pytest.raises(OutputError, match=rf"r\.parquet\.work is {'a link' if kind == 'link' else 'not a folder'}"):
        begin(tmp_path / "r.parquet")
    assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_the_lock_is_not_written_into_a_file_that_has_another_name_too(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"kept")
    (tmp_path / "r.work").mkdir()
    (tmp_path / "r.work" / "lock").hardlink_to(tmp_path / "precious")
    RunLock(tmp_path / "r.work", tmp_path / "r").release()
    assert (tmp_path / "precious").read_bytes() == b"kept"


@pytest.mark.parametrize("exists", [True, False])
def test_an_output_that_is_a_link_is_written_where_it_leads(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "real.parquet", tmp_path / "r.parquet"
    if exists:
        run_two_parts(target)
    link.symlink_to(target)
    assert output_paths(link).work == tmp_path / "far" / "real.parquet.work"
    if not exists:
        run_two_parts(link)
    assert run_again(link)
    assert link.is_symlink()
    assert stored_keys(target) == [(0, 0, 0), (1, 0, 0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "r.parquet"]


def test_the_link_of_another_user_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "r.parquet"
    link.symlink_to("target")
    owned_by(4711, monkeypatch, link)
    with pytest.raises(OutputError, match=r"r\.parquet is a link that belongs to another user"):
        begin(link)
    assert not (tmp_path / "target").exists()


def test_a_link_that_leads_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.parquet").symlink_to("r.parquet")
    with pytest.raises(OutputError, match="leads in a circle"):
        begin(tmp_path / "r.parquet")


class TestWithoutFlock:
    """A file system without flock: a file that names its process is the lock."""

    @pytest.fixture(autouse=True)
    def _no_flock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(FileSystem, "flock", refuse)

    def test_one_run_at_a_time(self, tmp_path: Path) -> None:
        out = tmp_path / "r.parquet"
        with (
            begin(out),
            pytest.raises(
                OutputError,
                match=rf"another run \(pid {os.getpid()} on {socket.gethostname()}, started 20.*\) may be writing",
            ),
        ):
            begin(out)
        assert run_two_parts(out) == []
        assert [*tmp_path.iterdir()] == [out]

    def test_a_run_that_empties_the_folder_keeps_its_lock(self, tmp_path: Path) -> None:
        out = tmp_path / "r.parquet"
        with begin(out, policy="overwrite"), pytest.raises(OutputError, match="may be writing"):
            begin(out)

    def test_the_lock_of_a_killed_run_of_this_host_is_replaced(self, tmp_path: Path) -> None:
        out = tmp_path / "r.parquet"
        if not (child := os.fork()):
            begin(out)
            os.kill(os.getpid(), 9)
        os.waitpid(child, 0)
        assert (output_paths(out).work / "lock.held").exists()
        run_two_parts(out)

    @pytest.mark.parametrize("change", [{"host": "other"}, {"space": "another boot"}, {"space": ""}, None])
    def test_that_of_a_process_that_cannot_be_looked_up_is_named(
        self, tmp_path: Path, change: dict[str, str] | None
    ) -> None:
        out = tmp_path / "r.parquet"
        held = output_paths(out).work / "lock.held"
        with begin(out):
            content = {**json.loads(held.read_bytes()), "pid": 2**22 + 1}
        held.write_text("" if change is None else json.dumps({**content, **change}))
        with pytest.raises(OutputError, match=r"lock\.held exists. If that run has ended, remove this file and run"):
            begin(out)
        held.write_text(json.dumps(content))
        run_two_parts(out)
