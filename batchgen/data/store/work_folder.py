"""Work folder of an unfinished output: its owner, its contents, and when a run may use it.

```
results.parquet.work/
├── lock                       lock of the run that writes
├── run.json                   the fingerprint and the values it was computed from
├── parts/part-000000.parquet  committed rows
├── states/part-000000.states  hidden states of the rows in the part of the same number
├── earlier/000/               parts and states of a job with another input, whose rows may be reused
├── tokenized/                 cache of the tokenised input, for a resumed run
├── features/                  cache of the features of images and sounds, for a resumed run
└── scratch/                   temporary files
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import pyarrow as pa

from batchgen.config.urls import RemotePath
from batchgen.data.files import exists, files_in, followed, remove_if_empty, remove_tree
from batchgen.data.lines import is_lines, lines_of_job
from batchgen.data.results_file import DamagedFile, intact_footer, read_footer
from batchgen.data.schema import STATES_CONTENTS, Asked, results_schema
from batchgen.data.states import states_part
from batchgen.data.store.damage import Note, damaged_folder, ignore, set_aside
from batchgen.data.store.lock import HELD_NAME, LOCK_NAME, RunLock
from batchgen.data.store.timeline import Timeline
from batchgen.data.store.work_parts import earlier_parts, part_files
from batchgen.data.store.work_state import STATE_NAME, file_mark, write_state
from batchgen.errors import OutputError


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Identity of a job: two runs with equal keys are the same job. All shards of a job have one fingerprint."""

    fingerprint: str
    shard: tuple[int, int] | None = None
    """(index from 0, count)."""
    carried: tuple[pa.Field, ...] = ()
    """Separate columns of carried fields; they follow from the fingerprint."""

    @property
    def key(self) -> str:
        """Fingerprint and shard as one string."""
        return self.fingerprint if self.shard is None else f"{self.fingerprint}#{self.shard[0]}/{self.shard[1]}"


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """Paths of a run's results, work folder and hidden states."""

    result: Path
    work: Path
    states: Path
    """Path of the hidden states, which exist only if rows return them."""


def output_paths(out: Path, shard: tuple[int, int] | None = None, work_dir: Path | None = None) -> OutputPaths:
    """`OUT`, or where the link `OUT` leads to, and `OUT.work`; of a shard, files in the folders `OUT` and `OUT.work`.

    The work folder is in `work_dir`, else next to `OUT`, for a URL in the current folder.
    Hidden states are in `OUT` with `.hidden` before its suffix, also a folder if `OUT` is one. A folder of shards
    contains nothing else, because readers treat every file in it as data.
    """
    out = followed(out)
    work = (work_dir or (Path() if isinstance(out, RemotePath) else out.parent)) / f"{out.name}.work"
    states = out.with_name(f"{out.name.removesuffix('.parquet')}.hidden.parquet")
    if shard is None:
        return OutputPaths(out, work, states)
    name = f"part-{shard[0]:05d}-of-{shard[1]:05d}"
    return OutputPaths(out / f"{name}.parquet", work / name, states / f"{name}.parquet")


def is_complete(paths: OutputPaths, identity: RunIdentity) -> bool:
    """Whether the output is the finished output of this job.

    Raises:
        OutputError: the results are, but their hidden states are missing.
    """
    if is_lines(paths.result):
        record = lines_of_job(paths.result, identity.fingerprint)
    else:
        footer = intact_footer(paths.result)
        record = footer if belongs_to(footer, identity) else None
    if record is None:
        return False
    if not record.get("states"):
        return True
    try:
        states = read_footer(paths.states, STATES_CONTENTS)
    except DamagedFile:
        return False  # both files are set aside
    if not belongs_to(states, identity):
        raise OutputError(
            f"{paths.result} is complete, but its hidden states {paths.states} are missing. Put the file back, or "
            "name another output with -o to compute both again."
        )
    return True


def belongs_to(footer: Mapping[str, Any] | None, identity: RunIdentity) -> bool:
    """Whether a file with this footer was written by this job."""
    if footer is None or footer.get("fingerprint") != identity.fingerprint:
        return False
    shard = footer.get("shard")
    return (None if shard is None else tuple(shard)) == identity.shard


class WorkFolder:
    """A work folder whose lock this process holds. Created by `open_work`."""

    def __init__(
        self,
        paths: OutputPaths,
        identity: RunIdentity,
        lock: RunLock,
        state: Mapping[str, Any] = MappingProxyType({}),
        note: Note = ignore,
    ) -> None:
        self.paths = paths
        self.identity = identity
        self.state = state
        """The content of run.json."""
        self.note = note
        """Shows a line to the user."""
        self.parts = paths.work / "parts"
        """The folder of committed parts."""
        self.scratch = paths.work / "scratch"
        """A folder for temporary files; emptied whenever the work folder is opened."""
        self.tokenized = paths.work / "tokenized"
        """The folder of the tokenised input: token ids, row ids and carried fields."""
        self.features = paths.work / "features"
        """The folder of features of images and sounds; exists only if rows have any."""
        self.states = paths.work / "states"
        """The folder of committed hidden states; exists only if rows return them."""
        self.asked: Asked = ()
        """Columns that follow from what the job's rows ask for, set when they are read."""
        self.timeline: Timeline | None = None
        """What the run does over time; each part holds it as far as it is known."""
        self._lock = lock
        self._aside: list[Path] = []

    @property
    def foreign(self) -> list[Path]:
        """New names of what was found in the folder and is not ours."""
        return self._lock.foreign

    @property
    def schema(self) -> pa.Schema:
        """The schema of the results."""
        return results_schema(self.identity.carried, self.asked)

    def part_files(self) -> list[Path]:
        """Committed parts, in order."""
        return part_files(self.paths.work)

    def earlier_parts(self) -> list[Path]:
        """Parts of jobs with another input, newest first."""
        return earlier_parts(self.paths.work)

    def set_part_aside(self, file: Path, problem: DamagedFile) -> None:
        """Set a part aside with its hidden states, given the damaged file of the two.

        Raises:
            OutputError: it cannot be moved.
        """
        part = file.parent.parent / "parts" / f"{file.stem}.parquet"
        moved = [set_aside(each, self.paths.work) for each in (states_part(part), part) if exists(each)]
        where = f" and kept as {moved[-1]}" if moved else ""
        self.note(f"{file} is damaged ({problem.reason}): it is set aside{where}, and its rows are computed again")
        self._aside.append(part)

    def check_none_aside(self) -> None:
        """Check that no part was set aside whose rows are missing now.

        Raises:
            OutputError: some were.
        """
        if self._aside:
            raise OutputError(
                f"{len(self._aside)} damaged parts, the first is {self._aside[0]}, were set aside in "
                f"{damaged_folder(self.paths.work)}. Nothing was replaced. Run the same command again: their rows are "
                "computed again, all others are kept."
            )

    def forget_aside(self) -> None:
        """The rows of what was set aside so far are not committed any more, and will be computed."""
        self._aside.clear()

    def record_written(self, result: Path) -> None:
        """Record what is about to replace an output, so that a run after a kill knows it from what it replaces."""
        if self.state.get("replaces") is not None and not is_lines(self.paths.result):
            write_state(self.paths.work, {**self.state, "written": file_mark(result)})

    def close(self) -> None:
        """Release the lock and keep the work for a later run."""
        self._lock.release()

    def remove(self) -> None:
        """Remove the folder and release the lock. Files that cannot be removed are left to the next run."""
        empty_work(self.paths.work)
        self._lock.release(remove=True)
        remove_if_empty(self.paths.work)
        if self.identity.shard is not None:
            remove_if_empty(self.paths.work.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def empty_work(work: Path) -> None:
    """Remove all but the files of the lock, run.json last, so that a half-removed folder still records its job."""
    for entry in sorted(files_in(work), key=lambda path: (path.name == STATE_NAME, path.name)):
        if entry.name not in (LOCK_NAME, HELD_NAME):
            remove_tree(entry)
