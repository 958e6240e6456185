"""State of a work folder: `run.json`, and the copy of it that each part holds in its footer.

The copy says what the work will replace, so that `show` and a run know it whatever the clock says, also if `run.json`
is damaged.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, Final

from batchgen.data.durable_files import NO_FILE, part_errors, write_durably
from batchgen.data.files import open_named, open_own, status_of
from batchgen.data.lines import is_lines
from batchgen.data.results_file import DamagedFile, open_part
from batchgen.data.schema import FINGERPRINT_KEY
from batchgen.data.store.sealed_json import sealed, unsealed
from batchgen.data.store.work_parts import part_files
from batchgen.errors import BatchgenError
from batchgen.request.foreign_text import Kinds, read_json, typed

STATE_NAME: Final = "run.json"
STATE_KEY: Final = b"batchgen.work"
"""Footer key of a part: the state of its work folder, JSON without what only messages need."""

_DEFAULTS: Final[Mapping[str, Any]] = {"overwrite": False, "emptied_by": None, "replaces": None, "clock": None}
_STATE: Final[Mapping[str, Any]] = {**_DEFAULTS, "written": None}
_KINDS: Final[Kinds] = {
    "overwrite": (bool, NoneType),
    "emptied_by": (str, NoneType),
    "replaces": (str, int, NoneType),  # earlier versions wrote an inode
    "clock": (str, NoneType),
}
_MARKED: Final = 1 << 16
"""Bytes at the end of a file that its mark depends on: there, a results file has its footer with its checksums."""


def read_state(work: Path) -> dict[str, Any] | None:
    """The state of a work folder: that of `run.json`, else the copy in its newest part; None if there is none.

    A copy has no `info`.

    Raises:
        OutputError: a file that may be intact cannot be read.
    """
    with suppress(ValueError):
        return _read(work)
    return _copy(work)


def state_damage(work: Path) -> str | None:
    """Reason why `run.json` cannot be used; None if it is intact or missing.

    Raises:
        OutputError: the file cannot be read now.
    """
    try:
        _read(work)
    except ValueError as problem:
        return str(problem)
    return None


def _read(work: Path) -> dict[str, Any] | None:
    path = work / STATE_NAME
    with suppress(*NO_FILE), part_errors(path), open_own(path) as stream:
        return {**_STATE, **typed(unsealed(stream.read()), {**_KINDS, "fingerprint": str, "info": dict})}
    return _copy(work)


def _copy(work: Path) -> dict[str, Any] | None:
    for part in reversed(part_files(work)):
        with suppress(DamagedFile, KeyError, ValueError), open_part(part) as table:
            state = typed(read_json(table.about[STATE_KEY], unwritable=True), _KINDS)
            return {**_STATE, **state, "fingerprint": table.about[FINGERPRINT_KEY].decode(), "info": None}
    return None


def write_state(work: Path, state: Mapping[str, Any]) -> None:
    """Write `run.json` durably.

    Raises:
        OutputError: it cannot be written.
    """

    def write(stream: BinaryIO) -> None:
        stream.write(sealed(state))

    write_durably(work / STATE_NAME, write)


def state_copy(state: Mapping[str, Any]) -> dict[bytes, bytes]:
    """The footer entry of a part."""
    return {STATE_KEY: json.dumps({name: state.get(name) for name in _DEFAULTS}, sort_keys=True).encode()}


def replaced_by(part: Path) -> str | None:
    """The mark of the file that the work of a part will replace; None if there is none, or the part is damaged."""
    with suppress(BatchgenError, KeyError, ValueError), open_part(part) as table:
        mark = typed(read_json(table.about[STATE_KEY], unwritable=True), _KINDS)["replaces"]
        return mark if isinstance(mark, str) else None
    return None


def file_mark(path: Path) -> str | None:
    """A short text that tells a file from others by its content, wherever it is moved; None if there is none.

    JSON lines do not say when they were written, so that equal ones differ by their inode.
    """
    status = status_of(path)
    if status is None:
        return None
    with open_named(path) as stream:
        stream.seek(max(0, status.st_size - _MARKED))
        mark = f"{status.st_size}:{zlib.crc32(stream.read()):08x}"
    return f"{mark}:{status.st_ino}" if is_lines(path) else mark
