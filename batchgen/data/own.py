"""A job's own files: no input of it, and nothing that it writes beside its results may go over them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from batchgen.config import STDIN, RunConfig
from batchgen.data.work import output_paths

__all__ = ["OwnFiles", "own_files"]


_EVENTS = (b'{"event":"token"', b'{"event":"finish"')
_REPORT = {"rows", "rows_ok", "rows_error", "fingerprint"}
"""Names that every report has."""
_REPORT_BYTES = 1 << 20


class OwnFiles:
    """The result and the hidden states of a job, those of all its shards, and whatever lies under its work folder.

    Events and a report of an earlier run, too, where they stand under the names that this one writes to.
    """

    def __init__(self, out: Path, shards: int | None = None, written: Sequence[str] = ()) -> None:
        """`out` as `--output` names it; `shards`: how many the job is cut into; `written`: where the others go."""
        paths = output_paths(out)
        self._files = {os.path.realpath(path) for path in (paths.result, paths.states)}
        self._work = os.path.realpath(paths.work)
        self._written = {os.path.realpath(path) for path in written if _is_earlier(Path(path))}
        self._shard = None if shards is None else re.compile(rf"part-\d{{5,}}-of-{shards:05d}\.parquet")

    def __contains__(self, path: object) -> bool:
        """Whether a path leads to one of them."""
        return os.path.realpath(str(path)) in self._written or self.are_results(str(path))

    def are_results(self, path: str) -> bool:
        """Whether it leads to what the results are made of, whether that is there yet or not."""
        found = os.path.realpath(path)
        folder, name = os.path.split(found)
        if found in self._files or found == self._work or found.startswith(self._work + os.sep):
            return True
        return self._shard is not None and folder in self._files and self._shard.fullmatch(name) is not None


def _is_earlier(path: Path) -> bool:
    """Whether a file holds nothing but what a run writes beside its results. Any other may be somebody's prompts."""
    with suppress(OSError, ValueError):
        if path.is_file():  # a pipe would be waited for
            with path.open("rb") as stream:
                head = stream.read(_REPORT_BYTES)
            if not head or head.startswith(_EVENTS):
                return True
            report = json.loads(head)
            return isinstance(report, dict) and report.keys() >= _REPORT
    return False


def own_files(config: RunConfig) -> OwnFiles:
    """Those of the job that is configured so."""
    written = [path for path in (config.events, config.report) if path not in (None, STDIN)]
    return OwnFiles(config.output, None if config.shard is None else config.shard.count, [*map(str, written)])
