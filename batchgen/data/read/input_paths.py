"""Names of input files: globs and folders expanded, local or at URLs, folders named `key=value` read as columns."""

from __future__ import annotations

import glob
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote

from batchgen.config.units import STDIN
from batchgen.config.urls import check_readable, is_url, path_of, shown_url
from batchgen.data.files import is_file, open_named
from batchgen.data.read.formats import SUFFIXES, InputFormat
from batchgen.data.read.streams import COMPRESSIONS, Compression
from batchgen.data.remote.service import files_below
from batchgen.errors import InputError, UsageError
from batchgen.request.foreign_text import ForeignTextError, read_json, typed
from batchgen.request.printable import encodable

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""Value of a `key=value` folder that means null."""
_DOCUMENTS = frozenset({".md", ".crc"})
_DOCUMENT_NAMES = frozenset({"license", "readme"})
"""Files in a folder of data that hold no data: descriptions and checksums."""
_SMALL = 1 << 20


def expand(paths: Sequence[str], reserved: Container[str], format: InputFormat | None) -> Iterator[str]:
    """The files that paths, globs and folders name.

    Files are in the order given, sorted within each glob and folder; both leave out `reserved` files.

    Args:
        paths: as the user gives them: of files of this machine, or URLs.
        reserved: the job's own files.
        format: the only format to look for in folders; None for any one.

    Raises:
        InputError: no file is named or matched, standard input is named twice, or a folder holds other files.
        UsageError: a URL is not supported, or a named file is one of `reserved`.
    """
    if not paths:
        raise InputError("No input was named.")
    if list(paths).count(STDIN) > 1:
        raise InputError("Standard input (-) is named twice; it can be read once.")
    try:
        paths = [path if path == STDIN else check_readable(path) for path in paths]
    except ValueError as problem:
        raise UsageError(f"input {problem}") from None
    for path in paths:
        yield from _expand(path, reserved, format)


def partitions_of(path: str) -> tuple[tuple[str, str | None], ...]:
    """(key, value) of each folder named `key=value` in the path, from the top; None for the value that means null.

    Raises:
        InputError: a key occurs twice with different values.
    """
    values: dict[str, str | None] = {}
    for folder in PurePath(shown_url(path)).parts[:-1]:
        key, sign, text = folder.partition("=")
        if key and sign:
            name, value = encodable(unquote(key)), None if text == _NULL_PARTITION else encodable(unquote(text))
            if values.setdefault(name, value) != value:
                raise InputError(f"{path}: two of its folders give different values of {name!r}; rename one of them.")
    return tuple(values.items())


def _expand(pattern: str, reserved: Container[str], format: InputFormat | None) -> Iterator[str]:
    several = None if pattern == STDIN else _remote_files(pattern) if is_url(pattern) else _local_files(pattern)
    if several is None:
        if pattern != STDIN and pattern in reserved:
            raise UsageError(f"{pattern} is a file of the job's own output; name another input, or another output (-o)")
        yield pattern
        return
    is_folder, matches = several
    if is_folder:
        yield from _files_of(pattern, matches, reserved, format)
        return
    matches = sorted(matches)
    files = [path for path in matches if path not in reserved]
    if not files:
        exception = " but the job's own output" if matches else ""
        raise InputError(f"{pattern}: no file matches{exception}. Check the pattern and the working directory.")
    yield from files


def _local_files(pattern: str) -> tuple[bool, Iterable[str]] | None:
    """(whether it is a folder, the files below it or that match a pattern); None for the name of one file."""
    if Path(pattern).is_dir():
        return True, _walk(pattern)
    if not glob.has_magic(pattern) or os.path.lexists(pattern):
        return None
    matches = glob.glob(pattern, recursive=True)  # noqa: PTH207 - absolute patterns and strings as given
    return False, (path for path in matches if not Path(path).is_dir())


def _remote_files(url: str) -> tuple[bool, Iterable[str]] | None:
    """As `_local_files`, of a service."""
    try:
        files = files_below(url)
    except OSError as error:
        raise unreadable(url, error) from None
    if files is None or glob.has_magic(url):
        return None if files is None else (False, files)
    start = len(url.rstrip("/"))
    return True, (file for file in files if not any(map(_is_hidden, file[start:].split("/"))))


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _files_of(folder: str, below: Iterable[str], reserved: Container[str], format: InputFormat | None) -> Sequence[str]:
    """The input files, of one format, among the files below a folder that are not hidden, sorted.

    Hidden are names of files and folders that begin with a dot or an underscore, as `_SUCCESS`.
    """
    if (format is None or format is SUFFIXES[".arrow"]) and (saved := _saved_dataset(folder)) is not None:
        return saved
    files: dict[str, InputFormat | None] = {}
    for path in below:
        suffix, _ = suffix_of(path)
        known = SUFFIXES.get(suffix)
        document = suffix in _DOCUMENTS or PurePath(path).stem.lower() in _DOCUMENT_NAMES
        if path not in reserved and not document and (format is None or known is format):
            files[path] = known
    pattern = f"{folder.rstrip('/')}/**/*"
    if not files:
        what = "input files" if format is None else f"{format.name} files"
        raise InputError(f"{folder} is a folder that holds no {what}. Check its name, or name files: '{pattern}'.")
    unknown = next((path for path, known in files.items() if known is None), None)
    if unknown is not None:
        raise InputError(f"{unknown} is of an unknown kind. Name the files of the folder, as '{pattern}.parquet'.")
    names = sorted({known.name for known in files.values() if known is not None})
    if len(names) > 1:
        remedy = "choose with --input-format, or name files with a pattern"
        raise InputError(f"{folder} holds files of several formats ({', '.join(names)}); {remedy}, as '{pattern}'.")
    return sorted(files, key=lambda path: PurePath(path).parts)


def _saved_dataset(folder: str) -> list[str] | None:
    """The files of a dataset that `datasets.save_to_disk` has written, in its order; None for other folders.

    Raises:
        InputError: the folder holds several datasets, the splits of one.
    """
    base = folder.rstrip("/")
    files, splits = _listed(f"{base}/state.json", "_data_files"), _listed(f"{base}/dataset_dict.json", "splits")
    names = [file["filename"] for file in files if isinstance(file, dict) and isinstance(file.get("filename"), str)]
    if names:
        return [f"{base}/{PurePath(name).name}" for name in names]
    if splits:
        named = f"{', '.join(map(str, splits))} of a dataset. Name one: {base}/{splits[0]}"
        raise InputError(f"{folder} holds the splits {named}")
    return None


def _listed(name: str, key: str) -> list[Any]:
    """The list under a key of a JSON file; empty if there is none."""
    path = path_of(name)
    try:
        if is_file(path):
            with open_named(path) as stream, suppress(ForeignTextError):
                return list(typed(read_json(stream.read(_SMALL)), {key: list})[key])
    except OSError as error:
        raise unreadable(name, error) from None
    return []


def unreadable(name: str, error: OSError) -> InputError:
    """The error of an input that cannot be read."""
    remedy = {
        FileNotFoundError: " Check the name and the working directory.",
        PermissionError: " Check its permissions.",
    }.get(type(error), " Check the disk, or copy the file.")
    return InputError(f"{shown_url(name)} cannot be read ({error.strerror or error}).{'' if is_url(name) else remedy}")


def _walk(folder: str) -> Iterator[str]:
    """Files below a folder that are not hidden; a folder that links lead to again is visited once."""
    seen = set[str]()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        folders[:] = [] if real in seen else sorted(name for name in folders if not _is_hidden(name))
        if real not in seen:
            yield from (os.path.join(parent, name) for name in files if not _is_hidden(name))  # noqa: PTH118
        seen.add(real)


def suffix_of(path: str) -> tuple[str, Compression | None]:
    """(suffix in lower case, without that of a compression; the compression that this names)."""
    inner, last = os.path.splitext(shown_url(path).lower())  # noqa: PTH122 - Path handles one suffix only
    return os.path.splitext(inner)[1] if last in COMPRESSIONS else last, COMPRESSIONS.get(last)  # noqa: PTH122
