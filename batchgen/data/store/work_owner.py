"""Actions of a run on the output and the work that exist: the table in docs/resume.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from batchgen.data.durable_files import output_errors, part_errors, refuse_special
from batchgen.data.files import (
    abort_uploads,
    exists,
    files_in,
    is_folder,
    make_durably,
    note_version,
    remove_if_empty,
    remove_tree,
    rename,
    size_of,
    sync_folder,
)
from batchgen.data.lines import errors_path, is_lines, lines_of_job
from batchgen.data.results_file import intact_footer, keeps_rows, open_parquet
from batchgen.data.schema import ASKED, STATES_CONTENTS
from batchgen.data.store.damage import Note, ignore, output_damage, set_outputs_aside, set_parts_aside, set_state_aside
from batchgen.data.store.job_changes import changes
from batchgen.data.store.lock import RunLock
from batchgen.data.store.parts import part_schema
from batchgen.data.store.reuse import Moves, copy_rows, good_prompts
from batchgen.data.store.work_folder import OutputPaths, RunIdentity, WorkFolder, belongs_to, empty_work, is_complete
from batchgen.data.store.work_parts import has_results, has_status, part_files, part_owners
from batchgen.data.store.work_state import file_mark, read_state, write_state
from batchgen.errors import FingerprintError

Policy = Literal["resume", "overwrite", "resume-anyway"]


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
    retry_errors: bool = False,
) -> WorkFolder | None:
    """Lock the output and create its work folder, or open the existing one.

    Unfinished work without a finished row is dropped whatever job it belongs to: nothing was computed.

    Args:
        paths: from `output_paths`.
        identity: identity of this job.
        info: the values that the fingerprint was computed from, by name; stored, to report which of them differ.
        policy: what to do with other work and outputs. `resume-anyway` sets parts of another job aside in `earlier`.
        clock: time that the conversations of the job see, to be recorded; None if the model's template reads none.
        note: is given a line for each damaged file that is set aside: the output, `run.json`, parts.
        retry_errors: whether a finished output with failed rows is replaced; its good rows are committed as a part.
            Every byte of finished hidden states, which may be large, is read.

    Returns:
        The locked folder; None if the output is already complete.

    Raises:
        OutputError: another run holds the lock, or the folder cannot be written.
        OtherJobError: the output or the work belongs to a different job.
        FingerprintError: the errors of an output are to be retried, and a different job's work is next to it.
    """
    for path in (paths.result, paths.states):
        with output_errors(path):
            note_version(path)
        refuse_special(path)
    if policy != "overwrite" and is_done(paths, identity, retry_errors=retry_errors):
        return None
    lock = RunLock(paths.work, paths.result)
    try:
        set_state_aside(paths.work, note)
        complete = False
        if policy != "overwrite":
            whole = retry_errors and is_complete(paths, identity)
            set_outputs_aside(paths.result, paths.states, paths.work, note, whole=whole)
            # Checked again under the lock: the run that held it may have finished meanwhile.
            complete = is_complete(paths, identity)
        if complete and not (retry_errors and _has_errors(paths.result)):
            _leave(paths, identity, lock)
            return None
        with output_errors(paths.work):
            if complete:
                _begin_retry(paths, identity, note)
                policy = "resume-anyway"
            state = {**_state(paths, identity, info, policy, note), "clock": clock}
            work = _prepare(WorkFolder(paths, identity, lock, state, note))
        if complete and not work.part_files():
            _commit_good_rows(work)
        return work
    except BaseException:
        lock.release_unused()
        raise


def is_done(paths: OutputPaths, identity: RunIdentity, *, retry_errors: bool = False) -> bool:
    """Whether the output is complete and intact, with `retry_errors` without failed rows, and there is no work."""
    if exists(paths.work) or not is_complete(paths, identity):
        return False
    if output_damage(paths.result, paths.states, whole=retry_errors) is not None:
        return False
    if retry_errors and _has_errors(paths.result):
        return False
    if identity.shard is not None:
        remove_if_empty(paths.work.parent)
    return True


def _has_errors(result: Path) -> bool:
    if not keeps_rows(result):
        return False
    with part_errors(result), open_parquet(result) as table:
        return has_status(table, "error")


def _leave(paths: OutputPaths, identity: RunIdentity, lock: RunLock) -> None:
    """Release the lock of a finished output, and remove the work that made it."""
    if _has_other_work(paths, identity) or _is_replacement(paths):
        lock.release()
    else:
        sync_folder(paths.result.parent)  # a killed run may have renamed the output without that
        WorkFolder(paths, identity, lock).remove()


def _begin_retry(paths: OutputPaths, identity: RunIdentity, note: Note) -> None:
    if _has_other_work(paths, identity):
        raise FingerprintError(
            f"{paths.work} contains unfinished work of a different job. Finish it with its own command, or name "
            "another output with -o."
        )
    if not _is_replacement(paths):
        _drop(paths.work, note)


def _commit_good_rows(work: WorkFolder) -> None:
    """Commit the prompts of the finished output of which no sample failed, as one part."""
    with part_errors(work.paths.result):
        with open_parquet(work.paths.result) as table:
            found = {field.name: field.type for field in table.schema}
        work.asked = tuple(field for field in ASKED.values() if found.get(field.name) == field.type)
        good = good_prompts(work.paths.result)
        moves, part = Moves(work.paths.result, good, good), work.parts / "part-000000.parquet"
        copy_rows(moves, part, lambda states: part_schema(work, states))


def _has_other_work(paths: OutputPaths, identity: RunIdentity) -> bool:
    """Whether the work folder contains finished rows of a different job."""
    return bool(part_owners(paths.work) - {identity.key}) and has_results(paths.work)


def _is_replacement(paths: OutputPaths) -> bool:
    """Whether the work is meant to replace the existing output, rather than having produced it."""
    state, mark = read_state(paths.work), file_mark(paths.result)
    is_meant = state is not None and state["replaces"] == mark != state["written"]
    return is_meant and bool(part_files(paths.work))


def _prepare(work: WorkFolder) -> WorkFolder:
    abort_uploads(work.scratch)
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
    key, work = identity.key, paths.work
    fresh = {"overwrite": False, "emptied_by": None, "replaces": None}
    this_job = {"fingerprint": key, "info": dict(info)}
    replaces = {"overwrite": True, "replaces": file_mark(paths.result)}
    old, owners = read_state(work), part_owners(work)
    if policy == "overwrite":
        if old is None or old["emptied_by"] != key or not owners <= {key}:
            empty_work(work)
        return fresh | replaces | {"emptied_by": key} | this_job
    # run.json names the job; parts of another one in its folder are set aside when they are read.
    named = old is not None and old["info"] is not None
    own = (old is None or old["fingerprint"] == key) and (named or owners <= {key})
    if not own and not has_results(work):
        _drop(work, note)
        own, old = True, None
    if policy == "resume-anyway":
        if exists(paths.result) and intact_footer(paths.result) is None:
            _refuse_other_output(paths, identity)
        if not own:
            _set_aside(work)
            old = None
        others = exists(paths.result) or exists(paths.states)
        return fresh | (old or {}) | (replaces if others else {}) | this_job
    if not (own and old is not None and old["overwrite"]):
        _refuse_other_output(paths, identity)
    if not own:
        job = None if old is None else old["info"]
        changed = changes(job, info) if job is not None else []
        raise OtherJobError(
            f"{work} contains unfinished work of a different job (different: {', '.join(changed) or 'shard'}). "
            "Name another output with -o (--overwrite would drop this work).",
            job,
        )
    return fresh | (old or {}) | this_job


def _refuse_other_output(paths: OutputPaths, identity: RunIdentity) -> None:
    """Refuse to replace a file that is not this job's."""
    other, job, why = None, None, ""
    result, states = paths.result, paths.states
    if is_lines(result):
        # Empty files, which a job without rows leaves, name no job; errors without results are left by a killed run.
        written = next((file for file in (result, errors_path(result)) if exists(file) and size_of(file)), None)
        if written == result or (written is not None and lines_of_job(written, identity.fingerprint) is None):
            other, why = written, " JSON lines do not say what was asked for, so none of its rows can be reused."
    elif exists(result):
        other, job = result, (intact_footer(result) or {}).get("job")
    if other is None and exists(states):
        # States of this job may exist already: they are renamed just before the results.
        footer = intact_footer(states, STATES_CONTENTS)
        if not belongs_to(footer, identity):
            other, job = states, (footer or {}).get("job")
    if other is not None:
        raise OtherJobError(
            f"{other} exists and is not this job's output. Replace it with --overwrite, or name another with -o.{why}",
            job,
        )


def _drop(work: Path, note: Note) -> None:
    """Remove the work, and keep what is damaged."""
    set_parts_aside(work, note)
    empty_work(work)


def _set_aside(work: Path) -> None:
    """Move the parts of another job, with their states, to a folder of `earlier`."""
    earlier = [path for path in files_in(work / "earlier") if path.name.isdecimal()]
    # A killed run may have moved the states without the parts.
    begun = [path for path in earlier if not is_folder(path / "parts")]
    number = 1 + max((int(path.name) for path in earlier), default=-1)
    target = begun[0] if begun else work / "earlier" / f"{number:03d}"
    make_durably(target)
    for name in ("states", "parts"):  # a part without its states counts as damaged
        if is_folder(work / name):
            rename(work / name, target / name)
    sync_folder(target)
    sync_folder(work)
