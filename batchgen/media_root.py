"""Files that rows may name: those under `--media-root`, and nothing else on the machine."""

from __future__ import annotations

from pathlib import Path

from batchgen.checks import show
from batchgen.errors import ErrorCode, RowError, UsageError

__all__ = ["MediaRoot"]


class MediaRoot:
    """The folder under which rows may name files. Names are relative, without `..`; links must not lead out."""

    def __init__(self, folder: str | None) -> None:
        """`folder` None: rows may name no file.

        Raises:
            UsageError: it is no folder.
        """
        self._root = None if folder is None else Path(folder).expanduser().resolve()
        if self._root is not None and not self._root.is_dir():
            raise UsageError(f"`--media-root` {folder} is not a folder")

    def file(self, name: str, field: str) -> Path:
        """The file that a row names in `field`.

        Raises:
            RowError: `media_error`. Whether something stands outside the folder is not told.
        """
        if self._root is None:
            raise _error(field, f"names a file ({show(name)}), but the run was given no --media-root")
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise _error(field, f"names {show(name)}; a file's name is relative to --media-root and has no ..")
        try:
            path = (self._root / name).resolve(strict=True)
            inside = path.is_relative_to(self._root) and path.is_file()
        except (OSError, RuntimeError):  # missing, unreadable, too long, or links in a circle
            inside = False
        if not inside:
            raise _error(field, f"names {show(name)}, and there is no such file under --media-root")
        return path


def _error(field: str, problem: str) -> RowError:
    return RowError(ErrorCode.MEDIA_ERROR, f"`{field}` {problem}", field)
