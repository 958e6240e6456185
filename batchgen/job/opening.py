"""Opening the output of a job: continued, complete, taken over from a job with another input, or refused by name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.config.run_config import RunConfig
from batchgen.data.export import read_line_totals
from batchgen.data.files import exists, files_in, is_folder, resolved
from batchgen.data.read.input_set import InputSet
from batchgen.data.write.damage import Note, ignore, output_damage
from batchgen.data.write.job_changes import INPUT_FILES, changes, describe_changes
from batchgen.data.write.lines import is_lines
from batchgen.data.write.results_file import DamagedFile, intact_footer
from batchgen.data.write.reuse import ReuseFile, find_moves, part_file
from batchgen.data.write.work_folder import OutputPaths, RunIdentity, WorkFolder, is_complete, output_paths
from batchgen.data.write.work_owner import OtherJobError, Policy, open_for_retry, open_work
from batchgen.data.write.work_parts import earlier_parts, has_results, part_files
from batchgen.data.write.work_state import read_state
from batchgen.errors import BatchgenError, FingerprintError, UsageError
from batchgen.job.fingerprint import JobIdentity
from batchgen.job.ingest import Ingested, ingest
from batchgen.job.request_hashes import RequestHashes, environment
from batchgen.job.reuse import files_of
from batchgen.job.setup import Setup


@dataclass(frozen=True, slots=True)
class OpenedJob:
    """What opening an output needs to know of the job."""

    setup: Setup
    inputs: InputSet
    identity: JobIdentity
    paths: OutputPaths
    note: Note = ignore
    """Shows a line to the user."""

    @property
    def _config(self) -> RunConfig:
        return self.setup.config

    def begin(self) -> WorkFolder | None:
        """The locked work folder; None if the output is already complete.

        Raises:
            FingerprintError: the output or its work is of a job that this one does not continue. The message says what
                differs, how many rows could be reused, and with which option.
            OutputError: as `open_work`.
        """
        if self._config.retry_errors and is_lines(self.paths.result):
            self._refuse_retry_of_lines()
        open_output = open_for_retry if self._config.retry_errors else open_work
        policy, clock = self._policy(), set_clock(self.setup, self.identity, self.paths)
        if policy == "resume-anyway":
            self._refuse_other_environments()
        try:
            return open_output(self.paths, self.identity.run, self.identity.info, policy, clock, self.note)
        except OtherJobError as other:
            if self._config.retry_errors and other.job and changes(other.job, self.identity.info) == [INPUT_FILES]:
                return open_output(self.paths, self.identity.run, self.identity.info, "resume-anyway", clock, self.note)
            raise self._refusal(other) from None

    def refuse_named(self) -> None:
        """Refuse `--reuse OUT` of a finished output whose rows are of another model.

        Raises:
            FingerprintError: no row of it can be reused.
        """
        named = self._config.reuse
        job = None if named is None else _job_of(Path(named))
        if job and (changed := self._changed_environment(job)):
            raise FingerprintError(
                f"no row of {named} can be reused: results of this job would differ. Changed: "
                f"{self._describe(changed, job)}. Leave out --reuse to compute all rows."
            )

    def _refuse_retry_of_lines(self) -> None:
        """Refuse to retry the errors of a finished output of JSON lines.

        Raises:
            UsageError: it has errors.
        """
        path = self.paths.result
        if self._config.existing == "overwrite" or not is_complete(self.paths, self.identity.run):
            return
        if output_damage(path, self.paths.states, whole=False) is None and read_line_totals(path).rows_error:
            raise UsageError(
                f"{path} holds JSON lines, whose errors cannot be retried alone. For retries run with -o "
                "OUT.parquet, and write the lines with batchgen export."
            )

    def _policy(self) -> Policy:
        named, existing = self._config.reuse, self._config.existing
        names_output = named is not None and resolved(Path(named)) in {
            resolved(each) for each in (self._config.output, self.paths.result, self.paths.work)
        }
        return "resume-anyway" if names_output and existing == "resume" else existing

    def _refuse_other_environments(self) -> None:
        """Refuse to take over rows of another model, before anything is touched.

        Raises:
            FingerprintError: no row of the output or of its work could be reused.
        """
        if is_complete(self.paths, self.identity.run):
            return
        work = read_state(self.paths.work) if has_results(self.paths.work) else None
        for path, job in ((self.paths.work, (work or {}).get("info")), (self.paths.result, _job_of(self.paths.result))):
            if job and (changed := self._changed_environment(job)):
                what = self._describe(changed, job)
                raise FingerprintError(
                    f"no row of {path} can be reused: results of this job would differ. Changed: {what}. Name "
                    "another output with -o to compute all rows (--overwrite would replace this one)."
                )

    def _describe(self, names: list[str], job: Mapping[str, Any]) -> str:
        return describe_changes(names, job, self.identity.info, [file.path for file in self.inputs.files])

    def _changed_environment(self, job: Mapping[str, Any]) -> list[str]:
        now = self.identity.info
        return [name for name in environment(self.setup) if job.get(name) != now.get(name)]

    def _refusal(self, other: OtherJobError) -> FingerprintError:
        """The refusal with what differs, and how rows can be reused."""
        if other.job is None:
            return FingerprintError(str(other))
        changed = changes(other.job, self.identity.info)
        text = f"{other} Changed: {self._describe(changed, other.job)}."
        if self._changed_environment(other.job):
            return FingerprintError(f"{text} Results would differ, so no row can be reused.")
        files, out = self._other_files(), self.paths.result
        options = "--resume-anyway" if not exists(out) else f"--reuse {out} or --resume-anyway"
        if not files or (counted := self._count(files)) is None:
            return FingerprintError(text)
        if not counted[0]:
            return FingerprintError(f"{text} None of this job's {counted[1]:,} rows can be reused.")
        return FingerprintError(
            f"{text} {counted[0]:,} of this job's {counted[1]:,} rows can be reused: add {options}; the others are "
            "then computed."
        )

    def _other_files(self) -> list[ReuseFile]:
        """The files of the job that was refused."""
        if exists(self.paths.result):
            return [] if is_lines(self.paths.result) else files_of(self.paths.result)
        found = []
        for part in [*part_files(self.paths.work), *earlier_parts(self.paths.work)]:
            with suppress(DamagedFile):
                found.append(part_file(part))
        return found

    def _count(self, files: list[ReuseFile]) -> tuple[int, int] | None:
        """(rows of this job that could be reused, all its rows); None if the rows cannot be read."""
        try:
            with read_rows(self.setup, self.inputs) as rows:
                hashes = RequestHashes(self.setup, rows.table)
                moves = find_moves(files, hashes.all())
                found = [each.new.row_index for each in moves]
                return (len(np.unique(np.concatenate(found))) if found else 0), rows.rows
        except BatchgenError:
            return None


def clock_record(setup: Setup) -> dict[str, Any]:
    """Entries of the footer: the time that the conversations saw, and what the chat template wrote of it."""
    tokenizer = setup.front_end.tokenizer
    shown = tokenizer.clock_text
    return {"clock": None if shown is None else tokenizer.clock.isoformat(), "clock_text": shown}


def set_clock(setup: Setup, identity: JobIdentity, paths: OutputPaths) -> str | None:
    """Set the time that the job's conversations see and return it; None if the model's chat template does not read it.

    It is the one given, the one with which the job began, that of the job whose rows are reused, or the time now.
    """
    config, tokenizer = setup.config, setup.front_end.tokenizer
    if tokenizer.clock_text is None:
        return None
    if config.engine.clock is None:
        found = _recorded_clock(paths, identity.run, config.existing)
        if found is None and config.existing != "overwrite":
            found = _clock_of(paths.result)
        if found is None and config.reuse is not None:
            found = _clock_of(Path(config.reuse))
        if found is not None:
            tokenizer.clock = datetime.fromisoformat(found)
    return tokenizer.clock.isoformat()


def _recorded_clock(paths: OutputPaths, identity: RunIdentity, policy: Policy = "resume") -> str | None:
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
    footer = intact_footer(file)
    return footer if footer is not None and footer.get("fingerprint") == fingerprint else None


def _clock_of(out: Path) -> str | None:
    """The time that another job saw, from its finished output, a folder of shards or unfinished work."""
    first = next(iter(files_in(out, "part-*.parquet")), out) if is_folder(out) else out
    record = intact_footer(first) or read_state(out) or read_state(output_paths(out).work) or {}
    return record.get("clock")


@contextmanager
def read_rows(setup: Setup, inputs: InputSet) -> Iterator[Ingested]:
    """The rows of a job that may be refused, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
        rows = ingest(setup, inputs, Path(folder), Path(folder))
        try:
            yield rows
        finally:
            rows.close()


def _job_of(path: Path) -> Mapping[str, Any] | None:
    """What the fingerprint of an output's job was computed from; None if it is not recorded."""
    return (intact_footer(path) or {}).get("job")
