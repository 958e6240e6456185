"""Reader of results, finished or not, in bounded memory; and totals of a results file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.data.files import files_in, is_file, is_folder
from batchgen.data.lines import is_lines
from batchgen.data.out.conditions import Condition, root_of
from batchgen.data.results_file import StoredTable, open_parquet, read_footer, refuse_columns
from batchgen.data.schema import READABLE_VERSIONS, STATES_CONTENTS, VERSION_KEY
from batchgen.data.store.work_folder import output_paths
from batchgen.data.store.work_parts import part_files
from batchgen.data.store.work_state import file_mark, replaced_by
from batchgen.errors import BatchgenError, InputError, UsageError
from batchgen.request.completion import AnswerCounts
from batchgen.tables.temporal import temporal_to_text

_SHARD = re.compile(r"part-\d{5,}-of-(\d{5,})")


@dataclass(frozen=True, slots=True)
class Results:
    """Rows of a finished output, of a folder of shards, or of the parts of a job that is not finished."""

    files: Sequence[Path]
    complete: bool
    footer: dict[str, Any] | None
    """Run record of the first finished file."""
    note: str | None = None
    """Message for the user if there are other results for this output, or shards are missing."""

    def __len__(self) -> int:
        return sum(map(_count, self.files))

    @property
    def schemas(self) -> list[pa.Schema]:
        """The schemas of the files."""
        found = []
        for file in self.files:
            with read_errors(file), open_parquet(file) as table:
                found.append(table.schema)
        return found

    def count(self, errors: bool = False, where: Sequence[Condition] = ()) -> int:
        """Number of the rows that `rows` yields with the same arguments."""
        total = 0
        for file in self.files:
            with read_errors(file), open_parquet(file) as stored:
                for _, size, matching in _matches(stored, None, errors, where):
                    total += size if matching is None else len(matching)
        return total

    def rows(
        self,
        row: int | None = None,
        errors: bool = False,
        columns: Sequence[str] | None = None,
        where: Sequence[Condition] = (),
    ) -> Iterator[dict[str, Any]]:
        """Yield rows as dicts in stored order: input order in a finished file, order of completion otherwise.

        Carried dates and timestamps are strings, as in `extra`.

        Args:
            row: only the output rows of this `row_index`.
            errors: only rows with status `error`.
            columns: only these columns, in the schema's order; None for all.
            where: only rows that meet all of these conditions.

        Raises:
            InputError: a file is damaged.
            UsageError: a condition does not fit its column's type.
        """
        for file in self.files:
            with read_errors(file):
                yield from _file_rows(file, row, errors, columns, where)


def open_results(out: Path, *, finished: bool = False, waiting: bool = False) -> Results:
    """Open the results of `out`: a finished file, a folder of shards, or unfinished work.

    If a run that will replace a finished output has committed rows after it was written, those rows are opened.

    Args:
        out: path of an output or a shard, finished or not; a folder of shards; or a work folder.
        finished: open finished output only, even if newer, unfinished work exists.
        waiting: a job that has begun and committed nothing yet has results without files.

    Raises:
        InputError: there are no results, or the file is not batchgen's.
        UsageError: the folder contains no results.
    """
    work = _work_folder_of(out)
    if waiting and work is not None and is_folder(work) and not is_file(out) and not _work_parts(work):
        return Results((), False, None)
    return _folder(out, finished) if is_folder(out) else _single(out, finished)


def _single(out: Path, finished: bool) -> Results:
    parts = _work_parts(_work_folder_of(out))
    if not is_file(out):
        if not parts:
            raise InputError(f"{out} does not exist, and there is no unfinished work for it. Check the name.")
        return _unfinished(out, parts, finished)
    if not finished and _is_newer(parts, out):
        return Results(parts, False, None, "newer, unfinished work is shown; --finished shows the finished file")
    return Results([out], True, _footer(out))


def _unfinished(out: Path, parts: Sequence[Path], finished: bool) -> Results:
    """The committed rows of a job without a finished output."""
    if finished:
        raise InputError(f"{out} is not finished. Run its command again first.")
    return Results(parts, False, None, _left_out(parts))


def _folder(out: Path, finished: bool) -> Results:
    """The results of a folder of shards, each finished or unfinished; or of a work folder."""
    shards = {file.stem: [file] for file in files_in(out, "part-*.parquet")}
    footers = [_footer(file) for (file,) in shards.values()]
    work = _work_folder_of(out)
    unfinished = {folder.name: _work_parts(folder) for folder in ([] if work is None else _shard_folders(work))}
    recomputed = 0
    for name, parts in unfinished.items():
        file = out / f"{name}.parquet"
        if parts and not finished and (name not in shards or _is_newer(parts, file)):
            recomputed += name in shards
            shards[name] = parts
    if not shards:
        parts = _work_parts(out) or _work_parts(work)
        if not parts:
            raise UsageError(f"{out} is a folder without results. Name a result file, or a folder of shards.")
        return _unfinished(out, parts, finished)
    return _shard_results(shards, footers, recomputed)


def _shard_results(shards: dict[str, list[Path]], footers: list[dict[str, Any]], recomputed: int) -> Results:
    """The results of all existing shards; complete if all shards are finished and none is being recomputed."""
    files = [file for name in sorted(shards) for file in shards[name]]
    counts = [int(match[1]) for name in shards if (match := _SHARD.fullmatch(name))]
    finished_count, count = len(footers) - recomputed, max(counts, default=len(footers))
    notes = [] if finished_count >= count else [f"{finished_count} of {count} shards are finished"]
    if recomputed:
        what = "unfinished work is shown; --finished shows the finished files"
        notes.append(f"{recomputed} being computed again: {what}")
    complete = not notes and len(shards) == len(footers)
    return Results(files, complete, footers[0] if footers else None, ", ".join(notes) or None)


def _work_folder_of(out: Path) -> Path | None:
    """Work folder of an output or of one shard; None for a path without a name, such as the root."""
    path = _with_name(out)
    if not path.name:
        return None
    if _SHARD.fullmatch(path.stem) and (folder := _with_name(path.parent)).name:
        work = output_paths(folder).work / path.stem
        if is_folder(work):
            return work
    return output_paths(path).work


def _with_name(path: Path) -> Path:
    """The path with a name: `.` and `..` are made absolute."""
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))  # noqa: PTH100 - keeps links


def _footer(file: Path) -> dict[str, Any]:
    footer = read_footer(file)
    if footer is None and read_footer(file, STATES_CONTENTS) is not None:
        raise InputError(f"{file} holds hidden states, not results. Name the results file instead.")
    if footer is None and is_lines(file):
        raise InputError(
            f"{file} holds JSON lines, which any text tool reads. batchgen show, export, verify and merge read "
            "Parquet: run with -o OUT.parquet, and write the lines with batchgen export."
        )
    if footer is None:
        raise InputError(f"{file} is not a batchgen output.")
    refuse_columns(file, footer)
    return footer


def _is_newer(parts: Sequence[Path], out: Path) -> bool:
    """Whether the parts are of a job that will replace this very output: each part says what it replaces.

    A run that was killed just after it wrote its output leaves parts that are in it.
    """
    with read_errors(out):
        mark = file_mark(out) if parts else None
    return mark is not None and any(replaced_by(part) == mark for part in parts)


@contextmanager
def read_errors(file: Path | None = None) -> Iterator[None]:
    """Errors of the disk while files are read, as errors of `file` if it is given; a damaged file names itself."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BatchgenError):
            raise
        what, why = ("a file", error) if file is None else (file, error.strerror or error)
        raise InputError(f"{what} cannot be read ({why}). Check its permissions and the disk.") from error


def _count(file: Path) -> int:
    with read_errors(file), open_parquet(file) as table:
        return len(table)


def _shard_folders(work: Path) -> list[Path]:
    return [folder for folder in files_in(work, "part-*") if is_folder(folder)]


def _work_parts(work: Path | None) -> list[Path]:
    """Parts of a work folder and of its shards' folders; those with a damaged footer are left out."""
    folders = [] if work is None else [work, *_shard_folders(work)]
    return [part for folder in folders for part in part_files(folder) if _is_results(part)]


def _is_results(part: Path) -> bool:
    with suppress(OSError), open_parquet(part) as table:
        return table.about.get(VERSION_KEY) in READABLE_VERSIONS
    return False


def _left_out(parts: Sequence[Path]) -> str | None:
    """A note on parts that are damaged, next to those that are shown."""
    folders = sorted({part.parent.parent for part in parts})
    count = sum(len(part_files(folder)) for folder in folders) - len(parts)
    return f"{count} damaged parts are left out: a run computes their rows again" if count > 0 else None


def _file_rows(
    file: Path, row: int | None, errors: bool, columns: Sequence[str] | None, where: Sequence[Condition]
) -> Iterator[dict[str, Any]]:
    with open_parquet(file) as stored:
        names = None if columns is None else [name for name in stored.schema.names if name in columns]
        for group, _, matching in _matches(stored, row, errors, where):
            table = stored.group(group, names)
            table = table if matching is None else table.take(matching)
            # Dates and timestamps as strings: JSON has neither, and Python's lack nanoseconds.
            columns_as_text = [temporal_to_text(column) for column in table.columns]
            for batch in pa.table(columns_as_text, names=table.schema.names).to_batches(256):
                yield from batch.to_pylist()


def _matches(
    stored: StoredTable, row: int | None, errors: bool, where: Sequence[Condition]
) -> Iterator[tuple[int, int, pa.Array | None]]:
    """(row group, its number of rows, indexes of those that match; None: all) of each group with matching rows."""
    for group in range(stored.metadata.num_row_groups):
        about = stored.metadata.row_group(group)
        if _may_contain(about, row, errors):
            matching = _matching_rows(stored, group, row, errors, where)
            if matching is None or len(matching):
                yield group, about.num_rows, matching


def _may_contain(group: pq.RowGroupMetaData, row: int | None, errors: bool) -> bool:
    """Whether a row group may hold the row, and errors, by its statistics."""
    for i in range(group.num_columns):
        column = group.column(i)
        if column.statistics is None or not column.statistics.has_min_max:
            continue
        least, most = column.statistics.min, column.statistics.max
        if column.path_in_schema == "row_index" and row is not None and not least <= row <= most:
            return False
        if column.path_in_schema == "status" and errors and least == most == "ok":
            return False
    return True


def _matching_rows(
    stored: StoredTable, group: int, row: int | None, errors: bool, where: Sequence[Condition]
) -> pa.Array | None:
    """Indexes of the matching rows in a row group, found from the columns that are compared; None for all rows."""
    if row is None and not errors and not where:
        return None
    roots = [root_of(stored.schema.names, condition.column) for condition in where]
    keys = stored.group(group, list(dict.fromkeys(["row_index", "status", *filter(None, roots)])))
    masks = [condition.mask(keys) for condition in where]
    if row is not None:
        masks.append(pc.equal(keys["row_index"], row))
    if errors:
        masks.append(pc.equal(keys["status"], "error"))
    return pc.indices_nonzero(reduce(pc.and_, masks))


_COLUMNS = [
    *("row_index", "error.code", "completion_tokens", "cached_tokens", "dropped_tokens"),
    *("finish_reason", "constraint_ok", "dedup_of", "text", "tool_calls"),
]


@dataclass(slots=True)
class Totals(AnswerCounts):
    """Totals of a results file. A row with several prompts or samples counts once, as failed if any of them failed."""

    rows: int = 0
    rows_error: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Error code -> number of output rows."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0
    """Tokens of samples that `best_of` discarded."""
    copied_tokens: int = 0
    """Tokens of rows that are copies of an equal greedy row; included in `completion_tokens`."""
    constraints: Counter[str] = field(default_factory=Counter)
    """`met`, `failed` -> number of answers whose finished text was checked against their constraint."""


def read_totals(path: Path, totals: Totals | None = None) -> Totals:
    """Compute the totals of a results file, whose rows must be in input order; with those of the files before it."""
    totals = Totals() if totals is None else totals
    last_row = last_error = -1
    with open_parquet(path) as file:
        for batch in (batch for table in file.groups(_COLUMNS) for batch in table.to_batches()):
            rows = batch["row_index"]
            failed = rows.filter(pc.is_valid(batch["error"]))  # a comparison with a Python value would import pandas
            totals.rows += _count_new(rows.unique().to_pylist(), last_row)
            totals.rows_error += _count_new(failed.unique().to_pylist(), last_error)
            last_row = rows[-1].as_py() if len(rows) else last_row
            last_error = failed[-1].as_py() if len(failed) else last_error
            codes = pc.struct_field(batch["error"], "code").drop_null()
            totals.errors.update({str(c["values"]): c["counts"] for c in codes.value_counts().to_pylist()})
            totals.completion_tokens += pc.sum(batch["completion_tokens"]).as_py() or 0
            totals.cached_tokens += pc.sum(batch["cached_tokens"]).as_py() or 0
            totals.dropped_tokens += pc.sum(batch["dropped_tokens"]).as_py() or 0
            copied = batch["completion_tokens"].filter(pc.is_valid(batch["dedup_of"]))
            totals.copied_tokens += pc.sum(copied).as_py() or 0
            answered = pc.is_valid(batch["finish_reason"])
            totals.answers += pc.sum(answered).as_py() or 0
            empty = pc.and_not(answered, pc.cast(pc.binary_length(batch["text"]), pa.bool_()))
            if "tool_calls" in batch.schema.names:  # not in outputs of older versions
                empty = pc.and_(empty, pc.is_null(batch["tool_calls"]))
            totals.empty_texts += pc.sum(empty).as_py() or 0
            texts = batch["text"].filter(answered)
            if totals.first_text is None and len(present := texts.drop_null()):
                totals.first_text = present[0].as_py()
            if totals.first_text is not None:
                totals.equal_texts += pc.sum(pc.equal(texts, totals.first_text)).as_py() or 0
            totals.finish_reasons.update(_counts(batch["finish_reason"]))
            checked = {("met" if ok == "true" else "failed"): n for ok, n in _counts(batch["constraint_ok"]).items()}
            totals.constraints.update(checked)
    return totals


def _counts(values: pa.Array) -> dict[str, int]:
    """Number of occurrences of each value that is not null."""
    counts = pc.cast(values, pa.string()).drop_null().value_counts().to_pylist()
    return {str(item["values"]): item["counts"] for item in counts}


def first_answer(path: Path) -> tuple[int, int, str] | None:
    """(row index, prompt index, text) of the first text of a results file that is not blank, among the first rows."""
    with open_parquet(path) as file:
        first = next(file.groups(["row_index", "prompt_index", "text"]), None)
    rows = [] if first is None else first.slice(0, 64).to_pylist()
    return next((tuple(row.values()) for row in rows if (row["text"] or "").strip()), None)


def _count_new(rows: list[int], last: int) -> int:
    """Number of distinct `rows` without the one that the previous batch ended with."""
    return len(rows) - (1 if rows and rows[0] == last else 0)
