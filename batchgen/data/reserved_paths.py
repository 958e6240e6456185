"""Output files of a job, which are never its inputs and never overwritten by its events or report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from batchgen.config.urls import path_of
from batchgen.data.files import is_file, open_named, resolved
from batchgen.data.lines import errors_path, is_lines
from batchgen.data.store.work_folder import output_paths
from batchgen.errors import OutputError
from batchgen.request.foreign_text import read_json

_EVENT_STARTS = (b'{"event":"token"', b'{"event":"finish"')
_REPORT_KEYS = {"rows", "rows_ok", "rows_error", "fingerprint"}
"""Keys that every report has."""
_REPORT_BYTES = 1 << 20


class ReservedPaths:
    """Paths that a job writes: results and hidden states, also of all its shards, and everything in its work folder.

    They include the events and report files to be written, if these hold events or a report of an earlier run.
    """

    def __init__(
        self, out: Path, shards: int | None = None, written: Sequence[str] = (), work_dir: Path | None = None
    ) -> None:
        """`out`: value of `--output`; `shards`: number of shards of the job; `written`: paths of events and report."""
        paths = output_paths(out, work_dir=work_dir)
        lines = [errors_path(paths.result)] if is_lines(paths.result) else []
        self._files = {resolved(path) for path in (paths.result, paths.states, *lines)}
        self._work = resolved(paths.work)
        self._written = {resolved(Path(path)) for path in written if is_run_output(Path(path))}
        self._shard = None if shards is None else re.compile(rf"part-\d{{5,}}-of-{shards:05d}\.parquet")

    def __contains__(self, path: object) -> bool:
        """Whether a path resolves to a reserved file."""
        return resolved(path_of(str(path))) in self._written or self.is_result(str(path))

    def is_result(self, path: str) -> bool:
        """Whether a path resolves to a file of the results, existing or not."""
        file = resolved(path_of(path))
        if file in self._files or file.is_relative_to(self._work):
            return True
        return self._shard is not None and file.parent in self._files and self._shard.fullmatch(file.name) is not None


def is_run_output(path: Path) -> bool:
    """Whether a file is empty or holds events or a report of a run; any other file may hold prompts."""
    with suppress(OSError, ValueError):
        if is_file(path):  # reading a pipe would block
            with open_named(path) as stream:
                head = stream.read(_REPORT_BYTES)
            # Zeros only: a power loss kept the size of a new file, but nothing of its content.
            if not head.strip(b"\0") or head.startswith(_EVENT_STARTS):
                return True
            report = read_json(head, unwritable=True)
            return isinstance(report, dict) and report.keys() >= _REPORT_KEYS
    return False


def refuse_other_file(option: str, target: str, overwrite: bool) -> None:
    """Refuse to replace a file that the user named for events or a report and that holds something else.

    Raises:
        OutputError: it exists, was not written by batchgen, and `overwrite` is not set.
    """
    path = Path(target)
    if not overwrite and is_file(path) and not is_run_output(path):
        raise OutputError(
            f"`{option}` {target} exists and was not written by batchgen. Replace it with --overwrite, or give another "
            "name"
        )
