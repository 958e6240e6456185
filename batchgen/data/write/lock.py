"""Lock of an output: an flock on a file in the work folder, which the kernel releases when the process ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from batchgen.data.write.durable_files import output_errors
from batchgen.errors import OutputError
from batchgen.request.foreign_text import ForeignTextError, read_json, typed

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
        self._descriptor = -1
        with output_errors(folder):
            while self._descriptor < 0:
                self._descriptor = self._try_lock(folder, out)

    def _try_lock(self, folder: Path, out: Path) -> int:
        """The descriptor of the locked file; -1 if a run that just finished removed the file meanwhile."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return -1
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
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
        if not _same_file(descriptor, self.path):
            os.close(descriptor)
            return -1
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        return descriptor

    def release(self, remove: bool = False) -> None:
        """Release the lock; with `remove`, delete its file first. Further calls do nothing."""
        if self._descriptor < 0:
            return
        if remove:
            with suppress(OSError):
                self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    try:
        holder = typed(read_json(os.pread(descriptor, 4096, 0)), {"pid": int, "host": str})
        return f"pid {holder['pid']} on {holder['host']}"
    except ForeignTextError:
        return "which has just started"
