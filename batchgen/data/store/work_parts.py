"""Parts of a work folder: where they are, whose they are, and whether they hold a finished row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow.compute as pc

from batchgen.config.urls import RemotePath
from batchgen.data.durable_files import output_errors, write_durably
from batchgen.data.files import (
    copy_bytes,
    exists,
    files_in,
    make_durably,
    note_version,
    open_named,
    open_own,
    remove_file,
    size_of,
)
from batchgen.data.results_file import DamagedFile, StoredTable, open_part
from batchgen.data.schema import FINGERPRINT_KEY
from batchgen.data.states import states_part


def part_files(work: Path) -> list[Path]:
    """Committed parts of a work folder, in order."""
    return files_in(work / "parts", "part-*.parquet")


def earlier_parts(work: Path) -> list[Path]:
    """Parts that jobs with another input left in a work folder, those of the latest job first."""
    return [part for job in reversed(files_in(work / "earlier")) for part in reversed(part_files(job))]


def has_results(work: Path) -> bool:
    """Whether a work folder contains a finished row, failed ones not counted; damaged parts are ignored.

    Raises:
        OutputError: a part that may be intact cannot be read.
    """
    for part in [*part_files(work), *earlier_parts(work)]:
        with suppress(DamagedFile, KeyError), open_part(part) as table:
            if has_status(table, "ok"):
                return True
    return False


def has_status(table: StoredTable, status: str) -> bool:
    """Whether a row of a results file has a status."""
    return any(pc.any(pc.equal(group["status"], status)).as_py() for group in table.groups(["status"]))


def part_owners(work: Path) -> set[str]:
    """Identity keys of the jobs that committed the parts; damaged parts are ignored.

    Raises:
        OutputError: a part that may be intact cannot be read.
    """
    owners = set()
    for part in part_files(work):
        with suppress(DamagedFile, KeyError), open_part(part) as table:
            owners.add(table.about[FINGERPRINT_KEY].decode())
    return owners


class PartsCopy:
    """Copies of the parts of a work folder, with their hidden states, at a URL: `--work-dir URL`.

    Every method raises an `OutputError` if the service fails, or a file here cannot be read or written; what is
    committed stays in the work folder.
    """

    def __init__(self, folder: RemotePath, work: Path) -> None:
        """`folder`: where the copies are. `work`: the job's work folder on this machine."""
        self._folder, self._work = folder, work

    def fetch(self, note: Callable[[str], None]) -> None:
        """Copy the parts to the work folder, if it has none. `note` shows a line to the user."""
        if part_files(self._work):
            return
        with output_errors(self._folder):
            there = self._there()
            for file in sorted(there, key=lambda file: file.suffix == ".parquet"):  # a part needs its states
                target = self._work / file.relative_to(self._folder)
                make_durably(target.parent)
                with open_named(file) as stream:
                    write_durably(target, lambda out, stream=stream: copy_bytes(stream, out))  # type: ignore[misc]
        if count := sum(file.suffix == ".parquet" for file in there):
            note(f"{count:,} parts of this job were copied from {self._folder}")

    def sync(self) -> None:
        """Make the copies those of the parts of the work folder."""
        parts = part_files(self._work)
        with output_errors(self._folder):
            there = {file: size_of(file) for file in self._there()}
            here = {self._target(file): file for part in parts for file in _files_of(part)}
            for target, file in here.items():
                if there.get(target) != size_of(file):
                    self._send(file)
            for file in there.keys() - here.keys():
                remove_file(file)

    def add(self, part: Path) -> None:
        """Copy a part that was committed."""
        for file in _files_of(part):
            self._send(file)

    def remove(self) -> None:
        """Remove the copies of a job that is finished."""
        with output_errors(self._folder):
            for file in self._there():
                remove_file(file)

    def _send(self, file: Path) -> None:
        target, temporary = self._target(file), file.with_name(file.name + ".tmp")
        with output_errors(target):
            note_version(target)  # whatever is there is replaced
        with open_own(file) as stream:
            write_durably(target, lambda out: copy_bytes(stream, out), temporary)

    def _target(self, file: Path) -> Path:
        return self._folder / file.relative_to(self._work)

    def _there(self) -> list[Path]:
        return [*files_in(self._folder / "states"), *files_in(self._folder / "parts")]


def parts_copy(copies: RemotePath | None, work: Path) -> PartsCopy | None:
    """The copy of a job's parts in a folder of the name of its work folder; None if `copies`, the folder, is."""
    if copies is None:
        return None
    names = work.parts[-2:] if work.parent.name.endswith(".work") else work.parts[-1:]
    return PartsCopy(copies.joinpath(*names), work)


def _files_of(part: Path) -> list[Path]:
    states = states_part(part)
    return [states, part] if exists(states) else [part]
