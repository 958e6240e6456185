"""Merge of the outputs of whole jobs with disjoint rows into one file: rows in the order given, renumbered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.files import exists, make_durably, open_named, remove_tree
from batchgen.data.merged_records import common_clock, grammar_backends, summed_counts
from batchgen.data.row_shapes import RowShapes
from batchgen.data.write.committed import first_of_prompt, read_keys
from batchgen.data.write.durable_files import output_errors, read_footer
from batchgen.data.write.finish import CommittedRows, write_output
from batchgen.data.write.job_changes import INPUT_FILES, changes, describe_changes
from batchgen.data.write.lock import RunLock
from batchgen.data.write.reuse import Moves, Prompts, ReuseFile, copy_rows
from batchgen.data.write.schema import STATES_CONTENTS
from batchgen.data.write.states import states_part
from batchgen.data.write.work_folder import RunIdentity, WorkFolder, belongs_to, output_paths
from batchgen.errors import FingerprintError, InputError, UsageError

_MERGED = "merged outputs"
"""Name of the number of outputs in a merged one among the values of its job, so that no other job equals it."""
_MAY_DIFFER = frozenset({INPUT_FILES, _MERGED, "--limit", "--offset", "--sample", "--on-duplicate-id", "--on-bad-row"})
"""Values of a job that say which rows it has, not what becomes of them."""

Rows = npt.NDArray[np.int64]


def is_merged(footer: Mapping[str, Any]) -> bool:
    """Whether a run record is of an output that `merge_jobs` wrote: its rows are not those of one input."""
    return bool(footer.get("merged_jobs"))


def check_same_options(files: Sequence[Path], footers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse outputs whose jobs would compute a row differently.

    Raises:
        FingerprintError: two jobs differ; the message says in what.
        InputError: an older version wrote one of them.
    """
    for file, footer in zip(files, footers, strict=True):
        if not footer.get("job"):
            raise InputError(f"{file} was written by a version that does not record its options. Leave it out.")
    first = footers[0]["job"]
    for file, footer in zip(files[1:], footers[1:], strict=True):
        differing = [name for name in changes(first, footer["job"]) if name not in _MAY_DIFFER]
        if differing:
            raise FingerprintError(
                f"{files[0]} and {file} are of jobs with different options: "
                f"{describe_changes(differing, first, footer['job'])}. Merge outputs of equal options."
            )


def check_same_columns(files: Sequence[Path]) -> None:
    """Refuse outputs with a column of other types: a carried column has the type that it has in its job's input.

    Raises:
        UsageError: two files differ in a column.
        InputError: a file cannot be read.
    """
    first = _schema(files[0])
    for file in files[1:]:
        own = _schema(file)
        for name in dict.fromkeys([*first.names, *own.names]):
            types = [str(schema.field(name).type) if name in schema.names else "missing" for schema in (first, own)]
            if types[0] != types[1]:
                raise UsageError(
                    f"Column {name!r} is {types[0]} in {files[0]} and {types[1]} in {file}. Give it one type in the "
                    "inputs and run one of the jobs again with --reuse, or run both with --carry all."
                )


def _schema(file: Path) -> pa.Schema:
    try:
        with open_named(file) as stream:  # Arrow accepts file names in UTF-8 only
            return pq.read_schema(stream).remove_metadata()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} cannot be read ({error}). Compute it again.") from error


def merge_jobs(files: Sequence[Path], footers: Sequence[dict[str, Any]], out: Path) -> int:
    """Write the rows of finished outputs to `out`, one file after the other. Returns the number of output rows.

    Rows are numbered from 0 on, so that those of a file follow those of the file before it; `dedup_of` follows.

    Args:
        files: outputs of whole jobs, already found to fit.
        footers: their run records.
        out: the file to write.

    Raises:
        InputError: a file or its hidden states cannot be read.
        OutputError: `out` cannot be written.
    """
    paths = output_paths(out)
    fingerprint = hashlib.sha256("".join(_jobs(footers)).encode()).hexdigest()
    work = WorkFolder(paths, RunIdentity(fingerprint), RunLock(paths.work, paths.result))
    try:
        with output_errors(work.scratch):
            remove_tree(work.scratch)
            make_durably(work.scratch / "parts")
        rows = [np.unique(read_keys([file]).row_index) for file in files]
        starts = np.cumsum([0, *map(len, rows)])
        parts = [work.scratch / "parts" / f"part-{number:06d}.parquet" for number in range(len(files))]
        for file, footer, part, its_rows, start in zip(files, footers, parts, rows, starts, strict=False):
            _renumbered_copy(ReuseFile(file, _states_of(file, footer)), part, its_rows, int(start))
        keys = read_keys(parts)
        states = [path for path in map(states_part, parts) if exists(path)]
        numbered = [np.arange(len(its)) + start for its, start in zip(rows, starts, strict=False)]
        footer = _footer(footers, numbered, len(keys)) | {"fingerprint": fingerprint}
        write_output(paths, CommittedRows(parts, keys, states), footer, _schema(files[0]), work.scratch)
        return len(keys)
    finally:
        work.remove()


def _renumbered_copy(file: ReuseFile, part: Path, rows: Rows, start: int) -> None:
    """Copy a results file, whose input rows are `rows`, to a part whose rows are numbered from `start`."""
    keys = read_keys([file.path])
    first = first_of_prompt(keys.row_index, keys.prompt_index)
    row, prompt = keys.row_index[first], keys.prompt_index[first]
    unused = np.zeros(len(row), np.int64)
    moved = Prompts(np.searchsorted(rows, row) + start, prompt, unused)
    schema = _schema(file.path)
    fill = partial(_renumber_leaders, rows=rows, start=start)
    copy_rows(Moves(file, Prompts(row, prompt, unused), moved), part, lambda states: schema, fill)


def _renumber_leaders(table: pa.Table, *, rows: Rows, start: int) -> pa.Table:
    leaders = table["dedup_of"]
    present = leaders.is_valid().to_numpy()
    numbers = np.searchsorted(rows, leaders.fill_null(0).to_numpy()) + start
    at = table.schema.get_field_index("dedup_of")
    return table.set_column(at, table.schema.field(at), pa.array(numbers, pa.int64(), mask=~present))


def _states_of(file: Path, footer: Mapping[str, Any]) -> Path | None:
    """The hidden states of an output; None if it has none.

    Raises:
        InputError: they are missing, or not those of the output.
    """
    if not footer.get("states"):
        return None
    states = output_paths(file).states
    own = read_footer(states, STATES_CONTENTS)
    if own is None or not belongs_to(own, RunIdentity(footer["fingerprint"])) or own["rows"] != footer["states"]:
        raise InputError(f"{states} does not hold the hidden states of {file}. Put the right file there.")
    return states


def _jobs(footers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fingerprints of all jobs; an output that was merged before counts as those that it was merged from."""
    return [job for footer in footers for job in footer.get("merged_jobs") or [footer["fingerprint"]]]


def _footer(footers: Sequence[dict[str, Any]], rows: Sequence[Rows], count: int) -> dict[str, Any]:
    """The run record of the merged file: that of the first job, with the inputs and counts of all."""
    inputs = [file for footer in footers for file in footer["inputs"]]
    jobs = _jobs(footers)
    job = footers[0]["job"] | {INPUT_FILES: [[file["size"], file["sha256"]] for file in inputs], _MERGED: len(jobs)}
    first = {name: value for name, value in footers[0].items() if name != "merged_shards"}
    return (
        first
        | summed_counts(footers)
        | grammar_backends(footers)
        | common_clock(footers)
        | {
            "job": job,
            "merged_jobs": jobs,
            "inputs": inputs,
            "shard": None,
            "rows": count,
            "created": max(footer["created"] for footer in footers),
            "row_shapes": RowShapes.merged([footer["row_shapes"] for footer in footers], rows),
        }
    )
