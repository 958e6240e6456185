"""Merge of the outputs of shards, or of whole jobs, into one file, with a check for ids that occur in several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from batchgen.data.durable_files import refuse_existing
from batchgen.data.files import exists, files_in, followed, is_file, is_folder, same_file
from batchgen.data.lines import is_lines
from batchgen.data.out.finish import CommittedRows, write_output
from batchgen.data.out.merge_jobs import (
    check_same_columns,
    check_same_options,
    merge_jobs,
    merged_record,
    schema_of,
    scratch_work,
)
from batchgen.data.out.view import Results, read_errors
from batchgen.data.results_file import open_parquet, read_footer, refuse_columns
from batchgen.data.schema import ASKED, STATES_CONTENTS
from batchgen.data.states import write_states_part
from batchgen.data.states_result import records_of_result
from batchgen.data.store.committed import Committed, read_keys
from batchgen.data.store.job_changes import changes, describe_changes
from batchgen.data.store.work_folder import OutputPaths, RunIdentity, belongs_to, output_paths
from batchgen.data.store.work_parts import part_files
from batchgen.errors import ErrorCode, FingerprintError, InputError, OutputError, UsageError

_LABELLED = ASKED["scores"].type


def refuse_duplicate_ids(files: Sequence[Path], *, whole_jobs: bool = False) -> None:
    """Refuse results files in which two input rows have the same id. Uses 16 bytes of memory per row.

    Failed rows of shards are ignored: within a shard, a row with a repeated id is an error row itself. Of whole jobs
    only those error rows are: another failed row with the id of a good one is the same row twice.

    Raises:
        UsageError: two rows have the same id.
        DamagedFile: a file is damaged.
        OSError: a file cannot be read.
    """
    columns_of_files = [_id_hashes(file, failed=whole_jobs) for file in files]
    hashes, rows = (np.concatenate(columns) for columns in zip(*columns_of_files, strict=True))
    ends = np.cumsum([len(file_hashes) for file_hashes, _ in columns_of_files])
    order = np.lexsort((rows, hashes))
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    # In input order. Different ids may have equal hashes, so the ids are read and compared.
    for at in same[np.argsort(rows[order[same + 1]])]:
        pair = order[at : at + 2]
        first, second = ((files[np.searchsorted(ends, i, "right")], int(rows[i])) for i in pair)
        if (name := _row_id(*first)) == _row_id(*second):
            count = len(np.unique(hashes[order][same]))
            among = f" (one of {count:,} repeated ids)" if count > 1 else ""
            remedy = "Make ids unique and run the job again, or merge the shards as they are"
            if whole_jobs:
                remedy = "Leave out one of the rows and run its job again with --reuse, or merge the files as they are"
            raise UsageError(
                f"id {name!r}{among} is used by row {first[1]} in {first[0]} and by row {second[1]} in {second[0]}. "
                f"{remedy} with --allow-duplicate-ids."
            )


def _id_hashes(file: Path, *, failed: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(hash of the id, `row_index`) of each input row with a result; with `failed`, also of failed ones."""
    hashes, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    last = -1
    with open_parquet(file) as stored:
        for batch in stored.groups(["id", "row_index", "status", "error.code"]):
            counts = pc.equal(batch["status"], "ok")
            if failed:
                code = pc.struct_field(batch["error"], "code")
                counts = pc.or_(counts, pc.fill_null(pc.not_equal(code, ErrorCode.DUPLICATE_ID), False))
            good = batch.filter(counts)
            index = good["row_index"].to_numpy()
            new = np.diff(index, prepend=last) != 0  # prompts and samples of a row are adjacent
            ids = good["id"].filter(new).to_pylist()
            hashes.append(np.fromiter(map(hash, ids), np.int64, len(ids)))
            rows.append(index[new])
            last = index[-1] if len(index) else last
    return np.concatenate(hashes), np.concatenate(rows)


def _row_id(file: Path, row: int) -> str:
    return str(next(Results([file], True, None).rows(row=row, columns=["id"]))["id"])


def merge(parts: Sequence[Path], out: Path, overwrite: bool = False, *, allow_duplicate_ids: bool = False) -> int:
    """Merge all shards of one job into `out`, in input order, or the outputs of whole jobs in the order given.

    Args:
        parts: finished shard outputs, or folders of them, in any order; or outputs of whole jobs with equal options.
        out: the file to write.
        overwrite: whether an existing `out` is replaced.
        allow_duplicate_ids: whether rows of different shards may have the same id, even if the job did not run with
            `--on-duplicate-id allow`.

    Returns:
        The number of output rows.

    Raises:
        UsageError: a shard is missing or named twice, or a file is not a shard; rows of different files have the same
            id; a column of whole jobs has several types; `out` is one of the files.
        FingerprintError: two shards are of different jobs, or two whole jobs have different options.
        InputError: a file cannot be read.
        OutputError: `out` exists or cannot be written.
    """
    out = followed(out)
    files = _shard_files(parts)
    if is_lines(out):
        raise UsageError(f"{out}: merge writes Parquet. Name OUT.parquet, and write JSON lines with batchgen export.")
    footers = [_finished_footer(file) for file in files]
    if len(files) > 1 and all(footer.get("shard") is None for footer in footers):
        _check_whole_jobs(files, footers, out, overwrite, allow_duplicate_ids)
        return merge_jobs(files, footers, out)
    for file, footer in zip(files, footers, strict=True):
        if footer.get("shard") is None:
            raise UsageError(
                f"{file} is not a shard but the output of a whole job. Leave it out, or merge several whole jobs."
            )
    keys = _checked_keys(files, footers, out, overwrite, allow_duplicate_ids)
    states = [_states_file(file, own) for file, own in zip(files, footers, strict=True) if own.get("states")]
    paths = output_paths(out)
    _refuse_unfinished(paths, overwrite)
    identity = RunIdentity(footers[0]["fingerprint"])
    with scratch_work(paths, identity) as work:
        state_parts = [work.scratch / f"shard-{number}.states" for number in range(len(states))]
        for file, part in zip(states, state_parts, strict=True):
            with read_errors():
                write_states_part(part, records_of_result(file))
        schema = max(map(schema_of, files), key=lambda schema: (len(schema), schema.field("scores").type == _LABELLED))
        numbers = [np.unique(read_keys([file]).row_index) for file in files]
        footer = merged_record(footers, numbers, len(keys)) | {"merged_shards": len(files)}
        write_output(paths, CommittedRows(files, keys, state_parts), footer, schema, work)
    return len(keys)


def _refuse_unfinished(paths: OutputPaths, overwrite: bool) -> None:
    """Refuse to write over hidden states, and while the work of a run to the same output exists."""
    refuse_existing(paths.states, overwrite)
    # A killed merge leaves a lock and scratch files only; the folder of a run has run.json or parts.
    if exists(paths.work / "run.json") or part_files(paths.work):
        raise OutputError(
            f"{paths.work} exists: a run to {paths.result} is not finished. Finish it, or name another with -o."
        )


def _refuse_replacing(what: str, files: Sequence[Path], out: Path, overwrite: bool) -> None:
    refuse_existing(out, overwrite)
    if exists(out) and any(same_file(out, file) for file in files):
        raise UsageError(f"{out} is one of the {what}, which the merged file would replace; name another file with -o.")


def _check_whole_jobs(
    files: list[Path], footers: Sequence[dict[str, Any]], out: Path, overwrite: bool, allow_duplicate_ids: bool
) -> None:
    """Check that the outputs of whole jobs fit together, and that the merged file replaces none of them."""
    check_same_options(files, footers)
    check_same_columns(files)
    for number, file in enumerate(files):
        if any(same_file(file, other) for other in files[:number]):
            raise UsageError(f"{file} is named twice. Leave one out.")
    _refuse_replacing("files", files, out, overwrite)
    _refuse_unfinished(output_paths(out), overwrite)
    if not allow_duplicate_ids and not any(map(_allows_duplicates, footers)):
        with read_errors():
            refuse_duplicate_ids(files, whole_jobs=True)


def _checked_keys(
    files: list[Path], footers: Sequence[dict[str, Any]], out: Path, overwrite: bool, allow_duplicate_ids: bool
) -> Committed:
    """Keys of all rows, once the files are found to be all shards of one job, and none of them is `out`."""
    _check_one_job(files, footers)
    _check_all_shards(files, footers)
    _refuse_replacing("shards", files, out, overwrite)
    with read_errors():
        keys = read_keys(files)
        if not allow_duplicate_ids and not _allows_duplicates(footers[0]):
            refuse_duplicate_ids(files)
    return keys


def _allows_duplicates(footer: dict[str, Any]) -> bool:
    """Whether the job, and so each of its shards, ran with `--on-duplicate-id allow`."""
    options = footer.get("configuration", {}).get("options", {})
    return bool(options.get("on_duplicate_id", {}).get("value") == "allow")


def _shard_files(parts: Sequence[Path]) -> list[Path]:
    files = [file for part in parts for file in (files_in(part, "part-*.parquet") if is_folder(part) else [part])]
    if not files:
        raise UsageError("No shards were found. Name their files, or the folder that contains them.")
    return files


def _finished_footer(file: Path) -> dict[str, Any]:
    if not is_file(file):
        raise InputError(f"{file} cannot be read (no such file). Check the name.")
    footer = read_footer(file)
    if footer is None and is_lines(file):
        raise InputError(f"{file} holds JSON lines, and merge reads Parquet: join lines with cat.")
    if footer is None:
        raise InputError(f"{file} is not a finished batchgen output. Finish its run, or leave it out.")
    refuse_columns(file, footer)
    return footer


def _states_file(shard: Path, footer: dict[str, Any]) -> Path:
    """Path of the hidden states of a shard, which are complete: `OUT.hidden.parquet/part-...` for `OUT/part-...`."""
    states = output_paths(shard.absolute().parent).states / shard.name
    own = read_footer(states, STATES_CONTENTS)
    if own is None:
        raise InputError(f"{states} with the hidden states of {shard} cannot be read. Put the file back.")
    if not belongs_to(own, RunIdentity(footer["fingerprint"], tuple(footer["shard"]))):
        raise FingerprintError(f"{states} does not contain the hidden states of {shard}. Put the right file there.")
    if own["rows"] != footer["states"]:
        raise InputError(
            f"{states} contains {own['rows']} hidden states, but {shard} was written with {footer['states']}. Put the "
            "right file there, or run the shard's command again with another output."
        )
    return states


def _check_one_job(files: Sequence[Path], footers: Sequence[dict[str, Any]]) -> None:
    first = footers[0]
    for file, footer in zip(files, footers, strict=True):
        if footer["fingerprint"] != first["fingerprint"] or footer["shard"][1] != first["shard"][1]:
            was, now = first.get("job") or {}, footer.get("job") or {}
            what = f" ({describe_changes(names, was, now)})" if (names := changes(was, now)) else ""
            raise FingerprintError(
                f"{file} and {files[0]} are shards of different jobs{what}. Merge shards of one job."
            )
        if footer.get("clock_text") != first.get("clock_text"):
            raise FingerprintError(
                f"{file} and {files[0]} saw different times, {footer.get('clock')} and {first.get('clock')}, and the "
                f"chat template writes them into prompts. Run {file.name} again with --overwrite, or all shards with "
                "the same --clock TIME."
            )


def _check_all_shards(files: Sequence[Path], footers: Sequence[dict[str, Any]]) -> None:
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
