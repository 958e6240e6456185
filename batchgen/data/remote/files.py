"""Operations on files at URLs, with the signatures of those on local files in `data.files`."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from batchgen.config.urls import RemotePath
from batchgen.data.remote.service import CHANGED, fresh, request, state_of
from batchgen.request.foreign_text import ForeignTextError, read_json, typed

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BUFFER: Final = 1 << 17
_READ_LEAST: Final = 1 << 16
_READ_MOST: Final = 1 << 24
"""Bytes of a request of a reader: the most while it reads on, the least where it has moved to."""
_PART: Final = 1 << 23
"""Bytes of a part of an upload: services want at least 5 MiB, and multiples of 256 KiB."""
_MOST_PARTS: Final = 9000
Opener = Callable[[], BinaryIO]


class RemoteReader(io.RawIOBase):
    """Reader of the bytes of a URL, which asks for one range after the other, larger ones as it reads on."""

    def __init__(self, url: str, size: int) -> None:
        super().__init__()
        self._url = url
        self._size = size
        self._position = 0
        self._start = 0
        self._block = b""
        """The bytes from `_start` on."""
        self._ask = _READ_LEAST

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position; nothing is requested."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read some bytes."""
        view = memoryview(buffer).cast("B")
        if not self._start <= self._position < self._start + len(self._block):
            self._request(len(view))
        at = self._position - self._start
        data = self._block[at : at + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _request(self, least: int) -> None:
        reads_on = self._position == self._start + len(self._block)
        self._ask = min(2 * self._ask, _READ_MOST) if reads_on else _READ_LEAST
        start = self._position
        end = min(self._size, start + max(least, self._ask))
        read = (
            request(self._url, lambda service, path: service.cat_file(path, start=start, end=end))
            if start < end
            else b""
        )
        if len(read) != max(0, end - start):
            raise OSError(errno.ESTALE, f"{len(read)} bytes were read where {end - start} are", self._url)
        self._start, self._block = start, read


def open_url(url: str, size: int) -> io.BufferedReader:
    """Open a file of `size` bytes for reading; nothing is requested."""
    return io.BufferedReader(RemoteReader(url, size), _BUFFER)


class RemoteFiles:
    """File operations on `RemotePath`s, which raise `OSError`s as those on local paths do."""

    def __init__(self) -> None:
        self._versions: dict[RemotePath, str | None] = {}
        """Path -> the version that an upload may replace; None: there was no file."""

    def note_version(self, path: RemotePath) -> None:
        """Note the version of a file that an upload may replace."""
        self._versions[path] = _version(str(path))

    def open(self, path: RemotePath, flags: int) -> io.RawIOBase:
        """Open a file for reading, without a buffer."""
        return RemoteReader(str(path), state_of(str(path)).size or 0)

    def stat(self, path: RemotePath, *, follow: bool = True) -> os.stat_result:
        """State of a file or a folder. The inode number follows from the version of the content."""
        state = state_of(str(path))
        mode = stat.S_IFDIR | 0o755 if state.is_folder else stat.S_IFREG | 0o644
        return os.stat_result((mode, zlib.crc32(state.etag.encode()), 0, 1, 0, 0, state.size or 0, 0, 0, 0))

    def listdir(self, folder: RemotePath) -> list[str]:
        """Names in a folder."""
        found = request(str(folder), lambda service, path: fresh(service).ls(path, detail=False))
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    def unlink(self, path: RemotePath) -> None:
        """Remove a file."""
        state_of(str(path))  # a service removes what is missing without an error
        request(str(path), lambda service, name: service.rm_file(name))
        if path in self._versions:
            self._versions[path] = None

    def upload(self, target: RemotePath, size: int, source: Opener, note: Callable[[bytes], None]) -> None:
        """Write a file, which becomes visible in one operation, and replaces only the version that was noted.

        `source` opens its `size` bytes. `note` is given the name of an upload of several parts, for `abort_upload`.

        Raises:
            FileExistsError: another program has written the file.
            OSError: as `request`; what is there stays.
        """
        url, part = str(target), max(_PART, -(-size // (_MOST_PARTS << 20)) << 20)
        scheme = url.partition("://")[0]
        known = self._versions[target] if target in self._versions else _version(url)

        def send(service: Any, path: str, conditional: bool = True) -> None:
            mode = "xb" if conditional and known is None and scheme != "hf" else "wb"
            replaces = {"IfMatch": known} if conditional and known is not None and scheme == "s3" else {}
            stream, noted = service.open(path, mode, block_size=part, **replaces), False
            try:
                with source() as file:
                    while block := file.read(part):
                        stream.write(block)
                        if not noted and (upload := getattr(stream, "mpu", None)):
                            note(json.dumps({"url": url, "upload": upload["UploadId"]}).encode())
                            noted = True
                stream.close()
            except BaseException:
                with suppress(Exception):
                    stream.discard()
                stream.closed = True  # closing it, also when it is collected, would publish what was written
                raise

        try:
            _check_version(url, known)
            try:
                request(url, send)
            except OSError as problem:
                if problem.errno != errno.EINVAL:
                    raise
                _check_version(url, known)  # a service without conditional writes
                request(url, partial(send, conditional=False))
        except FileExistsError:
            if not _is_copy(url, source, size):  # else a try whose answer was lost has written it
                raise
        state = state_of(url)
        if state.size != size:
            raise OSError(errno.EIO, f"{state.size} bytes are there after {size} were sent", url)
        self._versions[target] = state.etag


remote = RemoteFiles()
"""The operations in use."""


def _version(url: str) -> str | None:
    try:
        return state_of(url).etag
    except FileNotFoundError:
        return None


def _check_version(url: str, known: str | None) -> None:
    if _version(url) != known:
        raise FileExistsError(errno.EEXIST, CHANGED, url)


def _is_copy(url: str, source: Opener, size: int) -> bool:
    """Whether a URL has the bytes of a local file, by their number and the last of them: checksums of all others."""
    if state_of(url).size != size:
        return False
    with source() as mine, open_url(url, size) as its:
        for stream in (mine, its):
            stream.seek(max(0, size - _BUFFER))
        return mine.read() == its.read()


def abort_upload(note: bytes) -> None:
    """Abort an upload that a killed process has left: services keep, and bill, its parts. If that fails, it is left."""
    with suppress(OSError, ForeignTextError):
        left = typed(read_json(note), {"url": str, "upload": str})

        def abort(service: Any, path: str) -> None:
            bucket, key, _ = service.split_path(path)
            service.abort_mpu(bucket, key, left["upload"])

        request(left["url"], abort)
