"""What a worker is doing, in a file that outlives it: counts, and the input in work."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.fuzzer import MAX_BYTES

_HEAD = struct.Struct("<QQQdQ")
_SIZE = _HEAD.size + 4 * MAX_BYTES


@dataclass(frozen=True, slots=True)
class State:
    """A reading of a record."""

    inputs: int
    """Number of inputs that were checked."""
    failures: int
    """Number of inputs that broke a promise."""
    base_bytes: int
    """Memory of the worker before its first input; 0 until then."""
    since: float
    """Time at which the input in work was begun, as by `time.monotonic`; 0 before the first."""
    data: bytes
    """The input in work."""


class Record:
    """A record as its worker writes it: memory that is shared with a file."""

    def __init__(self, path: Path) -> None:
        """Create the record, or go on with the counts of an earlier worker."""
        former = read_record(path) if path.exists() else State(0, 0, 0, 0.0, b"")
        with path.open("w+b") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self.inputs, self.failures, self.base_bytes = former.inputs, former.failures, 0
        self._write(0.0, b"")

    def begin(self, data: bytes) -> None:
        """An input is begun."""
        self._write(time.monotonic(), data)

    def end(self, *, failed: bool) -> None:
        """The input in work is done."""
        self.inputs += 1
        self.failures += failed

    def _write(self, since: float, data: bytes) -> None:
        kept = data[: _SIZE - _HEAD.size]
        self._map[: _HEAD.size] = _HEAD.pack(self.inputs, self.failures, self.base_bytes, since, len(kept))
        self._map[_HEAD.size : _HEAD.size + len(kept)] = kept

    def close(self) -> None:
        """Write the last counts."""
        self._write(0.0, b"")
        self._map.close()


def read_record(path: Path) -> State:
    """The record of a worker that may be running or dead."""
    content = path.read_bytes()
    if len(content) < _HEAD.size:
        return State(0, 0, 0, 0.0, b"")
    inputs, failures, base, since, size = _HEAD.unpack_from(content)
    return State(inputs, failures, base, since, content[_HEAD.size : _HEAD.size + size])
