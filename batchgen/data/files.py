"""Every file operation of a job's output goes through here: one object has the system calls, and tests replace it.

Files of a work folder are opened without following links; files that the user named may be links. Files of results may
also be at a URL, a `RemotePath`: names there are durable as they are, and folders follow from names.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

from batchgen.config.urls import RemotePath
from batchgen.data.remote.files import abort_upload, remote

BUFFER = 1 << 17
"""Bytes of a stream's buffer; larger blocks are read and written directly."""
_FOREIGN = ".foreign"
_UPLOAD = ".upload"
"""Suffix of a note of the name of an upload, next to its file."""


class _NamedFile(io.FileIO):
    """A file whose errors name it."""

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = error.filename or self.name
            raise

    def readinto(self, buffer: Any) -> int | None:
        with self._named():
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self._named():
            return super().readall()

    def write(self, data: Any) -> int:
        with self._named():
            return super().write(data)

    def close(self) -> None:
        with self._named():
            super().close()


class FileSystem:
    """Operations on files, one system call's worth each; so are the methods of the files that `open` gives.

    Raises:
        OSError: (every method) the system call fails.
    """

    def open(self, path: Path, flags: int) -> io.FileIO:
        """Open a file without a buffer, with the flags of `os.open`; a new file gets the permissions of the umask."""
        mode = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "r+"}[flags & os.O_ACCMODE]
        return _NamedFile(path, mode, opener=lambda name, _: os.open(name, flags | os.O_CLOEXEC, 0o666))

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

    def statvfs(self, folder: Path) -> os.statvfs_result:
        """State of the file system of a folder."""
        return os.statvfs(folder)

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

    def mmap_shared(self, descriptor: int) -> mmap.mmap:
        """Map an open file, which is not empty, for writing: what is stored outlives the process, not the machine."""
        return mmap.mmap(descriptor, 0)

    def mmap(self, descriptor: int) -> mmap.mmap:
        """Map an open file, which is not empty, for reading."""
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


system = FileSystem()
"""The operations in use."""


def _of(path: Path) -> FileSystem:
    """The operations on a path: those of the system, or of the service that it is a URL of."""
    return cast(FileSystem, remote) if isinstance(path, RemotePath) else system


def open_named(path: Path) -> io.BufferedReader:
    """Open a file that the user named for reading."""
    return io.BufferedReader(_of(path).open(path, os.O_RDONLY), BUFFER)


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
    """Create a file for reading and writing. An earlier one is removed; what is not ours is set aside."""
    make_free(path)
    return io.BufferedRandom(system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW), buffer)


def open_to_append(path: Path) -> io.BufferedRandom:
    """Open a file that the user named for reading and writing, from its begin."""
    return io.BufferedRandom(system.open(path, os.O_RDWR), BUFFER)


def open_to_replace(path: Path) -> io.BufferedWriter:
    """Open a file, pipe or device that the user named for writing; a file is created, or emptied."""
    return io.BufferedWriter(system.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), BUFFER)


def copy_bytes(source: BinaryIO, target: BinaryIO) -> None:
    """Write what is left of a stream to another one."""
    shutil.copyfileobj(source, target, BUFFER)


def sync_stream(stream: BinaryIO) -> None:
    """Write the buffer of a file and make its content durable."""
    stream.flush()
    system.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: new files, renames and removals."""
    if isinstance(folder, RemotePath):
        return
    try:
        system.sync_folder(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that syncs names by itself
            raise


def make_durably(folder: Path) -> None:
    """Create a folder, and those above it, unless they exist, and make their names durable."""
    if isinstance(folder, RemotePath) or is_folder(folder):
        return
    make_durably(folder.parent)
    try:
        system.mkdir(folder)
    except FileExistsError:
        if not is_folder(folder):  # otherwise another process made it
            raise
    sync_folder(folder.parent)


def status_of(path: Path, *, follow: bool = True) -> os.stat_result | None:
    """State of a file; None if there is none."""
    try:
        return _of(path).stat(path, follow=follow)
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
    return _of(path).stat(path).st_size


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written to the disk of a folder."""
    state = system.statvfs(folder)
    return state.f_bavail * state.f_frsize


def same_file(first: Path, second: Path) -> bool:
    """Whether two existing paths lead to one file."""
    return os.path.samestat(system.stat(first), system.stat(second))


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Paths in a folder whose names match a pattern, sorted; none if the folder is missing."""
    try:
        names = _of(folder).listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder, replacing a file of the new name. Durable after `sync_folder`.

    A file moves to another disk by a copy under a temporary name, and to a URL by an upload.
    """
    if isinstance(new, RemotePath):
        _upload(old, new)
        return
    try:
        if isinstance(old, RemotePath):
            raise OSError(errno.EXDEV, "not on this machine")
        system.rename(old, new)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        temporary = temporary_near(new)
        try:
            with open_named(old) as source, open_new(temporary) as target:
                copy_bytes(source, target)
                sync_stream(target)
            system.rename(temporary, new)
        except BaseException:
            with suppress(OSError):
                remove_file(temporary)
            raise
        remove_file(old)


def _upload(old: Path, new: RemotePath) -> None:
    left = old.with_name(old.name + _UPLOAD)

    def note(text: bytes) -> None:
        with open_new(left) as stream:
            stream.write(text)

    remote.upload(new, size_of(old), lambda: open_named(old), note)
    for path in (left, old):
        remove_file(path)


def abort_uploads(folder: Path) -> None:
    """Abort the uploads of files in a folder that a killed process has left."""
    for left in files_in(folder, f"*{_UPLOAD}"):
        with open_own(left) as stream:
            abort_upload(stream.read())


def note_version(path: Path) -> None:
    """Note which file of a URL a later rename may replace: the one that is there now, or none."""
    if isinstance(path, RemotePath):
        remote.note_version(path)


def remove_file(path: Path) -> None:
    """Remove a file, if there is one."""
    with suppress(FileNotFoundError, NotADirectoryError):
        _of(path).unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a file, or a folder with its content. What is not ours, or cannot be removed, stays."""
    with suppress(OSError):
        status = status_of(path, follow=False)
        if status is None or is_set_aside(path) or is_foreign(path, status):
            return
        if not stat.S_ISDIR(status.st_mode):
            remove_file(path)
            return
        for entry in files_in(path):
            remove_tree(entry)
        system.rmdir(path)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if nothing is in it."""
    with suppress(OSError):
        system.rmdir(folder)


def is_foreign(path: Path, status: os.stat_result) -> bool:
    """Whether a name in a folder of ours is not: a link, a special file, or another user's.

    Root's files count as ours: root needs no trick. So do files of the user that new files there belong to, which on
    some network file systems is not the user of the process.

    Args:
        path: the name.
        status: its state, of the link itself if it is one.
    """
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return True
    return status.st_uid not in (0, os.geteuid()) and status.st_uid != _creator(path.parent)


@lru_cache(64)
def _creator(folder: Path) -> int:
    """The user that a new file in a folder belongs to."""
    path = folder / f".owner-{os.getpid()}"
    try:
        with system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as file:
            owner = system.fstat(file.fileno()).st_uid
        remove_file(path)
    except OSError:
        return os.geteuid()
    return owner


def make_free(path: Path) -> Path | None:
    """Make a name free: a file of ours is removed, anything else set aside. Returns the name that this got, if any."""
    status = status_of(path, follow=False)
    if status is None:
        return None
    if is_foreign(path, status) or stat.S_ISDIR(status.st_mode):
        return set_aside(path)
    remove_file(path)
    return None


def set_aside(path: Path) -> Path:
    """Rename what is not ours to a free name, `NAME.foreign`, without touching what it is or leads to."""
    names = (f"{path.name}{_FOREIGN}{f'-{number}' if number else ''}" for number in count())
    target = next(free for free in map(path.with_name, names) if status_of(free, follow=False) is None)
    system.rename(path, target)
    return target


def is_set_aside(path: Path) -> bool:
    """Whether a name is one that `set_aside` gives."""
    return path.suffix.startswith(_FOREIGN)


def set_aside_foreign(folder: Path, folders: re.Pattern[str], below: str = "") -> list[Path]:
    """Set aside what is not ours in a folder of ours and in the folders below it. Returns the new names.

    Args:
        folder: the folder.
        folders: paths of its folders, relative to the outermost one: everything else is a file.
        below: path of `folder` itself, with a slash, if it is not the outermost one.
    """
    moved = []
    for path in files_in(folder):
        status = status_of(path, follow=False)
        if status is None or is_set_aside(path):
            continue
        name = below + path.name
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_foreign(path, status) or is_folder != (folders.fullmatch(name) is not None):
            moved.append(set_aside(path))
        elif is_folder:
            moved += set_aside_foreign(path, folders, f"{name}/")
    return moved


def followed(path: Path) -> Path:
    """Target of a name that the user gave a file to write: a link's, unless the link is another user's."""
    status = None if isinstance(path, RemotePath) else status_of(path, follow=False)
    if status is None or not stat.S_ISLNK(status.st_mode) or status.st_uid not in (0, os.geteuid()):
        return path
    return resolved(path)


def temporary_near(path: Path) -> Path:
    """A name in the folder of a file, for its content while it is written; short even if the name is long."""
    return path.with_name(f".batchgen-{zlib.crc32(os.fsencode(path.name)):08x}.tmp")


def resolved(path: Path) -> Path:
    """The absolute path with every link followed; a missing end of it stays as it is."""
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(path))
