"""Which job may use a work folder: opened, continued, emptied, taken over, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from batchgen.data.files import (
    exists,
    files_in,
    is_folder,
    make_durably,
    remove_if_empty,
    remove_tree,
    rename,
    size_of,
    sync_folder,
)
from batchgen.data.write.committed import Committed, first_of_prompt, read_keys
from batchgen.data.write.damage import Note, ignore, output_damage, set_outputs_aside, set_parts_aside, set_state_aside
from batchgen.data.write.durable_files import output_errors, part_errors, refuse_special
from batchgen.data.write.job_changes import changes
from batchgen.data.write.lines import errors_path, is_lines, written_by
from batchgen.data.write.lock import RunLock
from batchgen.data.write.parts import part_schema
from batchgen.data.write.results_file import intact_footer
from batchgen.data.write.reuse import Moves, Prompts, ReuseFile, copy_rows
from batchgen.data.write.schema import STATES_CONTENTS
from batchgen.data.write.work_folder import OutputPaths, RunIdentity, WorkFolder, belongs_to, empty_work, is_complete
from batchgen.data.write.work_parts import has_results, part_files, part_owners
from batchgen.data.write.work_state import file_mark, read_state, write_state
from batchgen.errors import FingerprintError

Policy = Literal["resume", "overwrite", "resume-anyway", "retry"]


class OtherJobError(FingerprintError):
    """The output or the unfinished work belongs to a job with another input or other options."""

    def __init__(self, message: str, job: Mapping[str, Any] | None) -> None:
        super().__init__(message)
        self.job = job
        """The values that the fingerprint of that job was computed from; None if they are not recorded."""


def open_work(
    paths: OutputPaths,
    identity: RunIdentity,
    info: Mapping[str, Any],
    policy: Policy = "resume",
    clock: str | None = None,
    note: Note = ignore,
    *,
    whole: bool = False,
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
        note: is given a line for each damaged file that is set aside: the output, `run.json`, parts.
        whole: read every byte of finished hidden states as well, which may be large.

    Returns:
        The locked folder; None if the output is already complete.

    Raises:
        OutputError: another run holds the lock, or the folder cannot be written.
        OtherJobError: the output or the work belongs to a different job.
    """
    refuse_special(paths.result)
    refuse_special(paths.states)
    replaces = policy in ("overwrite", "retry")
    if not replaces and is_done(paths, identity, whole):
        return None
    lock = RunLock(paths.work, paths.result)
    try:
        set_state_aside(paths.work, note)
        if policy != "overwrite":
            set_outputs_aside(paths.result, paths.states, paths.work, note, whole=whole)
        # Checked again under the lock: the run that held it may have finished meanwhile.
        if not replaces and is_complete(paths, identity):
            if has_other_work(paths, identity) or _is_replacement(paths):
                lock.release()
            else:
                sync_folder(paths.result.parent)  # a killed run may have renamed the output without that
                WorkFolder(paths, identity, lock).remove()
            return None
        with output_errors(paths.work):
            state = {**_state(paths, identity, info, policy, note), "clock": clock}
            return _prepare(WorkFolder(paths, identity, lock, state, note))
    except BaseException:
        lock.release_unused()
        raise


def open_for_retry(
    paths: OutputPaths,
    identity: RunIdentity,
    info: Mapping[str, Any],
    policy: Policy = "resume",
    clock: str | None = None,
    note: Note = ignore,
) -> WorkFolder | None:
    """Open the work folder as `open_work` does, for a run that recomputes failed prompts, also of a finished output.

    The finished output is kept until the new one is complete. If it is damaged, it is set aside.

    Returns:
        The folder, locked; None if the output is complete and has no errors.

    Raises:
        OutputError, FingerprintError: as `open_work`.
    """
    if policy == "overwrite" or is_lines(paths.result) or not is_complete(paths, identity):
        return open_work(paths, identity, info, policy, clock, note)
    if output_damage(paths.result, paths.states, whole=True) is not None:
        return open_work(paths, identity, info, policy, clock, note, whole=True)
    with part_errors(paths.result):
        keys = read_keys([paths.result])
    if not keys.errors:
        return open_work(paths, identity, info, policy, clock, note)
    if has_other_work(paths, identity):
        raise FingerprintError(
            f"{paths.work} contains unfinished work of a different job. Finish it with its own command, or name "
            "another output with -o."
        )
    work = open_work(paths, identity, info, "retry", clock, note)
    assert work is not None
    if not work.part_files():
        with part_errors(paths.result):
            _commit_good_rows(work, keys)
    return work


def _commit_good_rows(work: WorkFolder, keys: Committed) -> None:
    """Commit the good prompts of the finished output as one part, atomically."""
    good = keys.without_failed_prompts()  # an output is in key order
    row, prompt = keys.row_index[good], keys.prompt_index[good]
    first = first_of_prompt(row, prompt)
    prompts = Prompts(row[first], prompt[first], np.zeros(int(first.sum()), np.int64))
    has_states = bool((intact_footer(work.paths.result) or {}).get("states"))
    file = ReuseFile(work.paths.result, work.paths.states if has_states else None)
    part = work.parts / "part-000000.parquet"
    copy_rows(Moves(file, prompts, prompts), part, lambda states: part_schema(work, states), lambda table: table)


def is_done(paths: OutputPaths, identity: RunIdentity, whole: bool = False) -> bool:
    """Whether the output is complete and intact, and there is no work folder."""
    if exists(paths.work) or not is_complete(paths, identity):
        return False
    if output_damage(paths.result, paths.states, whole=whole) is not None:
        return False
    if identity.shard is not None:
        remove_if_empty(paths.work.parent)
    return True


def has_other_work(paths: OutputPaths, identity: RunIdentity) -> bool:
    """Whether the work folder contains finished rows of a different job.

    Raises:
        OutputError: a part that may be intact cannot be read.
    """
    return bool(part_owners(paths.work) - {identity.key}) and has_results(paths.work)


def _is_replacement(paths: OutputPaths) -> bool:
    """Whether the work is meant to replace the existing output, rather than having produced it."""
    state, mark = read_state(paths.work), file_mark(paths.result)
    if state is None or state["replaces"] != mark or not part_files(paths.work):
        return False
    return bool(state["written"] != mark)


def _prepare(work: WorkFolder) -> WorkFolder:
    remove_tree(work.scratch)
    for folder in (work.parts, work.tokenized, work.scratch, work.paths.result.parent):
        make_durably(folder)
    write_state(work.paths.work, work.state)
    # Also what a killed run may have made.
    above = work.paths.work.parent
    for folder in (work.paths.work, above, *([] if work.identity.shard is None else [above.parent])):
        sync_folder(folder)
    return work


def _state(
    paths: OutputPaths, identity: RunIdentity, info: Mapping[str, Any], policy: Policy, note: Note
) -> dict[str, Any]:
    """The content of run.json; raises every error that refuses the job, and puts work that is not continued away.

    `overwrite`: whether the existing output will be replaced. `emptied_by`: key of the job whose `--overwrite` emptied
    the folder, so that no row of it comes from the output. `replaces`: mark of the output that existed then. `written`:
    that of the output that is about to be put in its place.
    """
    key = identity.key
    fresh: dict[str, Any] = {"fingerprint": key, "info": dict(info)}
    fresh |= {"overwrite": False, "emptied_by": None, "replaces": None}
    old = read_state(paths.work)
    replaces = {"overwrite": True, "replaces": file_mark(paths.result)}
    if policy in ("overwrite", "retry"):
        kept = _kept_state(paths.work, old, key, policy)
        if kept is None:
            if policy == "retry":
                set_parts_aside(paths.work, note)
            empty_work(paths.work)
        return fresh | (kept or {}) | replaces | ({"emptied_by": key} if policy == "overwrite" else {})
    # run.json names the job; parts of another one in its folder are set aside when they are read.
    named = old is not None and old["info"] is not None
    own = (old is None or old["fingerprint"] == key) and (named or part_owners(paths.work) <= {key})
    if not own and not has_results(paths.work):
        set_parts_aside(paths.work, note)
        empty_work(paths.work)
        own, old = True, None
    if policy == "resume-anyway":
        if exists(paths.result) and intact_footer(paths.result) is None:
            _refuse_other_output(paths, identity)
        if not own:
            _set_aside(paths.work)
        others = exists(paths.result) or exists(paths.states)
        return fresh | (old if own and old is not None else {}) | (replaces if others else {}) | {"info": dict(info)}
    if not (own and old is not None and old["overwrite"]):
        _refuse_other_output(paths, identity)
    if not own:
        job = None if old is None else old["info"]
        changed = changes(job, info) if job is not None else []
        raise OtherJobError(
            f"{paths.work} contains unfinished work of a different job (different: {', '.join(changed) or 'shard'}). "
            "Name another output with -o (--overwrite would drop this work).",
            job,
        )
    return fresh | (old or {}) | ({} if old is None or old["info"] else {"info": dict(info)})


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
        if exists(path) and not (contents and belongs_to(intact_footer(path, contents), identity)):
            raise OtherJobError(
                f"{path} exists and is not this job's output. Replace it with --overwrite, or name another with -o.",
                (intact_footer(path, contents) or {}).get("job"),
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
    number = 1 + max((int(path.name) for path in files_in(work / "earlier") if path.name.isdecimal()), default=-1)
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
