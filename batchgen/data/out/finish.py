"""Finishing a job: merge all parts into the output in input order, atomically, and remove the work folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.durable_files import write_durably
from batchgen.data.files import exists, make_durably, remove_file, rename, size_of, sync_folder
from batchgen.data.out.merge_sort import MEMORY_BYTES, ResultWriter, merge_sort
from batchgen.data.results_file import DamagedFile, open_parquet, parquet_writer
from batchgen.data.schema import KEY_COLUMNS, with_footer
from batchgen.data.states import states_part
from batchgen.data.states_result import write_states_result
from batchgen.data.store.committed import Committed, intact_parts
from batchgen.data.store.expected import ExpectedKeys
from batchgen.data.store.output_budget import OutputBudget
from batchgen.data.store.timeline import timeline_of
from batchgen.data.store.work_folder import OutputPaths, WorkFolder
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
        run: record for the footer; `fingerprint`, `shard`, `rows` and `timeline` are added.
        memory_bytes: approximate bytes of rows in memory.
        max_bytes: most bytes of results and hidden states together.
        publish: writes the output in another format from the complete results file, which is then removed.

    Returns:
        The keys of the rows written.

    Raises:
        BatchgenError: the committed rows are not exactly the expected ones; nothing was replaced.
        OutputError: the disk is full, a part is damaged and was set aside, the output cannot be read back as it was
            written, or the files exceed `max_bytes`; nothing was replaced.
    """
    parts = intact_parts(work, whole=False)
    keys = Committed.of_files(parts.values())
    try:
        expected.check_complete(keys)
    except BatchgenError:
        work.check_none_aside()
        raise
    rows = CommittedRows([*parts], keys, [path for path in map(states_part, parts) if exists(path)])
    shard = work.identity.shard
    footer = {
        **run,
        "fingerprint": work.identity.fingerprint,
        "shard": None if shard is None else [*shard],
        "rows": len(rows.keys),
    }
    if samples := timeline_of(parts):
        footer["timeline"] = samples
    # In the other format nothing keeps the results file, so it stays in the folder of temporary files.
    paths = work.paths if publish is None else replace(work.paths, result=work.scratch / "whole.parquet")
    try:
        write_output(paths, rows, footer, work.schema, work, memory_bytes, max_bytes)
    except DamagedFile as problem:
        work.set_part_aside(problem.path, problem)
        work.check_none_aside()
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
    work: WorkFolder,
    memory_bytes: int = MEMORY_BYTES,
    max_bytes: int | None = None,
) -> None:
    """Write results and hidden states in key order, atomically.

    Args:
        paths: the output paths; an existing states file is removed if there are no states.
        rows: the rows to write.
        footer: run record for both files.
        schema: schema of the results.
        work: the work folder, whose folder for temporary files exists.
        memory_bytes: approximate bytes of rows in memory.
        max_bytes: most bytes of both files.

    Raises:
        OutputError: the disk is full, what was written cannot be read back, or the files exceed `max_bytes`; nothing
            was replaced.
        DamagedFile: one of the files is damaged; nothing was replaced.
    """
    scratch = work.scratch
    states, result = scratch / "states.parquet", scratch / "result.parquet"
    shared = {name: value for name, value in footer.items() if name not in ("row_shapes", "timeline")}
    count = 0
    if rows.states:
        with _written_back(states):
            count = write_states_result(states, rows.states, shared)
    budget = OutputBudget(max_bytes)
    budget.check(states_bytes := size_of(states) if rows.states else 0)
    footed = with_footer({**footer, "states": count}, schema)
    nulls: Counter[str] = Counter()

    def publish_states() -> None:
        with _written_back(result):
            _read_back(result, rows.keys, nulls)
        budget.check(states_bytes + size_of(result))
        work.record_written(result)
        if rows.states:
            make_durably(paths.states.parent)
            if paths.states.parent != paths.result.parent:
                sync_folder(paths.states.parent.parent)  # a killed run may have made the folder
            rename(states, paths.states)
            sync_folder(paths.states.parent)
        else:
            remove_file(paths.states)

    def write(stream: BinaryIO) -> None:
        with parquet_writer(stream, footed) as parquet:
            writer = ResultWriter(parquet)
            nulls.update(merge_sort(rows.parts, rows.keys, writer, scratch, memory_bytes))
            writer.flush()

    write_durably(paths.result, write, temporary=result, before_rename=publish_states)


@contextmanager
def _written_back(path: Path) -> Iterator[None]:
    """Name what was just written as such if it is damaged: its source is intact."""
    try:
        yield
    except DamagedFile as problem:
        if problem.path != path:
            raise
        raise OutputError(
            f"{path} was read back, and is not what was written ({problem.reason}). Nothing was replaced. Check the "
            "disk and the memory, and run the same command again: committed rows are kept."
        ) from problem


def _read_back(path: Path, keys: Committed, expected: Counter[str]) -> None:
    """Raise `DamagedFile` unless a file holds what was committed: every byte, keys in order, nulls of each column."""
    nulls: Counter[str] = Counter()
    start = 0
    with open_parquet(path) as table:
        for group in table.groups():
            nulls.update({name: group[name].null_count for name in group.schema.names})
            end = start + len(group)
            for name in KEY_COLUMNS:
                if not np.array_equal(group[name].to_numpy(), getattr(keys, name)[start:end]):
                    raise DamagedFile(path, f"its {name} is not that of the committed rows")
            if not np.array_equal(pc.equal(group["status"], "error").to_numpy(), keys.is_error[start:end]):
                raise DamagedFile(path, "its status is not that of the committed rows")
            start = end
        table.check()
    if start != len(keys):
        raise DamagedFile(path, f"it has {start} rows, and {len(keys)} are committed")
    if nulls != expected:
        raise DamagedFile(path, "its columns do not have the nulls of the committed rows")
