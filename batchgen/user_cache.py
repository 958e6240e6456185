"""Short values that are kept in the user's cache folder, such as digests of large files.

An entry that is damaged, of another user, or about something else is not used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from typing import Final

_KEPT: Final = 1024
"""Entries kept of each kind."""
_GPU_FILES: Final = ("nvidia*", "kfd", "dxg")
"""Device files of GPUs."""
_GPU_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def kept_value(kind: str, name: str, about: Sequence[object]) -> str | None:
    """The value that `keep_value` kept with the same arguments; None if there is none, or none that can be believed."""
    if not hasattr(os, "getuid"):
        return None
    try:
        with FileIO(cache_folder(kind) / name, opener=_open_entry) as stream:
            content, owner = stream.read(1024), os.fstat(stream.fileno()).st_uid
    except (OSError, RuntimeError):  # the latter: the user has no home folder
        return None
    words = content.split()
    value = words[len(about)].decode("ascii", "replace") if len(words) > len(about) else ""
    return value if owner == os.getuid() and content == _line(about, value) else None


def keep_value(kind: str, name: str, about: Sequence[object], value: str) -> None:
    """Keep a value, if the folder can be written, and drop the oldest of its kind.

    Args:
        kind: name of the folder of entries.
        name: name of the entry.
        about: what the value is of; words without spaces.
        value: one word.
    """
    with suppress(OSError, RuntimeError):
        entry = cache_folder(kind) / name
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=entry.parent) as folder:
            made = Path(folder) / entry.name
            made.write_bytes(_line(about, value))
            made.replace(entry)  # atomic: another process may be reading
        entries = [path for path in entry.parent.iterdir() if path.is_file()]
        for old in sorted(entries, key=lambda path: path.stat().st_mtime_ns, reverse=True)[_KEPT:]:
            old.unlink()


def cache_folder(kind: str) -> Path:
    """Folder of one kind of entries in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "batchgen" / kind


def machine_words() -> list[str]:
    """What the choice of a device and of its numbers depends on."""
    words = [platform.machine(), *(os.environ.get(name, "") for name in _GPU_VARIABLES)]
    words += sorted(str(path) for pattern in _GPU_FILES for path in Path("/dev").glob(pattern))
    with suppress(OSError):
        words.append(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        words.append(next((line for line in lines if line.startswith(("flags", "Features"))), ""))
    return words


def _line(about: Sequence[object], value: str) -> bytes:
    """Content of an entry: what it is about, the value, and a checksum of both."""
    text = " ".join(map(str, (*about, value)))
    return f"{text} {hashlib.sha256(text.encode()).hexdigest()}\n".encode()


def _open_entry(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe under the name is not waited for


def library_version(library: str) -> str | None:
    """The version of an installed library; None if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None
