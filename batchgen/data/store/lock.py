"""Lock of an output: one run at a time has its work folder, in which nothing but its own files is left.

The lock is an flock on a file in the work folder, which the kernel releases when the process ends. On a file system
without flock it is a file that exists while the run does, and names its host and process.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchgen.data.durable_files import output_errors
from batchgen.data.files import (
    files_in,
    is_foreign,
    make_durably,
    open_own,
    remove_file,
    remove_if_empty,
    set_aside,
    set_aside_foreign,
    status_of,
    system,
)
from batchgen.errors import OutputError
from batchgen.request.foreign_text import ForeignTextError, read_json, typed

LOCK_NAME = "lock"
HELD_NAME = "lock.held"
"""The lock where there is no flock; it exists while a run holds it."""
_FOLDERS = re.compile(r"(earlier/[0-9]+/)?(parts|states)|earlier(/[0-9]+)?|tokenized|features|scratch(/parts)?")
"""Folders in a work folder."""
_HELD = {errno.EAGAIN, errno.EACCES}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_GONE = {errno.ENOENT, errno.ESTALE}
_TRIES = 100


class HeldError(OutputError):
    """Another run holds the lock."""


class RunLock:
    """Lock that allows one process to write an output, held from construction until `release`.

    Args:
        folder: the work folder, which is created.
        out: the output.

    Raises:
        HeldError: another run holds the lock.
        OutputError: the folder is another user's or a link, or cannot be written.
    """

    def __init__(self, folder: Path, out: Path) -> None:
        self.path = folder / LOCK_NAME
        self.foreign: list[Path] = []
        """New names of what was found in the folder and is not ours: links, other users' files, misplaced folders."""
        self._file: io.FileIO | None = None
        self._held: Path | None = None
        with output_errors(folder):
            if folder.suffix != ".work":  # of a shard
                _refuse_foreign(folder.parent)
            _refuse_foreign(folder)
            for tries in range(_TRIES):
                if self._try_lock(folder, out, last=tries == _TRIES - 1):
                    break
            else:
                raise OutputError(f"{self.path} is removed again and again by other runs. Wait for them.")
            try:
                self.foreign += set_aside_foreign(folder, _FOLDERS)
            except BaseException:
                self.release()
                raise

    def _try_lock(self, folder: Path, out: Path, *, last: bool) -> bool:
        """Lock the file; False if a run that just finished removed it meanwhile, unless this is the `last` try."""
        try:
            make_durably(folder)
            self._set_foreign_aside()
            file = system.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in _GONE and not last:
                return False
            raise
        try:
            self._claim(file, folder, out)
            status = status_of(self.path)
            if status is None or not os.path.samestat(system.fstat(file.fileno()), status):
                self._drop(file)
                return False
            file.truncate(0)
            file.write(json.dumps(_this_process()).encode())
        except BaseException:
            self._drop(file)
            raise
        self._file = file
        return True

    def _set_foreign_aside(self) -> None:
        """Set aside what is in the place of the lock and is not ours: a folder, a link, another file's second name."""
        status = status_of(self.path, follow=False)
        odd = status is not None and (status.st_nlink > 1 or stat.S_ISDIR(status.st_mode))
        if status is not None and (odd or is_foreign(self.path, status)):
            with suppress(FileNotFoundError):
                self.foreign.append(set_aside(self.path))

    def _claim(self, file: io.FileIO, folder: Path, out: Path) -> None:
        try:
            system.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise HeldError(
                    f"another run ({_described(file.read(4096))}) is writing {out}. Wait for it, or name another "
                    "output with -o."
                ) from None
            if error.errno not in _UNSUPPORTED:
                raise
            self._held = _hold(folder / HELD_NAME, out)

    def release(self, remove: bool = False) -> None:
        """Release the lock; with `remove`, delete its file first. Further calls do nothing."""
        if self._file is None:
            return
        if remove:
            with suppress(OSError):
                remove_file(self.path)
        self._drop(self._file)
        self._file = None

    def release_unused(self) -> None:
        """Release the lock, and remove the folder if it contains nothing else."""
        folder = self.path.parent
        empty = False
        with suppress(OSError):
            empty = {path.name for path in files_in(folder)} <= {LOCK_NAME, HELD_NAME}
        self.release(remove=empty)
        remove_if_empty(folder)

    def _drop(self, file: io.FileIO) -> None:
        if self._held is not None:
            with suppress(OSError):
                remove_file(self._held)
            self._held = None
        with suppress(OSError):
            file.close()


def _refuse_foreign(folder: Path) -> None:
    """Refuse a work folder that is not ours.

    Raises:
        OutputError: it is a link, no folder, or another user's.
    """
    status = status_of(folder, follow=False)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        what = "is a link" if stat.S_ISLNK(status.st_mode) else "is not a folder"
        raise OutputError(f"{folder} {what}, but the work folder belongs there. Move it away, or name another -o.")
    if is_foreign(folder, status):
        raise OutputError(
            f"{folder} belongs to another user (uid {status.st_uid}), who could change what this run commits. Name "
            "another output with -o, or make the folder yours with chown -R."
        )


def _hold(path: Path, out: Path) -> Path:
    """Create the file that is the lock where there is no flock. That of a dead process of this host is replaced.

    Raises:
        HeldError: another run holds it, or may hold it.
    """
    if status_of(path) is not None:
        _remove_dead(path, out)
    try:
        file = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    except FileExistsError:
        raise HeldError(
            f"another run has just begun to write {out}. Wait for it, or name another output with -o."
        ) from None
    with file:
        file.write(json.dumps(_this_process() | _process_marks(os.getpid())).encode())
        system.fsync(file.fileno())
    return path


def _remove_dead(path: Path, out: Path) -> None:
    """Remove the lock of a process that has ended. One run at a time does so: it holds another file meanwhile.

    Raises:
        OutputError: the process runs, may run, or another run removes its lock.
    """
    guard = path.with_name(path.name + ".removing")
    with suppress(FileNotFoundError):
        content = _content(path)
        if _is_dead(content):
            with suppress(FileExistsError), system.open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW):
                try:
                    if _content(path) == content:
                        remove_file(path)
                finally:
                    remove_file(guard)
                return
            path = guard
        raise OutputError(
            f"another run ({_described(content)}) may be writing {out}: this file system has no file locks, and {path} "
            "exists. If that run has ended, remove this file and run the same command again; else name another output "
            "with -o."
        )


def _content(path: Path) -> bytes:
    with open_own(path) as stream:
        return stream.read(4096)


def _is_dead(content: bytes) -> bool:
    """Whether the process that wrote this is known to have ended: one of this host, boot and process space."""
    holder = _holder(content)
    if holder is None:
        return False
    marks = _process_marks(holder["pid"])
    if holder.get("host") != socket.gethostname() or not marks["space"] or holder.get("space") != marks["space"]:
        return False
    return bool(holder.get("ticks") != marks["ticks"])


def _holder(content: bytes) -> dict[str, Any] | None:
    with suppress(ForeignTextError):
        return typed(read_json(content), {"pid": int})
    return None


def _described(content: bytes) -> str:
    holder = _holder(content)
    if holder is None:
        return "which has just started"
    since = holder.get("started")
    return f"pid {holder['pid']} on {holder.get('host')}{f', started {since}' if since else ''}"


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _process_marks(pid: int) -> dict[str, Any]:
    """What tells a process from others with its number: `space`, this host's boot and process space, "" if unknown;
    `ticks`, when the process began, in clock ticks since the boot, None if there is no such process.
    """
    space, ticks = "", None
    with suppress(OSError):
        boot = _content(Path("/proc/sys/kernel/random/boot_id")).decode().strip()
        space = f"{boot} {system.stat(Path('/proc/self/ns/pid')).st_ino}"
    with suppress(OSError, IndexError):
        ticks = _content(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()[19].decode()
    return {"space": space, "ticks": ticks}
