"""Every file operation of a job's output goes through here: one object has the system calls, and tests replace it.

Files of a work folder are opened without following links; files that the user named may be links.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

BUFFER = 1 << 17
"""Bytes of a stream's buffer; larger blocks are read and written directly."""


class FileSystem:
    """Operations on files, one system call's worth each; so are the methods of the files that `open` gives.

    Raises:
        OSError: (every method) the system call fails.
    """

    def open(self, path: Path, flags: int) -> io.FileIO:
        """Open a file without a buffer, with the flags of `os.open`; a new file gets the permissions of the umask."""
        mode = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "r+"}[flags & os.O_ACCMODE]
        return io.FileIO(path, mode, opener=lambda name, _: os.open(name, flags | os.O_CLOEXEC, 0o666))

    def fsync(self, descriptor: int) -> None:
        """Make the content of an open file durable."""
        os.fsync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def stat(self, path: Path, *, follow: bool = True) -> os.stat_result:
        """State of a file, or of the link itself unless `follow`."""
        return path.stat(follow_symlinks=follow)

    def fstat(self, descriptor: int) -> os.stat_result:
        """State of an open file."""
        return os.fstat(descriptor)

    def access(self, path: Path, mode: int) -> bool:
        """Whether the process may use a path in the mode of `os.access`."""
        return os.access(path, mode)

    def listdir(self, folder: Path) -> list[str]:
        """Names in a folder."""
        return [path.name for path in folder.iterdir()]

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder, replacing a file of the new name."""
        old.replace(new)

    def unlink(self, path: Path) -> None:
        """Remove the name of a file."""
        path.unlink()

    def mkdir(self, folder: Path) -> None:
        """Create a folder."""
        folder.mkdir()

    def rmdir(self, folder: Path) -> None:
        """Remove an empty folder."""
        folder.rmdir()

    def flock(self, descriptor: int, operation: int) -> None:
        """Lock or unlock an open file."""
        fcntl.flock(descriptor, operation)

    def mmap(self, descriptor: int) -> mmap.mmap:
        """Map an open file, which is not empty, for reading."""
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


system = FileSystem()
"""The operations in use."""


def open_named(path: Path) -> io.BufferedReader:
    """Open a file that the user named for reading."""
    return io.BufferedReader(system.open(path, os.O_RDONLY), BUFFER)


def open_own(path: Path) -> io.BufferedReader:
    """Open a file of a work folder for reading.

    Raises:
        OSError: it is missing, is a link, or cannot be read.
    """
    return io.BufferedReader(system.open(path, os.O_RDONLY | os.O_NOFOLLOW), BUFFER)


def open_own_to_change(path: Path, buffer: int = BUFFER) -> io.BufferedRandom:
    """Open a file of a work folder for reading and writing, as `open_own`."""
    return io.BufferedRandom(system.open(path, os.O_RDWR | os.O_NOFOLLOW), buffer)


def open_new(path: Path, buffer: int = BUFFER) -> io.BufferedRandom:
    """Create a file for reading and writing. What is left of an earlier one is removed first.

    Raises:
        OSError: something else is in the way, or the file cannot be created.
    """
    remove_file(path)
    return io.BufferedRandom(system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW), buffer)


def open_to_append(path: Path) -> io.BufferedRandom:
    """Open a file that the user named for reading and writing, from its begin."""
    return io.BufferedRandom(system.open(path, os.O_RDWR), BUFFER)


def open_to_replace(path: Path) -> io.BufferedWriter:
    """Open a file, pipe or device that the user named for writing; a file is created, or emptied."""
    return io.BufferedWriter(system.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), BUFFER)


def sync_stream(stream: BinaryIO) -> None:
    """Write the buffer of a file and make its content durable."""
    stream.flush()
    system.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: new files, renames and removals."""
    try:
        system.sync_folder(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that syncs names by itself
            raise


def make_durably(folder: Path) -> None:
    """Create a folder and those above it, if they are missing, and make their names durable."""
    if not is_folder(folder):
        if folder.parent != folder:
            _make_missing(folder.parent)
        _make(folder)
    sync_folder(folder.parent)


def _make_missing(folder: Path) -> None:
    if not is_folder(folder):
        make_durably(folder)


def _make(folder: Path) -> None:
    try:
        system.mkdir(folder)
    except FileExistsError:
        if not is_folder(folder):  # otherwise another process made it
            raise


def status_of(path: Path, *, follow: bool = True) -> os.stat_result | None:
    """State of a file; None if there is none."""
    try:
        return system.stat(path, follow=follow)
    except (FileNotFoundError, NotADirectoryError):
        return None


def exists(path: Path) -> bool:
    """Whether there is a file or folder of this name."""
    return status_of(path) is not None


def is_file(path: Path) -> bool:
    """Whether there is a regular file of this name."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def size_of(path: Path) -> int:
    """Bytes of a file."""
    return system.stat(path).st_size


def same_file(first: Path, second: Path) -> bool:
    """Whether two existing paths lead to one file."""
    return os.path.samestat(system.stat(first), system.stat(second))


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Paths in a folder whose names match a pattern, sorted; none if the folder is missing."""
    try:
        names = system.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder, replacing a file of the new name. Durable after `sync_folder`."""
    system.rename(old, new)


def remove_file(path: Path) -> None:
    """Remove a file, if there is one."""
    try:
        system.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return


def remove_tree(folder: Path) -> None:
    """Remove a folder with its content. What cannot be removed stays."""
    for path in _or_nothing(folder):
        status = status_of(path, follow=False)
        try:
            if status is not None and stat.S_ISDIR(status.st_mode):
                remove_tree(path)
            else:
                remove_file(path)
        except OSError:
            continue
    try:
        system.rmdir(folder)
    except OSError:
        return


def _or_nothing(folder: Path) -> list[Path]:
    try:
        return files_in(folder)
    except OSError:
        return []


def resolved(path: Path) -> Path:
    """The absolute path with every link followed; a missing end of it stays as it is."""
    return Path(os.path.realpath(path))
