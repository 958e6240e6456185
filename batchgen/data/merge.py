"""Join the outputs of shards into one file."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.committed import read_keys
from batchgen.data.files import output_errors, read_footer, refuse_existing
from batchgen.data.finish import write_output
from batchgen.data.lock import RunLock
from batchgen.data.row_shapes import RowShapes
from batchgen.data.same_ids import refuse_same_ids
from batchgen.data.schema import STATES_CONTENTS
from batchgen.data.states_result import part_from_result
from batchgen.data.work import RunIdentity, WorkFolder, is_of, output_paths, part_files
from batchgen.errors import FingerprintError, InputError, OutputError, UsageError

__all__ = ["merge"]


def merge(parts: Sequence[Path], out: Path, overwrite: bool = False, *, allow_duplicate_ids: bool = False) -> int:
    """Write the rows of all shards of one job to `out`, in input order, and return their number.

    Args:
        parts: finished shard outputs, or folders of them, in any order.
        out: the file to write.
        overwrite: whether an existing `out` is replaced.
        allow_duplicate_ids: whether rows of different shards may have one id, as they may where the job ran with
            `--on-duplicate-id allow`.

    Raises:
        UsageError: a shard is missing or named twice, or a file is no shard; rows of different shards have one id;
            `out` is a shard.
        FingerprintError: two shards are of different jobs.
        InputError: a file cannot be read.
        OutputError: `out` exists or cannot be written.
    """
    files = _files(parts)
    footers = [_footer(file) for file in files]
    _check_one_job(files, footers)
    _check_complete(files, footers)
    refuse_existing(out, overwrite)
    if out.exists() and any(out.samefile(file) for file in files):
        raise UsageError(f"{out} is one of the shards, which the merged file would replace; name another file with -o.")
    try:
        keys = read_keys(files)
        if not allow_duplicate_ids and not _allows_duplicates(footers[0]):
            refuse_same_ids(files)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"a shard cannot be read ({error}). Compute it again.") from error
    footer = (
        footers[0]
        | _sums(footers)
        | {
            "shard": None,
            "rows": len(keys),
            "merged_shards": len(files),
            "created": max(footer["created"] for footer in footers),
            "row_shapes": _row_shapes(files, footers),
        }
    )
    states = [_states_of(file, its) for file, its in zip(files, footers, strict=True) if its.get("states")]
    paths = output_paths(out)
    refuse_existing(paths.states, overwrite)
    # A merge that was killed leaves a lock and scratch files; a run's folder says whose it is.
    if (paths.work / "run.json").exists() or part_files(paths.work):
        raise OutputError(f"{paths.work} exists: a run to {out} is not finished. Finish it, or name another with -o.")
    identity = RunIdentity(footers[0]["fingerprint"])
    work = WorkFolder(paths, identity, RunLock(paths.work, out), {"accepted": [identity.key]})
    try:
        with output_errors(work.scratch):
            shutil.rmtree(work.scratch, ignore_errors=True)
            work.scratch.mkdir()
        parts = [work.scratch / f"shard-{number}.states" for number in range(len(states))]
        for file, part in zip(states, parts, strict=True):
            _take_states(file, part)
        with files[0].open("rb") as stream:  # a name in UTF-8 is all that Arrow would take
            schema = pq.read_schema(stream).remove_metadata()
        write_output(paths, files, parts, keys, footer, schema, work.scratch)
    finally:
        work.remove()
    return len(keys)


def _allows_duplicates(footer: dict[str, Any]) -> bool:
    """Whether the job ran with `--on-duplicate-id allow`; all of its shards did then."""
    options = footer.get("configuration", {}).get("options", {})
    return bool(options.get("on_duplicate_id", {}).get("value") == "allow")


def _sums(footers: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """What each shard counted of its own rows of the input, for the whole job; None where one did not say."""
    names = ("input_rows", "rows_skipped")
    counts: dict[str, list[Any]] = {name: [footer.get(name) for footer in footers] for name in names}
    return {name: None if None in found else sum(found) for name, found in counts.items()}


def _row_shapes(files: Sequence[Path], footers: Sequence[dict[str, Any]]) -> str:
    rows = [np.unique(read_keys([file]).row_index) for file in files]
    return RowShapes.merged([footer["row_shapes"] for footer in footers], rows)


def _files(parts: Sequence[Path]) -> list[Path]:
    files = [file for part in parts for file in (sorted(part.glob("part-*.parquet")) if part.is_dir() else [part])]
    if not files:
        raise UsageError("No shards were found. Name their files, or the folder they stand in.")
    return files


def _footer(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(f"{file} cannot be read (no such file). Check the name.")
    footer = read_footer(file)
    if footer is None:
        raise InputError(f"{file} is not a finished batchgen output. Finish its run, or leave it out.")
    if footer.get("shard") is None:
        raise UsageError(f"{file} is not a shard but the output of a whole job. Leave it out.")
    return footer


def _states_of(shard: Path, footer: dict[str, Any]) -> Path:
    """Where the hidden states of a shard stand: `OUT.hidden.parquet/part-...` for `OUT/part-...`.

    Raises:
        InputError: there are none, or not all.
        FingerprintError: those that stand there are of another job, or of another shard.
    """
    states = output_paths(shard.absolute().parent).states / shard.name
    its = read_footer(states, STATES_CONTENTS)
    if its is None:
        raise InputError(f"{states} with the hidden states of {shard} cannot be read. Put it back.")
    if not is_of(its, RunIdentity(footer["fingerprint"], tuple(footer["shard"]))):
        raise FingerprintError(f"{states} does not hold the hidden states of {shard} but another's. Put its own there.")
    if its["rows"] != footer["states"]:
        raise InputError(
            f"{states} holds {its['rows']} hidden states, and {shard} was written with {footer['states']}. Put its own "
            "there, or compute both again with --overwrite."
        )
    return states


def _take_states(file: Path, part: Path) -> None:
    try:
        part_from_result(file, part)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} cannot be read ({error}). Compute its shard again.") from error


def _check_one_job(files: Sequence[Path], footers: Sequence[dict[str, Any]]) -> None:
    first = footers[0]
    for file, footer in zip(files, footers, strict=True):
        if footer["fingerprint"] != first["fingerprint"] or footer["shard"][1] != first["shard"][1]:
            raise FingerprintError(f"{file} and {files[0]} are shards of different jobs. Merge shards of one.")


def _check_complete(files: Sequence[Path], footers: Sequence[dict[str, Any]]) -> None:
    count = footers[0]["shard"][1]
    seen: dict[int, Path] = {}
    for file, footer in zip(files, footers, strict=True):
        index = footer["shard"][0]
        if index in seen:
            raise UsageError(f"{file} and {seen[index]} are both shard {index}. Leave one out.")
        seen[index] = file
    missing = [index for index in range(count) if index not in seen]
    if missing:
        raise UsageError(
            f"{len(missing)} of {count} shards are missing, the first is {missing[0]}. Run them, then merge."
        )
