"""Lock of an output: an flock on a file in the work folder, which the kernel releases when the process ends."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from batchgen.data.files import make_durably, remove_file, status_of, system
from batchgen.data.write.durable_files import output_errors
from batchgen.errors import OutputError

LOCK_NAME = "lock"
_HELD = {errno.EAGAIN, errno.EACCES}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class RunLock:
    """Lock that allows one process to write an output, held from construction until `release`.

    Raises:
        OutputError: another run holds the lock, or the file system has no locks.
    """

    def __init__(self, folder: Path, out: Path) -> None:
        self.path = folder / LOCK_NAME
        self._file: io.FileIO | None = None
        with output_errors(folder):
            while self._file is None:
                self._file = self._try_lock(folder, out)

    def _try_lock(self, folder: Path, out: Path) -> io.FileIO | None:
        """The locked file; None if a run that just finished removed it meanwhile."""
        try:
            make_durably(folder)
            file = system.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            system.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(file)
            file.close()
            if error.errno in _HELD:
                raise OutputError(
                    f"another run ({holder}) is writing {out}. Wait for it, or name another output with -o."
                ) from None
            if error.errno in _UNSUPPORTED:
                raise OutputError(
                    f"{folder} is on a file system without file locks, which are needed to keep two runs apart. "
                    "Name an output on another file system with -o."
                ) from None
            raise
        try:
            if not _is_open_file(self.path, file):
                file.close()
                return None
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except BaseException:
            file.close()
            raise
        return file

    def release(self, remove: bool = False) -> None:
        """Release the lock; with `remove`, delete its file first. Further calls do nothing."""
        if self._file is None:
            return
        if remove:
            with suppress(OSError):
                remove_file(self.path)
        self._file.close()
        self._file = None


def _is_open_file(path: Path, file: io.FileIO) -> bool:
    status = status_of(path)
    return status is not None and os.path.samestat(system.fstat(file.fileno()), status)


def _holder(file: io.FileIO) -> str:
    try:
        holder = json.loads(file.read(4096))
        return f"pid {int(holder['pid'])} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "which has just started"
