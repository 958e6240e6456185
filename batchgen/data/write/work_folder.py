"""Work folder of an unfinished output: its owner, its contents, and when a run may use it.

```
results.parquet.work/
├── lock                       lock of the run that writes
├── run.json                   the fingerprint and the values it was computed from
├── parts/part-000000.parquet  committed rows
├── states/part-000000.states  hidden states of the rows in the part of the same number
├── earlier/000/               parts and states of a job with another input, whose rows may be reused
├── tokenized/                 cache of the tokenised input, for a resumed run
└── scratch/                   temporary files
```
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa

from batchgen.data.files import (
    exists,
    files_in,
    followed,
    is_folder,
    make_durably,
    open_own,
    remove_tree,
    rename,
    size_of,
    status_of,
    sync_folder,
    system,
)
from batchgen.data.write.durable_files import STATE, output_errors, read_footer, refuse_special, write_durably
from batchgen.data.write.job_changes import changes
from batchgen.data.write.lines import errors_path, is_lines, lines_of_job, written_by
from batchgen.data.write.lock import LOCK_NAME, RunLock
from batchgen.data.write.schema import STATES_CONTENTS
from batchgen.data.write.work_parts import earlier_parts, has_results, part_files, part_owners
from batchgen.errors import FingerprintError, OutputError
from batchgen.request.foreign_text import ForeignTextError, read_json_stream, typed

Policy = Literal["resume", "overwrite", "resume-anyway", "retry"]


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


def output_paths(out: Path, shard: tuple[int, int] | None = None) -> OutputPaths:
    """`OUT`, or where the link `OUT` leads to, and `OUT.work`; of a shard, files in the folders `OUT` and `OUT.work`.

    Hidden states are in `OUT` with `.hidden` before its suffix, also a folder if `OUT` is one. A folder of shards
    contains nothing else, because readers treat every file in it as data.
    """
    out = followed(out)
    work = out.with_name(out.name + ".work")
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
        footer = read_footer(paths.result)
        record = footer if belongs_to(footer, identity) else None
    if record is None:
        return False
    if record.get("states") and not belongs_to(read_footer(paths.states, STATES_CONTENTS), identity):
        raise OutputError(
            f"{paths.result} is complete, but its hidden states {paths.states} are missing. Put the file back, or "
            "compute both again with --overwrite."
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

    def __init__(self, paths: OutputPaths, identity: RunIdentity, lock: RunLock) -> None:
        self.paths = paths
        self.identity = identity
        self._lock = lock

    @property
    def parts(self) -> Path:
        """The folder of committed parts."""
        return self.paths.work / "parts"

    @property
    def scratch(self) -> Path:
        """A folder for temporary files; emptied whenever the work folder is opened."""
        return self.paths.work / "scratch"

    @property
    def tokenized(self) -> Path:
        """The folder of the tokenised input: token ids, row ids and carried fields."""
        return self.paths.work / "tokenized"

    @property
    def states(self) -> Path:
        """The folder of committed hidden states; exists only if rows return them."""
        return self.paths.work / "states"

    @property
    def foreign(self) -> list[Path]:
        """New names of what was found in the folder and is not ours."""
        return self._lock.foreign

    def part_files(self) -> list[Path]:
        """Committed parts, in order."""
        return part_files(self.paths.work)

    def earlier_parts(self) -> list[Path]:
        """Parts of jobs with another input, newest first."""
        return earlier_parts(self.paths.work)

    def close(self) -> None:
        """Release the lock and keep the work for a later run."""
        self._lock.release()

    def remove(self) -> None:
        """Remove the folder and release the lock. Files that cannot be removed are left to the next run."""
        _empty(self.paths.work)
        self._lock.release(remove=True)
        with suppress(OSError):
            system.rmdir(self.paths.work)
            if self.identity.shard is not None:
                system.rmdir(self.paths.work.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OtherJobError(FingerprintError):
    """The output or the unfinished work belongs to a job with another input or other options."""

    def __init__(self, message: str, job: Mapping[str, Any] | None) -> None:
        super().__init__(message)
        self.job = job
        """The values that the fingerprint of that job was computed from; None if they are not recorded."""


def recorded_clock(paths: OutputPaths, identity: RunIdentity, policy: Policy = "resume") -> str | None:
    """Time that the conversations of this job see, as recorded by the work or output that a run would continue.

    Without any, that of another shard of the job, so that all its shards see one time. None if there is none.
    """
    old = read_state(paths.work)
    if policy == "overwrite" and (old is None or old["emptied_by"] != identity.key):
        old = None
    records = [old, None if policy == "overwrite" else _footer_of(paths.result, identity.fingerprint)]
    if identity.shard is not None:
        files = (file for file in files_in(paths.result.parent, "part-*.parquet") if file != paths.result)
        records += [_footer_of(file, identity.fingerprint) for file in files]
        folders = (folder for folder in files_in(paths.work.parent, "part-*") if folder != paths.work)
        states = filter(None, map(read_state, folders))
        records += [state for state in states if state["fingerprint"].startswith(identity.fingerprint)]
    return next((record["clock"] for record in records if record and record.get("clock")), None)


def _footer_of(file: Path, fingerprint: str) -> dict[str, Any] | None:
    footer = read_footer(file)
    return footer if footer is not None and footer.get("fingerprint") == fingerprint else None


def open_work(
    paths: OutputPaths,
    identity: RunIdentity,
    info: Mapping[str, Any],
    policy: Policy = "resume",
    clock: str | None = None,
) -> WorkFolder | None:
    """Lock the output and create its work folder, or open the existing one.

    Unfinished work without a finished row is dropped whatever job it belongs to: nothing was computed.

    Args:
        paths: from `output_paths`.
        identity: identity of this job.
        info: the values that the fingerprint was computed from, by name; stored, to report which of them differ.
        policy: `resume` continues this job's work only. `overwrite` drops all work and replaces the output at the
            end; after a crash, it continues its own work unless another job has added to it. `resume-anyway`
            also accepts the output and the work of a different job: it sets the parts aside in `earlier`, and replaces
            the output at the end. `retry` drops other work and replaces this job's output, whose good rows the caller
            commits again; after a crash, it continues.
        clock: time that the conversations of the job see, to be recorded; None if the model's template reads none.

    Returns:
        The locked folder; None if the output is already complete.

    Raises:
        OutputError: another run holds the lock, or the folder cannot be written.
        OtherJobError: the output or the work belongs to a different job.
    """
    refuse_special(paths.result)
    refuse_special(paths.states)
    replaces = policy in ("overwrite", "retry")
    if not replaces and is_complete(paths, identity) and not exists(paths.work):
        return None
    lock = RunLock(paths.work, paths.result)
    try:
        # Checked again under the lock: the run that held it may have finished meanwhile.
        if not replaces and is_complete(paths, identity):
            if has_other_work(paths, identity) or _is_replacement(paths):
                lock.release()
            else:
                sync_folder(paths.result.parent)  # a killed run may have renamed the output without that
                WorkFolder(paths, identity, lock).remove()
            return None
        with output_errors(paths.work):
            state = {**_state(paths, identity, info, policy), "clock": clock}
            return _prepare(paths, identity, lock, state)
    except BaseException:
        lock.release_unused()
        raise


def has_other_work(paths: OutputPaths, identity: RunIdentity) -> bool:
    """Whether the work folder contains finished rows of a different job.

    Raises:
        OutputError: a part that may be intact cannot be read.
    """
    return bool(part_owners(paths.work) - {identity.key}) and has_results(paths.work)


def _is_replacement(paths: OutputPaths) -> bool:
    """Whether the work is meant to replace the existing output, rather than having produced it.

    A new output is written while the old one exists, so their inodes differ.
    """
    state = read_state(paths.work)
    return state is not None and state["replaces"] == _inode(paths.result) and bool(part_files(paths.work))


def _inode(path: Path) -> int | None:
    status = status_of(path)
    return None if status is None else status.st_ino


def _prepare(paths: OutputPaths, identity: RunIdentity, lock: RunLock, state: Mapping[str, Any]) -> WorkFolder:
    work = WorkFolder(paths, identity, lock)
    remove_tree(work.scratch)
    for folder in (work.parts, work.tokenized, work.scratch, paths.result.parent):
        make_durably(folder)
    content = json.dumps(state, ensure_ascii=False, indent=1, sort_keys=True).encode()
    write_durably(paths.work / "run.json", lambda stream: stream.write(content))
    # Also what a killed run may have made.
    for folder in (paths.work, paths.work.parent, *([] if identity.shard is None else [paths.work.parent.parent])):
        sync_folder(folder)
    return work


def _state(paths: OutputPaths, identity: RunIdentity, info: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    """The content of run.json; raises every error that refuses the job, and puts work that is not continued away.

    `overwrite`: whether the existing output will be replaced. `emptied_by`: key of the job whose `--overwrite` emptied
    the folder, so that no row of it comes from the output. `replaces`: inode of the output that existed then.
    """
    key = identity.key
    fresh: dict[str, Any] = {"fingerprint": key, "info": dict(info)}
    fresh |= {"overwrite": False, "emptied_by": None, "replaces": None}
    old = read_state(paths.work)
    replaces = {"overwrite": True, "replaces": _inode(paths.result)}
    if policy in ("overwrite", "retry"):
        kept = _kept_state(paths.work, old, key, policy)
        if kept is None:
            _empty(paths.work)
        return fresh | (kept or {}) | replaces | ({"emptied_by": key} if policy == "overwrite" else {})
    own = part_owners(paths.work) <= {key} and (old is None or old["fingerprint"] == key)
    if not own and not has_results(paths.work):
        _empty(paths.work)
        own, old = True, None
    if policy == "resume-anyway":
        if exists(paths.result) and read_footer(paths.result) is None:
            _refuse_other_output(paths, identity)
        if not own:
            _set_aside(paths.work)
        others = exists(paths.result) or exists(paths.states)
        return fresh | (old if own and old is not None else {}) | (replaces if others else {}) | {"info": dict(info)}
    if not (own and old is not None and old["overwrite"]):
        _refuse_other_output(paths, identity)
    if not own:
        changed = changes(old["info"], info) if old is not None else []
        raise OtherJobError(
            f"{paths.work} contains unfinished work of a different job (different: {', '.join(changed) or 'shard'}). "
            "Drop it with --overwrite, or name another output with -o.",
            None if old is None else old["info"],
        )
    return fresh | (old or {})


def _refuse_other_output(paths: OutputPaths, identity: RunIdentity) -> None:
    """Refuse to replace a file that is not this job's.

    Raises:
        OtherJobError: it exists.
    """
    files: list[tuple[Path, str | None]] = [(paths.result, None), (paths.states, STATES_CONTENTS)]
    if is_lines(paths.result):
        _refuse_other_lines(paths.result, identity)
        files = files[1:]
    for path, contents in files:
        # States of this job may exist already: they are renamed just before the results.
        if exists(path) and not (contents and belongs_to(read_footer(path, contents), identity)):
            raise OtherJobError(
                f"{path} exists and is not this job's output. Replace it with --overwrite, or name another with -o.",
                (read_footer(path, contents) or {}).get("job"),
            )


def _refuse_other_lines(result: Path, identity: RunIdentity) -> None:
    """Refuse to replace JSON lines that are not this job's. Errors without results are left by a run that was killed.

    Empty files, which a job without rows leaves, are replaced: they name no job, and nothing is lost.

    Raises:
        OtherJobError: they exist.
    """
    found = next((file for file in (result, errors_path(result)) if exists(file) and size_of(file)), None)
    if found is not None and (found == result or not written_by(found, identity.fingerprint)):
        raise OtherJobError(
            f"{found} exists and is not this job's output. Replace it with --overwrite, or name another with -o. JSON "
            "lines do not say what was asked for, so none of its rows can be reused.",
            None,
        )


def _set_aside(work: Path) -> None:
    """Move the parts of another job, with their states, to a folder of `earlier`."""
    number = 1 + max((int(folder.name) for folder in files_in(work / "earlier")), default=-1)
    target = work / "earlier" / f"{number:03d}"
    make_durably(target)
    for name in ("states", "parts"):  # a part without its states counts as damaged
        if is_folder(work / name):
            rename(work / name, target / name)
    sync_folder(target)
    sync_folder(work)


def _kept_state(work: Path, old: Mapping[str, Any] | None, key: str, policy: Policy) -> dict[str, Any] | None:
    """Entries of run.json that are kept when a run that replaces the output continues the existing work; else None.

    `overwrite` continues only work that it started in an empty folder: the parts of a retry come from the output that
    is to be replaced.
    """
    owners = part_owners(work)
    if old is None or not old["overwrite"] or old["fingerprint"] != key or not owners <= {key}:
        return None
    if policy == "overwrite":
        return {} if old["emptied_by"] == key else None
    return {"emptied_by": old["emptied_by"]} if owners else None


def read_state(work: Path) -> dict[str, Any] | None:
    """The content of run.json; None if it is missing or damaged (each part records its job as well)."""
    with suppress(FileNotFoundError, NotADirectoryError, ForeignTextError), open_own(work / "run.json") as stream:
        return {"emptied_by": None, "replaces": None} | typed(read_json_stream(stream), STATE)
    return None


def _empty(work: Path) -> None:
    """Remove everything but the lock, run.json last, so that a half-removed folder still records its job."""
    for entry in sorted(files_in(work), key=lambda path: (path.name == "run.json", path.name)):
        if entry.name != LOCK_NAME:
            remove_tree(entry)
