"""Merge of the outputs of whole jobs with disjoint rows into one file: rows in the order given, renumbered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.data.durable_files import output_errors
from batchgen.data.files import exists, make_durably, remove_tree
from batchgen.data.out.finish import CommittedRows, write_output
from batchgen.data.results_file import open_parquet, read_footer
from batchgen.data.row_shapes import RowShapes
from batchgen.data.schema import STATES_CONTENTS
from batchgen.data.states import states_part
from batchgen.data.store.committed import first_of_prompt, read_keys
from batchgen.data.store.job_changes import INPUT_FILES, changes, describe_changes
from batchgen.data.store.lock import RunLock
from batchgen.data.store.reuse import Moves, copy_rows, prompts_of
from batchgen.data.store.timeline import joined
from batchgen.data.store.work_folder import OutputPaths, RunIdentity, WorkFolder, belongs_to, output_paths
from batchgen.errors import FingerprintError, InputError, UsageError

_MERGED = "merged outputs"
"""Name of the number of outputs in a merged one among the values of its job, so that no other job equals it."""
_CLOCK = ("clock", "clock_text")
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
    first = schema_of(files[0])
    for file in files[1:]:
        own = schema_of(file)
        for name in dict.fromkeys([*first.names, *own.names]):
            types = [str(schema.field(name).type) if name in schema.names else "missing" for schema in (first, own)]
            if types[0] != types[1]:
                raise UsageError(
                    f"Column {name!r} is {types[0]} in {files[0]} and {types[1]} in {file}. Give it one type in the "
                    "inputs and run one of the jobs again with --reuse, or run both with --carry all."
                )


def schema_of(file: Path) -> pa.Schema:
    """The columns of a results file."""
    with open_parquet(file) as table:
        return table.schema.remove_metadata()


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
    with scratch_work(paths, RunIdentity(fingerprint)) as work:
        rows = [np.unique(read_keys([file]).row_index) for file in files]
        starts = np.cumsum([0, *map(len, rows)])
        parts = [work.scratch / "parts" / f"part-{number:06d}.parquet" for number in range(len(files))]
        for file, footer, part, its_rows, start in zip(files, footers, parts, rows, starts, strict=False):
            _check_states(file, footer)
            _renumbered_copy(file, part, its_rows, int(start))
        keys = read_keys(parts)
        states = [path for path in map(states_part, parts) if exists(path)]
        numbered = [np.arange(len(its)) + start for its, start in zip(rows, starts, strict=False)]
        footer = merged_record(footers, numbered, len(keys)) | _of_jobs(footers) | {"fingerprint": fingerprint}
        footer.pop("merged_shards", None)
        for run in footer.get("timeline", ()):
            run["slowest"] = []  # rows have other numbers now
        write_output(paths, CommittedRows(parts, keys, states), footer, schema_of(files[0]), work)
        return len(keys)


@contextmanager
def scratch_work(paths: OutputPaths, identity: RunIdentity) -> Iterator[WorkFolder]:
    """The work folder of a merge, with an empty folder for files in work; it is removed at the end.

    Raises:
        OutputError: it cannot be made.
    """
    work = WorkFolder(paths, identity, RunLock(paths.work, paths.result))
    try:
        with output_errors(work.scratch):
            remove_tree(work.scratch)
            make_durably(work.scratch / "parts")
        yield work
    finally:
        work.remove()


def _renumbered_copy(file: Path, part: Path, rows: Rows, start: int) -> None:
    """Copy a results file, whose input rows are `rows`, to a part whose rows are numbered from `start`."""
    keys = read_keys([file])
    first = first_of_prompt(keys.row_index, keys.prompt_index)
    row, prompt = keys.row_index[first], keys.prompt_index[first]
    moved = prompts_of(np.searchsorted(rows, row) + start, prompt)
    schema = schema_of(file)
    fill = partial(_renumber_leaders, rows=rows, start=start)
    copy_rows(Moves(file, prompts_of(row, prompt), moved), part, lambda states: schema, fill)


def _renumber_leaders(table: pa.Table, *, rows: Rows, start: int) -> pa.Table:
    leaders = table["dedup_of"]
    present = leaders.is_valid().to_numpy()
    numbers = np.searchsorted(rows, leaders.fill_null(0).to_numpy()) + start
    at = table.schema.get_field_index("dedup_of")
    return table.set_column(at, table.schema.field(at), pa.array(numbers, pa.int64(), mask=~present))


def _check_states(file: Path, footer: Mapping[str, Any]) -> None:
    """Check that the hidden states of an output, if it has any, are its own."""
    if not footer.get("states"):
        return
    states = output_paths(file).states
    own = read_footer(states, STATES_CONTENTS)
    if own is None or not belongs_to(own, RunIdentity(footer["fingerprint"])) or own["rows"] != footer["states"]:
        raise InputError(f"{states} does not hold the hidden states of {file}. Put the right file there.")


def _jobs(footers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fingerprints of all jobs; an output that was merged before counts as those that it was merged from."""
    return [job for footer in footers for job in footer.get("merged_jobs") or [footer["fingerprint"]]]


def merged_record(footers: Sequence[Mapping[str, Any]], rows: Sequence[Rows], count: int) -> dict[str, Any]:
    """The run record of merged outputs: that of the first one, with the counts and compilers of all.

    Args:
        footers: the run records of the outputs.
        rows: the input rows of each, as the merged file numbers them.
        count: rows of the merged file.
    """
    counts = {name: [footer.get(name) for footer in footers] for name in ("input_rows", "rows_skipped")}
    samples = joined(run for footer in footers for run in footer.get("timeline") or ())
    backends = [footer["grammar_backends"] for footer in footers if "grammar_backends" in footer]
    return {
        **footers[0],
        **{name: None if None in values else sum(values) for name, values in counts.items()},
        **({"grammar_backends": sorted(set().union(*backends))} if backends else {}),
        **({"timeline": samples} if samples else {}),
        "shard": None,
        "rows": count,
        "created": max(footer["created"] for footer in footers),
        "row_shapes": RowShapes.merged([footer["row_shapes"] for footer in footers], rows),
    }


def _of_jobs(footers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Entries of the run record of merged jobs: the inputs of all, and the time that they saw, if it is one."""
    inputs = [file for footer in footers for file in footer["inputs"]]
    jobs = _jobs(footers)
    job = footers[0]["job"] | {
        INPUT_FILES: [[file["size"], file.get("sha256") or file["etag"]] for file in inputs],
        _MERGED: len(jobs),
    }
    clock: dict[str, Any] = {}
    for name in _CLOCK:
        if any(name in footer for footer in footers):
            times = [footer.get(name) for footer in footers]
            clock[name] = times[0] if all(each == times[0] for each in times) else None
    return {"job": job, "merged_jobs": jobs, "inputs": inputs, **clock}
