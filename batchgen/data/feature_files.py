"""Features of images and sounds in a work folder, so that a run that continues the job does not encode them again.

They are a cache, in the files `features/NUMBER.features`. Each has records, one after the other:

```
header    magic, name of the features, rows, width, bytes of a number, CRC-32 of the values, CRC-32 of the header
values    [rows, width] float32, or their upper halves if the lower ones are zero, as those of bfloat16 are
```

A file is only appended to, by one run, and removed when none of its records is needed. Nothing is synced: whatever a
killed run, a power loss or a failing disk has left of a record, it is used only if it has its checksums.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from batchgen.data.files import files_in, free_bytes, make_durably, open_new, open_own, remove_file
from batchgen.data.states import pack_values, unpack_values

Floats = npt.NDArray[np.float32]

FILE_BYTES: Final = 64 << 20
"""Bytes after which another file begins."""
MOST_BYTES: Final = 8 << 30
"""Most bytes of all files; features beyond them are not kept."""
WAITING_BYTES: Final = 128 << 20
"""Most bytes of features that wait to be written; features beyond them are not kept."""
LEFT_BYTES: Final = 256 << 20
"""Bytes of the disk that are left to results: nothing is kept on a disk that has less."""

_MAGIC: Final = b"bgfeat01"
_HEADER: Final = struct.Struct("<8s32s4I")
_CRC: Final = struct.Struct("<I")
_HEAD_BYTES: Final = _HEADER.size + _CRC.size


@dataclass(frozen=True, slots=True)
class _Record:
    path: Path
    at: int
    """Where its values begin."""
    rows: int
    width: int
    number_bytes: int
    crc: int

    @property
    def size(self) -> int:
        """Bytes of the values."""
        return self.rows * self.width * self.number_bytes


class FeatureFiles:
    """Features by item number, written by a separate thread.

    Args:
        folder: the folder of the files, made if it is missing.
        names: item number -> 32 bytes that are equal only if the features are equal, of each item that may be needed.
        note: shows a line to the user.
    """

    def __init__(self, folder: Path, names: Mapping[int, bytes], note: Callable[[str], None]) -> None:
        self._folder = folder
        self._names = names
        self._note = note
        self._records: dict[bytes, _Record] = {}
        self._needed: Counter[Path] = Counter()
        """File -> number of its records that are needed."""
        self._sizes: dict[Path, int] = {}
        self._stream: BinaryIO | None = None
        """The file that is appended to."""
        self._path = folder
        self._number = 0
        self._waiting: dict[bytes, int] = {}
        """Name -> bytes of features that are not written yet."""
        self._problem: str | None = None
        """Why nothing is kept any more."""
        self._noted = False
        self._closed = False
        self._lock = RLock()
        """Held for all of this but while values are written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="features")
        self._open()

    def __contains__(self, number: int) -> bool:
        return self._names.get(number) in self._records

    def add(self, number: int, values: Floats) -> None:
        """Begin to keep features [F, W], unless they are kept or there is no room.

        Neither a disk that is slow nor one that cannot be written keeps a job from going on: what it cannot take is
        not kept.
        """
        self._note_problem()
        name = None if self._closed else self._names.get(number)
        with self._lock:
            waits = sum(self._waiting.values())
            if name is None or name in self._records or name in self._waiting or self._problem is not None:
                return
            if waits and waits + values.nbytes > WAITING_BYTES:
                return
            self._waiting[name] = values.nbytes
        self._thread.submit(self._write, name, values)

    def read(self, number: int) -> Floats | None:
        """[F, W] features; None, and they are kept no more, if they are damaged or cannot be read."""
        record, data = self._records[self._names[number]], b""
        with suppress(OSError), open_own(record.path) as stream:
            stream.seek(record.at)
            data = stream.read(record.size)
        if len(data) != record.size or zlib.crc32(data) != record.crc:
            self.remove(number)
            return None
        packed = "float32" if record.number_bytes == 4 else "bfloat16"
        return unpack_values(data, packed).reshape(record.rows, record.width)

    def remove(self, number: int) -> None:
        """Keep the features of an item no longer, if they are kept."""
        name = self._names.get(number, b"")
        with self._lock:
            self._waiting.pop(name, None)
            record = self._records.pop(name, None)
            if record is not None:
                self._needed[record.path] -= 1
                self._remove_if_free(record.path)

    def close(self) -> None:
        """Write what waits. The files stay."""
        self._closed = True
        self._thread.shutdown()
        with self._lock:
            self._close_stream()
        self._note_problem()

    def _open(self) -> None:
        """Find the records that earlier runs have left; files without one that is needed are removed."""
        names = set(self._names.values())
        try:
            make_durably(self._folder)
            for path in files_in(self._folder, "*.features"):
                self._number = max(self._number, int(path.stem) + 1 if path.stem.isdecimal() else 0)
                with suppress(OSError), open_own(path) as stream:
                    self._sizes[path] = _read_records(stream, path, names, self._record)
                    self._remove_if_free(path)
        except OSError as error:
            self._problem = error.strerror or str(error)

    def _record(self, name: bytes, record: _Record) -> None:
        if name not in self._records:
            self._records[name] = record
            self._needed[record.path] += 1

    def _write(self, name: bytes, values: Floats) -> None:
        try:
            if name in self._waiting and self._problem is None:
                self._append(name, values)
        except (OSError, MemoryError) as error:
            with self._lock:
                self._problem = getattr(error, "strerror", None) or str(error) or "too little memory"
                self._close_stream()
                self._remove_if_free(self._path)
        finally:
            with self._lock:
                self._waiting.pop(name, None)

    def _append(self, name: bytes, values: Floats) -> None:
        (rows, width), (_, numbers) = values.shape, pack_values(np.ascontiguousarray(values), "bfloat16")
        data, number_bytes = numbers.reshape(-1).view(np.uint8).data, numbers.itemsize
        crc = zlib.crc32(data)
        head = _HEADER.pack(_MAGIC, name, rows, width, number_bytes, crc)
        with self._lock:
            if sum(self._sizes.values()) + _HEAD_BYTES + len(data) > MOST_BYTES:
                return
            stream = self._stream_for(_HEAD_BYTES + len(data))
        stream.write(head + _CRC.pack(zlib.crc32(head)))
        stream.write(data)
        stream.flush()
        with self._lock:
            at = self._sizes[self._path] + _HEAD_BYTES
            self._sizes[self._path] = at + len(data)
            if name in self._waiting:
                self._record(name, _Record(self._path, at, rows, width, number_bytes, crc))

    def _stream_for(self, size: int) -> BinaryIO:
        """The file that a record is appended to."""
        if self._stream is not None and self._sizes[self._path] + size <= FILE_BYTES:
            return self._stream
        self._close_stream()
        self._remove_if_free(self._path)
        if free_bytes(self._folder) < LEFT_BYTES + size:
            raise OSError("the disk is almost full")
        path = self._folder / f"{self._number:06d}.features"
        self._number += 1
        self._stream, self._path, self._sizes[path] = open_new(path), path, 0
        return self._stream

    def _close_stream(self) -> None:
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
            self._stream = None

    def _remove_if_free(self, path: Path) -> None:
        is_open = self._stream is not None and path == self._path
        if path in self._sizes and not self._needed[path] and not is_open:
            with suppress(OSError):
                remove_file(path)
                del self._sizes[path]

    def _note_problem(self) -> None:
        if self._problem is not None and not self._noted:
            self._noted = True
            self._note(
                f"features of images and sounds are not kept in {self._folder} ({self._problem}): a run that continues "
                "this job encodes them again"
            )


def _read_records(stream: BinaryIO, path: Path, names: set[bytes], keep: Callable[[bytes, _Record], None]) -> int:
    """Call `keep` with each whole record of `names`, up to the first damage; returns the size of the file."""
    end = stream.seek(0, 2)
    at = stream.seek(0)
    while len(head := stream.read(_HEAD_BYTES)) == _HEAD_BYTES:
        magic, name, rows, width, number_bytes, crc = _HEADER.unpack_from(head)
        if magic != _MAGIC or _CRC.unpack_from(head, _HEADER.size)[0] != zlib.crc32(head[: _HEADER.size]):
            break
        record = _Record(path, at + _HEAD_BYTES, rows, width, number_bytes, crc)
        at = record.at + record.size
        if at > end:
            break
        if name in names:
            keep(name, record)
        stream.seek(at)
    return end
