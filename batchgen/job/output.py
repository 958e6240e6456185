"""A job's output: opened when the job begins (continued, complete, taken over, or refused), and written at its end."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.config.urls import RemotePath, path_of
from batchgen.data.durable_files import output_errors
from batchgen.data.files import exists, is_file, remove_file, rename, resolved, sync_folder
from batchgen.data.lines import errors_path, has_only_marks, is_lines
from batchgen.data.out.chosen_columns import publish_columns, totals_of, with_totals
from batchgen.data.out.export import ExportCounts, row_shapes, write_as_given
from batchgen.data.out.finish import finish
from batchgen.data.out.openai_bodies import TokenPiece
from batchgen.data.out.view import Results, Totals, read_totals
from batchgen.data.read.input_set import InputSet
from batchgen.data.results_file import intact_footer, keeps_rows, read_footer
from batchgen.data.store.damage import Note, ignore, output_damage
from batchgen.data.store.job_changes import INPUT_FILES, changes, describe_changes
from batchgen.data.store.output_budget import OutputBudget
from batchgen.data.store.reuse import find_moves
from batchgen.data.store.work_folder import OutputPaths, WorkFolder, is_complete
from batchgen.data.store.work_owner import OtherJobError, Policy, open_work
from batchgen.data.store.work_parts import earlier_parts, has_results, part_files
from batchgen.data.store.work_state import read_state
from batchgen.errors import BatchgenError, FingerprintError, UsageError
from batchgen.job.clock import clock_record, set_clock
from batchgen.job.results.export import write_files
from batchgen.job.rows.fingerprint import JobIdentity
from batchgen.job.rows.ingest import Ingested, ingest
from batchgen.job.rows.request_hashes import RequestHashes, environment
from batchgen.job.rows.reuse import files_of, intact_files, rows_of
from batchgen.job.setup import Setup
from batchgen.text.tokens.detokenize import TokenBytes


@dataclass(frozen=True, slots=True)
class OpenedJob:
    """What opening an output needs to know of the job."""

    setup: Setup
    inputs: InputSet
    identity: JobIdentity
    paths: OutputPaths
    note: Note = ignore
    """Shows a line to the user."""

    def begin(self) -> WorkFolder | None:
        """The locked work folder; None if the output is already complete.

        Raises:
            FingerprintError: the output or its work is of a job that this one does not continue. The message says what
                differs, how many rows could be reused, and with which option.
            OutputError: as `open_work`.
        """
        retry = self.setup.config.retry_errors
        if retry and not keeps_rows(self.paths.result):
            self._refuse_retry()
        clock, policy = set_clock(self.setup, self.identity, self.paths), self._policy()
        if policy == "resume-anyway" and not is_complete(self.paths, self.identity.run):
            work = read_state(self.paths.work) if has_results(self.paths.work) else None
            self._refuse_other_environment(self.paths.work, (work or {}).get("info"))
            self._refuse_other_environment(self.paths.result, _job_of(self.paths.result))
        identity, info = self.identity.run, self.identity.info
        begin = partial(open_work, self.paths, identity, info, clock=clock, note=self.note, retry_errors=retry)
        try:
            return begin(policy)
        except OtherJobError as other:
            if retry and other.job and changes(other.job, info) == [INPUT_FILES]:
                return begin("resume-anyway")
            raise self._refusal(other) from None

    def refuse_named(self) -> None:
        """Refuse `--reuse OUT` of a finished output whose rows are of another model.

        Raises:
            FingerprintError: no row of it can be reused.
        """
        if (named := self.setup.config.reuse) is not None:
            instead = "Leave out --reuse to compute all rows."
            self._refuse_other_environment(path_of(named), _job_of(path_of(named)), instead)

    def _refuse_retry(self) -> None:
        """Refuse to retry the errors of a finished output whose rows cannot be read back."""
        path = self.paths.result
        if self.setup.config.existing == "overwrite" or not is_complete(self.paths, self.identity.run):
            return
        if output_damage(path, self.paths.states, whole=False) is None and totals_of(path).rows_error:
            what = "JSON lines" if is_lines(path) else "the columns of --columns"
            raise UsageError(
                f"{path} holds {what}, whose errors cannot be retried alone. For retries run with -o OUT.parquet and "
                "all columns, and write lines with batchgen export."
            )

    def _policy(self) -> Policy:
        """The option of the run; `--reuse` of the output itself is `--resume-anyway`."""
        config = self.setup.config
        own = {resolved(each) for each in (config.output, self.paths.result, self.paths.work)}
        names_own = config.reuse is not None and resolved(path_of(config.reuse)) in own
        return "resume-anyway" if names_own and config.existing == "resume" else config.existing

    def _refuse_other_environment(
        self,
        path: Path,
        job: Mapping[str, Any] | None,
        instead: str = "Name another output with -o to compute all rows (--overwrite would replace this one).",
    ) -> None:
        """Refuse to take over rows of another model, before anything is touched."""
        if job and (changed := self._changed_environment(job)):
            raise FingerprintError(
                f"no row of {path} can be reused: results of this job would differ. Changed: "
                f"{self._describe(changed, job)}. {instead}"
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
        text = f"{other} Changed: {self._describe(changes(other.job, self.identity.info), other.job)}."
        if self._changed_environment(other.job):
            return FingerprintError(f"{text} Results would differ, so no row can be reused.")
        return FingerprintError(text + self._count_reusable())

    def _count_reusable(self) -> str:
        """How many rows of this job the files of the refused one hold; empty if they or the rows cannot be read."""
        out = self.paths.result
        if not (files := self._other_files()):
            return ""
        try:
            with (
                tempfile.TemporaryDirectory(prefix="batchgen-") as folder,
                closing(ingest(self.setup, self.inputs, Path(folder), Path(folder))) as rows,
            ):
                count = rows_of(find_moves(files, RequestHashes(self.setup, rows.table).all()))
        except BatchgenError:
            return ""
        if not count:
            return f" None of this job's {rows.rows:,} rows can be reused."
        options = f"--reuse {out} or --resume-anyway" if exists(out) else "--resume-anyway"
        return (
            f" {count:,} of this job's {rows.rows:,} rows can be reused: add {options}; the others are then computed."
        )

    def _other_files(self) -> list[Path]:
        """The files of the job that was refused."""
        if exists(self.paths.result):
            return files_of(self.paths.result) if keeps_rows(self.paths.result) else []
        return intact_files([*part_files(self.paths.work), *earlier_parts(self.paths.work)])


def _job_of(path: Path) -> Mapping[str, Any] | None:
    """What the fingerprint of an output's job was computed from; None if it is not recorded."""
    return (intact_footer(path) or {}).get("job")


def write_output(work: WorkFolder, rows: Ingested, record: Mapping[str, Any], setup: Setup) -> Totals:
    """Merge all committed rows into the output; returns its totals.

    Args:
        work: the work folder of the job, with all its rows.
        rows: the rows of the input.
        record: the entries of the footer that are known when the job begins, and its kernels.
        setup: the job's setup.

    Raises:
        OutputError: the disk is full, or the output exceeds `--max-output-bytes`.
    """
    result = work.paths.result
    made = {
        **record,
        "input_rows": rows.rows,
        "rows_skipped": rows.skipped,
        "row_shapes": rows.shapes.encode(),
        "grammar_backends": sorted(rows.grammar_backends),
        "created": int(time.time()),
        **clock_record(setup),
        "layer_ids": [*setup.spec.moe_layers] or None,
        "experts_per_token": setup.spec.experts_per_token or None,
    }
    most, columns = setup.config.max_output_bytes, setup.config.columns or ()
    if not (is_lines(result) or columns or isinstance(result, RemotePath)):
        finish(work, rows.expected, made, max_bytes=most)
        return read_totals(result)
    totals = Totals()

    def publish(whole: Path) -> None:
        nonlocal totals
        totals = read_totals(whole)
        if is_lines(result):
            _publish_lines(setup, result, whole)
        elif columns:
            publish_columns(work, whole, columns, most)
        else:
            with output_errors(result):
                rename(whole, result)

    finish(work, rows.expected, made, max_bytes=most, publish=publish)
    return totals


def _publish_lines(setup: Setup, path: Path, whole: Path) -> None:
    """Write the lines of a complete results file, with the failed batch lines in a separate file, atomically.

    Raises:
        OutputError: the disk is full, or the files exceed `--max-output-bytes`; nothing was replaced.
    """
    columns = setup.config.columns or ()
    results = Results([whole], True, with_totals(whole, columns) if columns else read_footer(whole))
    lines = any(shape.line for shape in row_shapes(results))
    errors = errors_path(path)
    budget = OutputBudget(setup.config.max_output_bytes)
    tokenizer = setup.front_end.tokenizer
    pieces = cache(lambda: TokenBytes(tokenizer))  # made for the first row with logprobs

    def piece(token: int) -> TokenPiece:
        return TokenPiece(pieces()[token], token in tokenizer.special_ids)

    def write(streams: Sequence[BinaryIO]) -> ExportCounts:
        counts = write_as_given(results, streams[0], streams[1] if lines else None, piece, columns)
        budget.check(sum(stream.tell() for stream in streams))
        return counts

    write_files([path, errors] if lines else [path], write, True, lambda file: whole.with_name(file.name))
    if not lines and is_file(errors) and has_only_marks(errors):
        remove_file(errors)  # of the output that was replaced
        sync_folder(errors.parent)
