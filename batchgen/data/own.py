"""A job's own files: no input of it, and nothing that it writes beside its results may go over them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from batchgen.config import RunConfig
from batchgen.data.work import output_paths

__all__ = ["OwnFiles", "own_files"]


class OwnFiles:
    """The result and the hidden states of a job, those of all its shards, and whatever lies under its work folder."""

    def __init__(self, out: Path, shards: int | None = None) -> None:
        """`out` as `--output` names it; `shards`: how many the job is cut into."""
        paths = output_paths(out)
        self._files = {os.path.realpath(path) for path in (paths.result, paths.states)}
        self._work = os.path.realpath(paths.work)
        self._shard = None if shards is None else re.compile(rf"part-\d{{5,}}-of-{shards:05d}\.parquet")

    def __contains__(self, path: object) -> bool:
        """Whether a path leads to one of them, whether it is there yet or not."""
        found = os.path.realpath(str(path))
        folder, name = os.path.split(found)
        if found in self._files or found == self._work or found.startswith(self._work + os.sep):
            return True
        return self._shard is not None and folder in self._files and self._shard.fullmatch(name) is not None


def own_files(config: RunConfig) -> OwnFiles:
    """Those of the job that is configured so."""
    return OwnFiles(config.output, None if config.shard is None else config.shard.count)
