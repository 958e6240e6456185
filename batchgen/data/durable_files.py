"""Durable file writes (temporary name, fsync, rename, fsync of the folder), and messages of I/O errors."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from batchgen.data.files import exists, open_new, remove_file, rename, status_of, sync_folder, sync_stream
from batchgen.errors import BatchgenError, OutputError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of opening a path at which there is no file."""
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` while writing `path` into an `OutputError` with a remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BatchgenError):
            raise
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            remedy = "Free some space and run the same command again: committed rows are kept."
        elif error.errno in _FORBIDDEN:
            remedy = "Check the permissions, or name another place with -o."
        else:
            remedy = "Check the disk and run the same command again: committed rows are kept."
        raise OutputError(f"{path} cannot be written ({reason}). {remedy}") from error


@contextmanager
def part_errors(part: Path) -> Iterator[None]:
    """Distinguish a damaged part from one that is intact but cannot be read now.

    Errors of the operating system have an errno; those about the content have none.

    Raises:
        OutputError: the part cannot be read: no permission, a failing disk or too little memory.
        OSError: the part is damaged or missing, or a folder has its name.
    """
    try:
        yield
    except MemoryError as error:  # also the base class of ArrowMemoryError
        raise OutputError(
            f"{part} cannot be read (not enough memory). Free some and run the same command again: committed rows "
            "are kept."
        ) from error
    except OSError as error:
        if error.errno is None or isinstance(error, NO_FILE):
            raise
        remedy = "Check the permissions" if error.errno in _FORBIDDEN else "Check the disk"
        raise OutputError(
            f"{part} cannot be read ({error.strerror or error}). {remedy} and run the same command again: committed "
            "rows are kept."
        ) from error


def write_durably(
    path: Path,
    write: Callable[[BinaryIO], object],
    temporary: Path | None = None,
    before_rename: Callable[[], None] | None = None,
) -> None:
    """Write a temporary file with `write`, then rename it to `path`: at every moment `path` is the old file or the new.

    Args:
        path: the final name.
        write: writes the content; if it raises, the temporary file is removed and `path` is unchanged.
        temporary: the temporary name, on the same file system; `path` with `.tmp` if None.
        before_rename: called when the temporary file is durable, before the rename.

    Raises:
        OutputError: the disk is full, permissions are missing, or another I/O error.
    """
    with output_errors(path):
        replace_durably(path, write, temporary or path.with_name(path.name + ".tmp"), before_rename)


def replace_durably(
    path: Path, write: Callable[[BinaryIO], object], temporary: Path, before_rename: Callable[[], None] | None = None
) -> None:
    """`write_durably`, which raises the errors of the operating system as they are.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        with open_new(temporary) as stream:
            write(stream)
            sync_stream(stream)
        if before_rename is not None:
            before_rename()
        rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            remove_file(temporary)
        raise
    sync_folder(path.parent)


def refuse_special(path: Path) -> None:
    """Refuse an output path that is not a regular file: a rename would replace even a device.

    Args:
        path: the path, from `followed`.

    Raises:
        OutputError: it is a folder, a device, a pipe or a socket, or a link that is not followed.
    """
    with output_errors(path):
        status = status_of(path, follow=False)
    if status is None or stat.S_ISREG(status.st_mode):
        return
    what = "is not a regular file"
    if stat.S_ISDIR(status.st_mode):
        what = "is a folder"
    elif stat.S_ISLNK(status.st_mode):
        what = "is a link that belongs to another user or leads in a circle"
    raise OutputError(f"{path} {what}. Name a file with -o.")


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Refuse an output path that exists, unless it is a regular file and `overwrite` is set.

    Raises:
        OutputError: it exists.
    """
    refuse_special(path)
    if exists(path) and not overwrite:
        raise OutputError(f"{path} exists. Replace it with --overwrite, or name another with -o.")
