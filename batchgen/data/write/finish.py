"""Finishing a job: merge all parts into the output in input order, atomically, and remove the work folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.files import exists, make_durably, open_own, remove_file, rename, size_of, sync_folder
from batchgen.data.write.committed import Committed, read_keys
from batchgen.data.write.durable_files import (
    damaged_part,
    open_parquet,
    parquet_writer,
    part_errors,
    write_durably,
)
from batchgen.data.write.expected import ExpectedKeys
from batchgen.data.write.merge_sort import MEMORY_BYTES, ResultWriter, merge_sort
from batchgen.data.write.output_budget import OutputBudget
from batchgen.data.write.schema import results_schema, with_footer
from batchgen.data.write.states import states_part
from batchgen.data.write.states_result import write_states_result
from batchgen.data.write.work_folder import OutputPaths, WorkFolder
from batchgen.errors import BatchgenError, OutputError


def finish(
    work: WorkFolder,
    expected: ExpectedKeys,
    run: Mapping[str, Any],
    memory_bytes: int = MEMORY_BYTES,
    max_bytes: int | None = None,
    publish: Callable[[Path], None] | None = None,
) -> Committed:
    """Merge the committed rows into the output and remove the work folder, which releases the lock.

    The output is unchanged until both files, hidden states and results, are complete and durable under temporary
    names. Then the states are renamed, then the results. A process killed at any point leaves either the work folder
    or the output complete.

    Args:
        work: the work folder, without an open writer.
        expected: every prompt of the job.
        run: record for the footer; `fingerprint`, `shard` and `rows` are added.
        memory_bytes: approximate bytes of rows in memory.
        max_bytes: most bytes of results and hidden states together.
        publish: writes the output in another format from the complete results file, which is then removed.

    Returns:
        The keys of the rows written.

    Raises:
        BatchgenError: the committed rows are not exactly the expected ones; nothing was replaced.
        OutputError: the disk is full, a part is damaged, or the files exceed `max_bytes`; nothing was replaced.
    """
    parts = work.part_files()
    rows = CommittedRows(parts, _keys(parts), [path for path in map(states_part, parts) if exists(path)])
    expected.check_complete(rows.keys)
    shard = work.identity.shard
    footer = {
        **run,
        "fingerprint": work.identity.fingerprint,
        "shard": None if shard is None else [*shard],
        "rows": len(rows.keys),
    }
    # In the other format nothing keeps the results file, so it stays in the folder of temporary files.
    paths = work.paths if publish is None else replace(work.paths, result=work.scratch / "whole.parquet")
    write_output(paths, rows, footer, results_schema(work.identity.carried), work.scratch, memory_bytes, max_bytes)
    if publish is not None:
        publish(paths.result)
    work.remove()
    return rows.keys


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Files whose rows make one output."""

    parts: list[Path]
    """Results files."""
    keys: Committed
    """Keys of all their rows."""
    states: list[Path]
    """Hidden-state parts; without any, no states file is written."""


def write_output(
    paths: OutputPaths,
    rows: CommittedRows,
    footer: Mapping[str, Any],
    schema: pa.Schema,
    scratch: Path,
    memory_bytes: int = MEMORY_BYTES,
    max_bytes: int | None = None,
) -> None:
    """Write results and hidden states in key order, atomically.

    Args:
        paths: the output paths; an existing states file is removed if there are no states.
        rows: the rows to write.
        footer: run record for both files.
        schema: schema of the results.
        scratch: an existing folder for temporary files, on the same file system.
        memory_bytes: approximate bytes of rows in memory.
        max_bytes: most bytes of both files.

    Raises:
        OutputError: the disk is full, a part is damaged, or the files exceed `max_bytes`; nothing was replaced.
    """
    states, result = scratch / "states.parquet", scratch / "result.parquet"
    shared = {name: value for name, value in footer.items() if name != "row_shapes"}
    count = write_states_result(states, rows.states, shared) if rows.states else 0
    budget = OutputBudget(max_bytes)
    budget.check(states_bytes := size_of(states) if rows.states else 0)
    footed = with_footer({**footer, "states": count}, schema)

    def publish_states() -> None:
        budget.check(states_bytes + size_of(result))
        if rows.states:
            make_durably(paths.states.parent)
            if paths.states.parent != paths.result.parent:
                sync_folder(paths.states.parent.parent)  # a killed run may have made the folder
            rename(states, paths.states)
            sync_folder(paths.states.parent)
        else:
            remove_file(paths.states)

    def write(stream: BinaryIO) -> None:
        _write_results(stream, rows, footed, scratch, memory_bytes)

    write_durably(paths.result, write, temporary=result, before_rename=publish_states)


def _write_results(stream: BinaryIO, rows: CommittedRows, schema: pa.Schema, scratch: Path, memory_bytes: int) -> None:
    with parquet_writer(stream, schema) as parquet:
        writer = ResultWriter(parquet)
        try:
            merge_sort(rows.parts, rows.keys, writer, scratch, memory_bytes)
        except (pa.ArrowException, OSError) as error:
            # Errors of writing have an errno; errors of Arrow about damaged parts have none.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise _damaged_part(rows.parts, error) from error
        writer.flush()
    stream.flush()
    with open_parquet(Path(stream.name)) as file:
        written = file.metadata.num_rows
    if written != len(rows.keys):
        raise BatchgenError(
            f"{written} rows were written, but {len(rows.keys)} are committed, which is a bug. Nothing was replaced."
        )


def _keys(parts: list[Path]) -> Committed:
    try:
        return read_keys(parts)
    except (pa.ArrowException, OSError) as error:
        raise _damaged_part(parts, error) from error


def _damaged_part(parts: list[Path], error: BaseException) -> OutputError:
    """The error that names the damaged part, found by reading each part alone."""
    for part in parts:
        try:
            with part_errors(part), open_own(part) as stream:
                pq.read_table(stream, page_checksum_verification=True)
        except (pa.ArrowException, OSError):
            return damaged_part(part, error)
    return OutputError(f"the parts cannot be merged ({error}). Check the disk and run the same command again.")
