"""Output files of a job, which are never its inputs and never overwritten by its events or report."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from batchgen.data.write.lines import errors_path, is_lines
from batchgen.data.write.work_folder import output_paths
from batchgen.request.foreign_text import read_json

_EVENT_STARTS = (b'{"event":"token"', b'{"event":"finish"')
_REPORT_KEYS = {"rows", "rows_ok", "rows_error", "fingerprint"}
"""Keys that every report has."""
_REPORT_BYTES = 1 << 20


class ReservedPaths:
    """Paths that a job writes: results and hidden states, also of all its shards, and everything in its work folder.

    They include the events and report files to be written, if these hold events or a report of an earlier run.
    """

    def __init__(self, out: Path, shards: int | None = None, written: Sequence[str] = ()) -> None:
        """`out`: value of `--output`; `shards`: number of shards of the job; `written`: paths of events and report."""
        paths = output_paths(out)
        lines = [errors_path(paths.result)] if is_lines(paths.result) else []
        self._files = {os.path.realpath(path) for path in (paths.result, paths.states, *lines)}
        self._work = os.path.realpath(paths.work)
        self._written = {os.path.realpath(path) for path in written if _is_run_output(Path(path))}
        self._shard = None if shards is None else re.compile(rf"part-\d{{5,}}-of-{shards:05d}\.parquet")

    def __contains__(self, path: object) -> bool:
        """Whether a path resolves to a reserved file."""
        return os.path.realpath(str(path)) in self._written or self.is_result(str(path))

    def is_result(self, path: str) -> bool:
        """Whether a path resolves to a file of the results, existing or not."""
        found = os.path.realpath(path)
        folder, name = os.path.split(found)
        if found in self._files or found == self._work or found.startswith(self._work + os.sep):
            return True
        return self._shard is not None and folder in self._files and self._shard.fullmatch(name) is not None


def _is_run_output(path: Path) -> bool:
    """Whether a file is empty or holds events or a report of a run; any other file may hold prompts."""
    with suppress(OSError, ValueError):
        if path.is_file():  # reading a pipe would block
            with path.open("rb") as stream:
                head = stream.read(_REPORT_BYTES)
            if not head or head.startswith(_EVENT_STARTS):
                return True
            report = read_json(head)
            return isinstance(report, dict) and report.keys() >= _REPORT_KEYS
    return False
