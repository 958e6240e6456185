"""URLs of files: which are read and written, and paths that are URLs."""

from __future__ import annotations

import re
from pathlib import Path, PosixPath
from typing import Final, Self

from batchgen.config.units import SCHEME, check_local

_STORES: Final = ("s3", "gs", "az", "hf")
"""Schemes of storage services, whose files are read and written."""
HTTPS: Final = "https"
"""Scheme of files that are read only."""
_SUPPORTED: Final = "batchgen reads and writes s3://, gs://, az:// and hf://datasets/, and reads https://"


class RemotePath(PosixPath):
    """The path of a file of a storage service. As a text it is the URL, which the operating system does not open.

    File operations of `data.files` accept it in place of a local path.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def absolute(self) -> Self:
        """The path itself."""
        return self


def is_url(text: str) -> bool:
    """Whether a name of a file is a URL."""
    return SCHEME.match(text) is not None


def path_of(text: str) -> Path:
    """The path of a local file, or of a URL that `check_stored` has passed."""
    return RemotePath(text) if is_url(text) else Path(text)


def shown_url(url: str) -> str:
    """A name of a file for messages and records: an address at https:// without user and query, which may be secret."""
    if not url.lower().startswith(f"{HTTPS}://"):
        return url
    return re.sub(r"(?<=^.{8})[^/?#]*@", "", re.sub(r"[?#].*", "", url, flags=re.DOTALL))


def check_readable(name: str) -> str:
    """Return the name of a file to read: a URL with its scheme in lower case, or a local path as `check_local` does."""
    match = SCHEME.match(name)
    if match is None or match[1].lower() != HTTPS:
        return check_stored(name)
    rest = name[match.end() :]
    if not re.fullmatch(r"[^/?#\s]+/[^?#\s]+\S*", rest):
        raise ValueError(f"{shown_url(name)!r} must name a file of a server, such as https://example.org/data.jsonl")
    return f"{HTTPS}://{rest}"


def check_stored(name: str) -> str:
    """Return the name of a file to write or of a result: a URL of a storage service, or a local path.

    A URL has its scheme in lower case, and no empty part, `.` or `..`; it may end in a slash.
    """
    match = SCHEME.match(name)
    scheme = None if match is None else match[1].lower()
    if match is None or scheme == "file":
        return check_local(name)
    if scheme == HTTPS:
        raise ValueError(f"{shown_url(name)!r} is not a local path (https), and {_SUPPORTED}")
    if scheme not in _STORES:
        raise ValueError(f"{name!r} is not a local path ({match[1]}), and {_SUPPORTED}: copy the file, or mount it")
    rest = name[match.end() :]
    parts = rest.removesuffix("/").split("/")
    if "" in parts or {".", ".."} & {*parts} or "\0" in rest or len(parts) < 2:
        raise ValueError(f"{name!r} must be a bucket and a name without empty parts, such as {scheme}://bucket/name")
    if scheme == "hf" and parts[0] != "datasets":
        raise ValueError(f"{name!r} must name a dataset, such as hf://datasets/USER/NAME/data/train.parquet")
    return f"{scheme}://{rest}"
