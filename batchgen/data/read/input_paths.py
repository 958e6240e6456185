"""Paths of input files: globs and folders expanded, folders named `key=value` read as columns."""

from __future__ import annotations

import glob
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path, PurePath
from urllib.parse import unquote

from batchgen.config.units import STDIN, check_local
from batchgen.data.read.formats import SUFFIXES, InputFormat
from batchgen.data.read.streams import COMPRESSIONS, Compression
from batchgen.errors import InputError, UsageError
from batchgen.request.printable import encodable

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""Value of a `key=value` folder that means null."""
_DOCUMENTS = frozenset({".md", ".crc"})
_DOCUMENT_NAMES = frozenset({"license", "readme"})
"""Files in a folder of data that hold no data: descriptions and checksums."""


def expand(paths: Sequence[str], reserved: Container[str], format: InputFormat | None) -> Iterator[str]:
    """The files that paths, globs and folders name.

    Files are in the order given, sorted within each glob and folder; both leave out `reserved` files.

    Args:
        paths: as the user gives them.
        reserved: the job's own files.
        format: the only format to look for in folders; None for any one.

    Raises:
        InputError: no file is named or matched, standard input is named twice, or a folder holds other files.
        UsageError: a path is not local, or a named file is one of `reserved`.
    """
    if not paths:
        raise InputError("No input was named.")
    if list(paths).count(STDIN) > 1:
        raise InputError("Standard input (-) is named twice; it can be read once.")
    for path in paths:
        try:
            check_local(path)
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
    for folder in PurePath(path).parts[:-1]:
        key, sign, text = folder.partition("=")
        if key and sign:
            name, value = encodable(unquote(key)), None if text == _NULL_PARTITION else encodable(unquote(text))
            if values.setdefault(name, value) != value:
                raise InputError(f"{path}: two of its folders give different values of {name!r}; rename one of them.")
    return tuple(values.items())


def _expand(pattern: str, reserved: Container[str], format: InputFormat | None) -> Iterator[str]:
    if pattern != STDIN and Path(pattern).is_dir():
        yield from _files_of(pattern, reserved, format)
        return
    if pattern == STDIN or not glob.has_magic(pattern) or os.path.lexists(pattern):
        if pattern != STDIN and pattern in reserved:
            raise UsageError(f"{pattern} is a file of the job's own output; name another input, or another output (-o)")
        yield pattern
        return
    matches = glob.glob(pattern, recursive=True)  # noqa: PTH207 - absolute patterns and strings as given
    matches = sorted(path for path in matches if not Path(path).is_dir())
    files = [path for path in matches if path not in reserved]
    if not files:
        exception = " but the job's own output" if matches else ""
        raise InputError(f"{pattern}: no file matches{exception}. Check the pattern and the working directory.")
    yield from files


def _files_of(folder: str, reserved: Container[str], format: InputFormat | None) -> list[str]:
    """The input files, of one format, in a folder and those below it, sorted.

    Hidden files and folders are left out: names that begin with a dot or an underscore, as `_SUCCESS`.
    """
    files: dict[str, InputFormat | None] = {}
    for path in _walk(folder):
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


def _walk(folder: str) -> Iterator[str]:
    """Files below a folder that are not hidden; a folder that links lead to again is visited once."""
    seen = set[str]()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith((".", "_")))
        if real not in seen:
            yield from (os.path.join(parent, name) for name in files if not name.startswith((".", "_")))  # noqa: PTH118
        seen.add(real)


def suffix_of(path: str) -> tuple[str, Compression | None]:
    """(suffix in lower case, without that of a compression; the compression that this names)."""
    inner, last = os.path.splitext(path.lower())  # noqa: PTH122 - Path handles one suffix only
    return os.path.splitext(inner)[1] if last in COMPRESSIONS else last, COMPRESSIONS.get(last)  # noqa: PTH122
