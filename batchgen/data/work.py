"""The work folder beside an unfinished output: who owns it, what is in it, when it may be used.

```
results.parquet.work/
├── lock                       held by the run that writes
├── run.json                   the fingerprint, and what it was made from
├── parts/part-000000.parquet  committed rows
├── states/part-000000.states  hidden states of the rows in the part of the same number
├── reading/                   what reading the input made; one that is whole spares a later run reading it again
└── scratch/                   nothing that a later run needs
```
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.files import output_errors, part_errors, read_footer, refuse_special, sync_folder, write_durably
from batchgen.data.lock import LOCK_NAME, RunLock
from batchgen.data.schema import FINGERPRINT_KEY, STATES_CONTENTS
from batchgen.errors import FingerprintError, OutputError

__all__ = [
    "OutputPaths",
    "Policy",
    "RunIdentity",
    "WorkFolder",
    "holds_other_work",
    "is_complete",
    "is_of",
    "open_work",
    "output_paths",
    "part_files",
]

Policy = Literal["resume", "overwrite", "resume-anyway", "retry"]


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What makes two runs the same job. The fingerprint leaves the shard out, so that shards can be joined."""

    fingerprint: str
    shard: tuple[int, int] | None = None
    """(index from 0, count)."""
    carried: tuple[pa.Field, ...] = ()
    """Columns of carried fields; the fingerprint says which, by the options and the input files."""

    @property
    def key(self) -> str:
        """One string for both."""
        return self.fingerprint if self.shard is None else f"{self.fingerprint}#{self.shard[0]}/{self.shard[1]}"


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """Where a run's result and its work stand."""

    result: Path
    work: Path
    states: Path
    """Hidden states, written only for rows that ask for them."""


def output_paths(out: Path, shard: tuple[int, int] | None = None) -> OutputPaths:
    """`OUT` and `OUT.work`; for a shard `OUT/part-00007-of-00016.parquet` and `OUT.work/part-00007-of-00016`.

    Hidden states go to `OUT` with `.hidden` before its suffix, a folder too where `OUT` is one. A folder of shards
    holds nothing else: readers take every file in it for data.
    """
    work = out.with_name(out.name + ".work")
    states = out.with_name(f"{out.name.removesuffix('.parquet')}.hidden.parquet")
    if shard is None:
        return OutputPaths(out, work, states)
    name = f"part-{shard[0]:05d}-of-{shard[1]:05d}"
    return OutputPaths(out / f"{name}.parquet", work / name, states / f"{name}.parquet")


def is_complete(paths: OutputPaths, identity: RunIdentity) -> bool:
    """Whether the output is that of this very job, finished.

    Raises:
        OutputError: its results are, but their hidden states are not beside them.
    """
    footer = read_footer(paths.result)
    if not is_of(footer, identity):
        return False
    if footer is not None and footer.get("states") and not is_of(read_footer(paths.states, STATES_CONTENTS), identity):
        raise OutputError(
            f"{paths.result} is complete, but {paths.states} with its hidden states is not there. Put it back, or "
            "compute both again with --overwrite."
        )
    return True


def is_of(footer: Mapping[str, Any] | None, identity: RunIdentity) -> bool:
    """Whether a file with this footer is of this very job."""
    if footer is None or footer.get("fingerprint") != identity.fingerprint:
        return False
    shard = footer.get("shard")
    return (None if shard is None else tuple(shard)) == identity.shard


class WorkFolder:
    """A work folder that this process holds the lock of. Made by `open_work`."""

    def __init__(self, paths: OutputPaths, identity: RunIdentity, lock: RunLock, state: Mapping[str, Any]) -> None:
        self.paths = paths
        self.identity = identity
        self.accepted = _accepted(state, identity.key)
        """Identity keys whose parts belong to this job."""
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
    def reading(self) -> Path:
        """The folder of what reading the input made: token ids, rows' ids and carried fields."""
        return self.paths.work / "reading"

    @property
    def states(self) -> Path:
        """The folder of committed states; there only where rows asked for them."""
        return self.paths.work / "states"

    def part_files(self) -> list[Path]:
        """Committed parts, in order."""
        return part_files(self.paths.work)

    def close(self) -> None:
        """Let go of the lock and leave the work for a later run."""
        self._lock.release()

    def remove(self) -> None:
        """Remove the folder: its work is done. Whatever cannot be removed is left for the next run to remove."""
        _empty(self.paths.work)
        self._lock.release(remove=True)
        with suppress(OSError):
            self.paths.work.rmdir()
            if self.identity.shard is not None:
                self.paths.work.parent.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def part_files(work: Path) -> list[Path]:
    """Committed parts of a work folder, in order."""
    return sorted((work / "parts").glob("part-*.parquet"))


def open_work(
    paths: OutputPaths, identity: RunIdentity, info: Mapping[str, Any], policy: Policy = "resume"
) -> WorkFolder | None:
    """Take hold of the output: begin its work folder or go on with the one that is there.

    Args:
        paths: from `output_paths`.
        identity: this job.
        info: what the fingerprint was made from, by name; kept to say what differs when a later run's does.
        policy: `resume` goes on with this job's work only; `overwrite` drops all work and replaces the output at
            the end (repeated after a crash, it goes on with the work that it began, while no other job's came to
            it); `resume-anyway` goes on with the work of a different job; `retry` drops other work and replaces this
            job's output, of which the caller takes back what is good (repeated, it goes on).

    Returns:
        The folder, locked; None when the output is complete already and nothing is to be done.

    Raises:
        OutputError: another run holds it, or it cannot be written.
        FingerprintError: the output or the work belongs to a different job.
    """
    refuse_special(paths.result)
    refuse_special(paths.states)
    replaces = policy in ("overwrite", "retry")
    if not replaces and is_complete(paths, identity) and not paths.work.exists():
        return None
    lock = RunLock(paths.work, paths.result)
    try:
        # Asked again under the lock: the run that held it may have finished in between.
        if not replaces and is_complete(paths, identity):
            if holds_other_work(paths, identity) or _is_to_replace(paths):
                lock.release()
            else:
                WorkFolder(paths, identity, lock, {"accepted": [identity.key]}).remove()
            return None
        with output_errors(paths.work):
            state = _state(paths, identity, info, policy)
            return _prepared(paths, identity, lock, state)
    except BaseException:
        _let_go(paths.work, lock)
        raise


def holds_other_work(paths: OutputPaths, identity: RunIdentity) -> bool:
    """Whether parts that a different job committed, and that this one does not go on with, stand in the work folder.

    Raises:
        OutputError: one that may be whole cannot be read.
    """
    return not _owners(paths.work) <= _accepted(_read_state(paths.work), identity.key)


def _is_to_replace(paths: OutputPaths) -> bool:
    """Whether the work was begun to replace the very output that stands there, and so did not make it.

    A new output is written while the old one stands, so that they never have one inode.
    """
    state = _read_state(paths.work)
    return state is not None and state["replaces"] == _inode(paths.result) and bool(part_files(paths.work))


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def _let_go(work: Path, lock: RunLock) -> None:
    """Release the lock of a job that was refused; a folder that was made for the lock alone goes too."""
    empty = [entry.name for entry in work.iterdir()] == [LOCK_NAME]
    lock.release(remove=empty)
    if empty:
        with suppress(OSError):
            work.rmdir()


def _prepared(paths: OutputPaths, identity: RunIdentity, lock: RunLock, state: Mapping[str, Any]) -> WorkFolder:
    work = WorkFolder(paths, identity, lock, state)
    shutil.rmtree(work.scratch, ignore_errors=True)
    for folder in (work.parts, work.reading, work.scratch, paths.result.parent):
        folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(state, ensure_ascii=False, indent=1, sort_keys=True).encode()
    write_durably(paths.work / "run.json", lambda stream: _write(stream, content))
    sync_folder(paths.work.parent)
    return work


def _write(stream: Any, content: bytes) -> None:
    stream.write(content)


def _state(paths: OutputPaths, identity: RunIdentity, info: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    """What run.json is to say, after every reason to refuse.

    `overwrite`: the output that stands there is to be replaced. `anew`: the job whose `--overwrite` emptied the folder,
    so that its parts hold nothing older. `replaces`: the inode of the output that stood there then. `accepted`: jobs in
    the order in which each took up the work of those before.
    """
    key = identity.key
    fresh: dict[str, Any] = {"fingerprint": key, "accepted": [key], "info": dict(info)}
    fresh |= {"overwrite": False, "anew": None, "replaces": None}
    old = _read_state(paths.work)
    if policy in ("overwrite", "retry"):
        kept = _kept(paths.work, old, key, policy)
        if not kept:
            _empty(paths.work)
        replaces = {"overwrite": True, "replaces": _inode(paths.result)}
        return fresh | kept | replaces | ({"anew": key} if policy == "overwrite" else {})
    overwriting = bool(old and old["overwrite"])
    for path, contents in ((paths.result, None), (paths.states, STATES_CONTENTS)):
        # States of this job may stand there already: they take their place a moment before the results.
        if path.exists() and not overwriting and not (contents and is_of(read_footer(path, contents), identity)):
            raise FingerprintError(
                f"{path} exists and is not this job's output. Replace it with --overwrite, or name another with -o."
            )
    if old is not None and policy == "resume" and key not in old["accepted"]:
        changed = sorted(name for name in {*info, *old["info"]} if info.get(name) != old["info"].get(name))
        raise FingerprintError(
            f"{paths.work} holds the unfinished work of a different job (different: {', '.join(changed) or 'shard'}). "
            "Drop it with --overwrite, go on with it with --resume-anyway, or name another output with -o."
        )
    old = old or fresh
    accepted = old["accepted"]
    if policy == "resume-anyway":
        others = dict.fromkeys([*accepted, *sorted(_owners(paths.work))])
        accepted = [*(other for other in others if other != key), key]
    return fresh | {name: old[name] for name in ("overwrite", "anew", "replaces")} | {"accepted": accepted}


def _kept(work: Path, old: Mapping[str, Any] | None, key: str, policy: Policy) -> dict[str, Any]:
    """What stays of run.json where a run that replaces the output goes on with the work there; nothing: it does not.

    An overwriting run goes on with what it began itself, from nothing. A retry's parts were taken from the output that
    an overwriting run is to replace, and those of a job that goes on with another's are not all its own.
    """
    if old is None or not old["overwrite"]:
        return {}
    if policy == "overwrite":
        return {"accepted": [key]} if old["anew"] == key and _owners(work) <= {key} else {}
    owners = _owners(work)
    return {name: old[name] for name in ("accepted", "anew")} if owners and owners <= _accepted(old, key) else {}


def _accepted(state: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """Identity keys whose parts the job `key` goes on with: its own, and those of jobs that were there before it.

    Not those of a later one, which went on with its work under other options.
    """
    keys = state["accepted"] if state is not None else []
    return frozenset(keys[: keys.index(key) + 1] if key in keys else [key])


def _owners(work: Path) -> set[str]:
    """Identity keys of the jobs that committed the parts; a damaged one is nobody's.

    Raises:
        OutputError: a part that may be whole cannot be read.
    """
    found = set()
    for part in part_files(work):
        with suppress(OSError, pa.ArrowException, KeyError, ValueError), part_errors(part), part.open("rb") as stream:
            found.add((pq.ParquetFile(stream).metadata.metadata or {})[FINGERPRINT_KEY].decode())
    return found


def _read_state(work: Path) -> dict[str, Any] | None:
    """run.json, or None where there is none, or a damaged one: every part says itself whose it is."""
    with suppress(FileNotFoundError, ValueError):
        state = json.loads((work / "run.json").read_bytes())
        if isinstance(state, dict) and {"fingerprint", "accepted", "info", "overwrite"} <= state.keys():
            return {"anew": None, "replaces": None} | state
    return None


def _empty(work: Path) -> None:
    """Remove all but the lock, the parts last: a folder half removed still says whose it is."""
    for entry in sorted(work.iterdir(), key=lambda path: (path.name == "run.json", path.name)):
        if entry.name != LOCK_NAME:
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
