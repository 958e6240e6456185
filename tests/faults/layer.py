"""A layer under the file operations of a job: it counts them, makes one fail, or ends the process at one.

It takes the place of the methods of `FileSystem`, and gives files whose system calls pass through it too. Operations
are numbered in the order in which they happen, in all threads together.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from batchgen.data.files import FileSystem

CHANGES = {"create", "write", "truncate", "fsync", "close", "sync_folder", "rename", "unlink", "mkdir", "rmdir"}
"""Operations that change files or make changes durable; the others look."""
OF_OPEN_FILES = {"fsync", "fstat", "flock", "mmap", "mmap_shared"}
NEEDS_SPACE = {"create", "write", "fsync", "close", "mkdir", "rename"}
"""Operations that a full disk refuses."""
NEEDS_WRITABLE = {"create", "write", "truncate", "rename", "unlink", "mkdir", "rmdir"}
"""Operations that a file system that became read-only refuses."""


class Layer:
    """Sees every operation on files below a folder, or of `/proc`, before it happens."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[str] = []
        """`NAME PATH` of each operation so far."""
        self.lock = threading.RLock()

    def before(self, name: str, path: Path, size: int | None = None) -> int | None:
        """Called before an operation: raises its error, or ends the process. `size`: bytes to be written.

        Returns:
            The number of bytes that a write writes; None for all.
        """
        self.operations.append(f"{name} {self._shown(path)}")
        return self.at(len(self.operations) - 1, name, size)

    def at(self, number: int, name: str, size: int | None) -> int | None:
        """What happens at operation `number`; here nothing."""
        return None

    def after(self, name: str, path: Path, *values: Any) -> None:
        """Called after an operation that changed something."""

    def _shown(self, path: Path) -> str:
        found = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links
        return str(found.relative_to(self.root) if found.is_relative_to(self.root) else found)


class Fail(Layer):
    """One operation fails with an error; with `from_then_on` all later ones of the kinds that it concerns as well."""

    def __init__(self, root: Path, number: int, code: int, *, from_then_on: bool = False) -> None:
        super().__init__(root)
        self.number = number
        self.code = code
        self.from_then_on = from_then_on
        self.failed: str | None = None
        """The operation that failed."""

    def at(self, number: int, name: str, size: int | None) -> None:
        concerned = {errno.ENOSPC: NEEDS_SPACE, errno.EDQUOT: NEEDS_SPACE, errno.EROFS: NEEDS_WRITABLE}
        due = number >= self.number if self.from_then_on else number == self.number
        if due and name in concerned.get(self.code, {name}):
            self.failed = self.failed or self.operations[number]
            raise OSError(self.code, os.strerror(self.code), self.operations[number].partition(" ")[2])


class ShortWrite(Layer):
    """From one operation on, a write writes only half of its bytes, and says so."""

    def __init__(self, root: Path, number: int) -> None:
        super().__init__(root)
        self.number = number

    def at(self, number: int, name: str, size: int | None) -> int | None:
        return max(1, size // 2) if name == "write" and size and number >= self.number else None


class Kill(Layer):
    """The process is killed at one operation, as by `kill -9`."""

    def __init__(self, root: Path, number: int) -> None:
        super().__init__(root)
        self.number = number

    def at(self, number: int, name: str, size: int | None) -> None:
        if number == self.number:
            os.kill(os.getpid(), signal.SIGKILL)


class SillyRename(Layer):
    """A file that is removed while it is open gets another name, which goes when it is closed, as on NFS."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.renamed: list[Path] = []
        """The other names."""
        self._open: dict[Path, list[_File]] = {}

    def before(self, name: str, path: Path, size: int | None = None) -> int | None:
        path = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links
        if name == "unlink" and any(not file.closed for file in self._open.get(path, ())):
            self.renamed.append(path.with_name(f".nfs{len(self.renamed):04d}"))
            self.renamed[-1].hardlink_to(path)
            for file in self._open.pop(path):
                file.hidden = self.renamed[-1]
        return super().before(name, path, size)

    def after(self, name: str, path: Path, *values: Any) -> None:
        path = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links
        if name in ("open", "create"):
            self._open.setdefault(path, []).append(values[0])
        elif name == "rename":
            self._open[Path(os.path.abspath(values[0]))] = self._open.pop(path, [])  # noqa: PTH100
        elif name == "close" and values[0].hidden is not None:
            values[0].hidden.unlink(missing_ok=True)


class _File(io.FileIO):
    """A file whose system calls pass through a layer."""

    layer: Layer
    path: Path
    number: int
    """The operation that opened it."""
    hidden: Path | None = None
    """The name that it has since it was removed."""

    def readinto(self, buffer: Any) -> int | None:  # type: ignore[override]
        with self.layer.lock:
            self.layer.before("read", self.path)
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self.layer.lock:
            self.layer.before("read", self.path)
            return super().readall()

    def read(self, size: int | None = -1) -> bytes:  # type: ignore[override]
        with self.layer.lock:
            self.layer.before("read", self.path)
            return super().read(-1 if size is None else size)

    def write(self, data: Any) -> int:
        with self.layer.lock:
            view = memoryview(data).cast("B")
            most = self.layer.before("write", self.path, len(view))
            at = self.tell()
            written = super().write(view[:most])
            self.layer.after("write", self.path, self, at, bytes(view[:written]))
            return written

    def truncate(self, size: int | None = None) -> int:
        with self.layer.lock:
            self.layer.before("truncate", self.path)
            done = super().truncate(size)
            self.layer.after("truncate", self.path, self, done)
            return done

    def close(self) -> None:
        with self.layer.lock:
            if self.closed:
                return
            try:
                self.layer.before("close", self.path)
            finally:
                super().close()
                self.layer.after("close", self.path, self)


@contextmanager
def in_place(layer: Layer) -> Iterator[None]:
    """Put a layer under the file operations of this process."""
    files: dict[int, _File] = {}
    real = {name: getattr(FileSystem, name) for name in vars(FileSystem) if not name.startswith("_")}

    def open_file(system: FileSystem, path: Path, flags: int) -> io.FileIO:
        with layer.lock:
            new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            layer.before("create" if new else "open", path)
            mode = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "r+"}[flags & os.O_ACCMODE]
            file = _File(path, mode, opener=lambda name, _: os.open(name, flags | os.O_CLOEXEC, 0o666))
            file.layer, file.path, file.number = layer, path, len(layer.operations)
            files[file.fileno()] = file
            layer.after("create" if new else "open", path, file, flags)
            return file

    def of_descriptor(name: str) -> Callable[..., Any]:
        def operation(system: FileSystem, descriptor: int, *more: Any) -> Any:
            with layer.lock:
                file = files.get(descriptor)
                layer.before(name, Path("stdin") if file is None else file.path)
                done = real[name](system, descriptor, *more)
                layer.after(name, Path("stdin") if file is None else file.path, file)
                return done

        return operation

    def of_path(name: str) -> Callable[..., Any]:
        def operation(system: FileSystem, path: Path, *more: Any, **options: Any) -> Any:
            with layer.lock:
                layer.before(name, path)
                done = real[name](system, path, *more, **options)
                layer.after(name, path, *more)
                return done

        return operation

    replaced = {name: (of_descriptor if name in OF_OPEN_FILES else of_path)(name) for name in real}
    with patch.multiple(FileSystem, **{**replaced, "open": open_file}):
        yield
