"""Damaged files of a job are set aside, never deleted: moved to `OUT.damaged/`, under their names with `.damaged`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from batchgen.config.urls import RemotePath
from batchgen.data.durable_files import output_errors, part_errors
from batchgen.data.files import files_in, is_file, make_durably, open_named, rename, size_of, sync_folder
from batchgen.data.lines import errors_path, is_lines, odd_line
from batchgen.data.results_file import DamagedFile, open_parquet, open_part, read_footer
from batchgen.data.schema import STATES_CONTENTS
from batchgen.data.store.work_parts import part_files
from batchgen.data.store.work_state import STATE_NAME, state_damage
from batchgen.errors import OutputError

Note = Callable[[str], None]
"""Shows a line to the user."""

_WORK: Final = ".work"
_SUFFIX: Final = ".damaged"
_LOOKED_AT: Final = 1 << 20
_NAME: Final = b"batchgen"


def ignore(line: str) -> None:
    """Show nothing."""


def damaged_folder(work: Path) -> Path:
    """The folder of what is damaged, for a work folder `OUT.work` or, of a shard, `OUT.work/part-...`."""
    if work.name.endswith(_WORK):
        return work.with_name(work.name.removesuffix(_WORK) + _SUFFIX)
    return damaged_folder(work.parent) / work.name if work.parent.name.endswith(_WORK) else work / "damaged"


def set_aside(file: Path, work: Path) -> Path:
    """Move a damaged file of a job out of its way, and return its new path.

    Raises:
        OutputError: it cannot be moved.
    """
    folder = damaged_folder(work)
    with output_errors(folder):
        make_durably(folder)
        taken = {path.name for path in files_in(folder)}
        names = (f"{file.name}{_SUFFIX}{number}" for number in ("", *(f"-{n}" for n in range(2, len(taken) + 3))))
        target = folder / next(name for name in names if name not in taken)
        rename(file, target)
        sync_folder(folder)
        sync_folder(file.parent)
    return target


def output_damage(result: Path, states: Path, *, whole: bool) -> DamagedFile | None:
    """Damage of an output, every byte of which is read, or of its hidden states; None if there is none.

    Of the hidden states, which may be large, only the footer is read unless `whole`.

    Raises:
        OutputError: a file cannot be read now, or has lines of several jobs.
    """
    try:
        if is_lines(result):
            _check_lines(result)
        elif read_footer(result) is not None:
            _check(result)
        if read_footer(states, STATES_CONTENTS) is not None and whole:
            _check(states)
    except DamagedFile as problem:
        return problem
    return None


def _check_lines(result: Path) -> None:
    for file in (result, errors_path(result)):
        with part_errors(file):
            odd = odd_line(file) if is_file(file) else None
        if odd is not None and odd.is_whole:
            raise OutputError(
                f"{file} holds lines of several jobs: line {odd.number} is the first of another one. Move the file "
                "away, or name another output with -o."
            )
        if odd is not None:
            raise DamagedFile(file, f"line {odd.number} is not whole")


def _check(path: Path) -> None:
    if isinstance(path, RemotePath):
        return  # its service checks what it stores, and all of it would be fetched
    with part_errors(path), open_parquet(path) as table:
        table.check()


def set_outputs_aside(result: Path, states: Path, work: Path, note: Note, *, whole: bool) -> None:
    """Set a damaged output of batchgen aside, or damaged hidden states with their output.

    Raises:
        OutputError: a damaged file may be of another program, or cannot be moved.
    """
    while (problem := output_damage(result, states, whole=whole)) is not None:
        if not is_lines(problem.path) and not _names_batchgen(problem.path):
            raise OutputError(
                f"{problem.path} exists and cannot be read as Parquet ({problem.reason}). Move it away, or name "
                "another output with -o."
            )
        _note(problem.path, problem.reason, set_aside(problem.path, work), note)
        if problem.path != result and is_file(result):  # without it, the output is not complete
            note(f"{result} is set aside with it and kept as {set_aside(result, work)}")


def set_state_aside(work: Path, note: Note) -> None:
    """Set a damaged run.json aside: parts hold a copy of it."""
    if (reason := state_damage(work)) is not None:
        path = work / STATE_NAME
        _note(path, reason, set_aside(path, work), note)


def set_parts_aside(work: Path, note: Note) -> None:
    """Set damaged parts aside, before a work folder is emptied."""
    for part in part_files(work):
        try:
            with open_part(part) as table:
                table.check()
        except DamagedFile as problem:
            _note(part, problem.reason, set_aside(part, work), note)


def _note(path: Path, reason: str, where: Path, note: Note) -> None:
    note(f"{path} is damaged ({reason}): it is set aside and kept as {where}")


def _names_batchgen(file: Path) -> bool:
    """Whether the end of a damaged file shows that batchgen wrote it: a file of others stays where it is."""
    with open_named(file) as stream:
        stream.seek(max(0, size_of(file) - _LOOKED_AT))
        return _NAME in stream.read()
