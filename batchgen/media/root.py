"""Resolution of file names in rows, restricted to the folder `--media-root`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from batchgen.errors import ErrorCode, UsageError
from batchgen.request.checks import error_at, show

_error = partial(error_at, ErrorCode.MEDIA_ERROR)


class MediaRoot:
    """Folder whose files rows may name. Names are relative, without `..`; links must not lead out of the folder."""

    def __init__(self, folder: str | None) -> None:
        """Create the root; with `folder` None, rows cannot name files.

        Raises:
            UsageError: the folder does not exist.
        """
        self._root = None if folder is None else Path(folder).expanduser().resolve()
        if self._root is not None and not self._root.is_dir():
            raise UsageError(f"`--media-root` {folder} is not a folder")

    def resolve_url(self, url: str, place: str) -> Path:
        """Path of the file of a `file:` URL, whose absolute path must be below the folder.

        Raises:
            RowError: as `resolve`.
        """
        parts = urlsplit(url)
        name = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or "\0" in name:
            raise _error(place, f"names {show(url)}; a file URL is file:///FOLDER/NAME")
        if self._root is not None and Path(name).is_relative_to(self._root):
            name = str(Path(name).relative_to(self._root))
        return self.resolve(name, place)

    def resolve(self, name: str, place: str) -> Path:
        """Path of the file that a row names in `place`, which is a field or an element of one.

        Raises:
            RowError: `media_error`. The message does not reveal whether a file outside the folder exists.
        """
        if self._root is None:
            raise _error(place, f"names a file ({show(name)}), but the run was given no --media-root")
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise _error(place, f"names {show(name)}; a file name must be relative to --media-root, without ..")
        try:
            path = (self._root / name).resolve(strict=True)
            inside = path.is_relative_to(self._root) and path.is_file()
        except (OSError, RuntimeError):  # missing, unreadable, too long, or links in a circle
            inside = False
        if not inside:
            raise _error(place, f"names {show(name)}, but there is no such file under --media-root")
        return path
