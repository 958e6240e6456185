"""The end of a job: all parts into one file in input order, in the output's place, and the work folder gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.budget import OutputBudget
from batchgen.data.committed import Committed, read_keys
from batchgen.data.expected import Expected
from batchgen.data.files import open_parquet, parquet_writer, part_errors, sync_folder, write_durably
from batchgen.data.gather import MEMORY_BYTES, ResultWriter, gather
from batchgen.data.schema import results_schema, with_footer
from batchgen.data.states import states_part
from batchgen.data.states_result import write_states_result
from batchgen.data.work import OutputPaths, WorkFolder
from batchgen.errors import BatchgenError, OutputError

__all__ = ["finish"]


def finish(
    work: WorkFolder,
    expected: Expected,
    run: Mapping[str, Any],
    memory_bytes: int = MEMORY_BYTES,
    max_bytes: int | None = None,
) -> Committed:
    """Gather the committed rows into the output file and remove the work folder, which lets go of the lock.

    The output paths are untouched until both files, hidden states and results, are whole and durable under temporary
    names; then the states take their place, then the results. A process killed at any point leaves either the work
    folder complete or the output complete.

    Args:
        work: the folder, with no writer open on it.
        expected: every prompt of the job.
        run: for the footer; `fingerprint`, `shard` and `rows` are added.
        memory_bytes: about how much of the rows may be in memory.
        max_bytes: most bytes of results and hidden states together.

    Returns:
        The keys of the rows written.

    Raises:
        BatchgenError: the committed rows are not exactly those expected; nothing was replaced.
        OutputError: the disk is full, a part is damaged, or the files exceed `max_bytes`; nothing was replaced.
    """
    parts = work.part_files()
    keys = _keys(parts)
    expected.check(keys)
    shard = work.identity.shard
    footer = {
        **run,
        "fingerprint": work.identity.fingerprint,
        "shard": None if shard is None else [*shard],
        "rows": len(keys),
    }
    states = [path for path in map(states_part, parts) if path.exists()]
    schema = results_schema(work.identity.carried)
    write_output(work.paths, parts, states, keys, footer, schema, work.scratch, memory_bytes, max_bytes)
    work.remove()
    return keys


def write_output(
    paths: OutputPaths,
    parts: list[Path],
    states: list[Path],
    keys: Committed,
    footer: Mapping[str, Any],
    schema: pa.Schema,
    scratch: Path,
    memory_bytes: int = MEMORY_BYTES,
    max_bytes: int | None = None,
) -> None:
    """Write both files in key order, atomically, by way of the existing folder `scratch`.

    Args:
        paths: where they go; a file of states that stands there is removed if there are none now.
        parts: results, of which `keys` are the keys.
        states: parts of states; none, no file.
        keys: of all rows.
        footer: for both files.
        schema: of the results.
        scratch: on the same file system.
        memory_bytes: about how much of the rows may be in memory.
        max_bytes: most bytes of both.

    Raises:
        OutputError: the disk is full, a part is damaged, or the files exceed `max_bytes`; nothing was replaced.
    """
    temporary = scratch / "states.parquet"
    shared = {name: value for name, value in footer.items() if name != "row_shapes"}
    count = write_states_result(temporary, states, shared) if states else 0
    budget = OutputBudget(max_bytes)
    budget.hold(states_bytes := temporary.stat().st_size if states else 0)

    def publish_states() -> None:
        budget.hold(states_bytes + (scratch / "result.parquet").stat().st_size)
        if states:
            paths.states.parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(paths.states)
            sync_folder(paths.states.parent)
        else:
            paths.states.unlink(missing_ok=True)

    full = with_footer({**footer, "states": count}, schema)
    write_result(paths.result, parts, keys, full, scratch, memory_bytes, publish_states)


def write_result(
    result: Path,
    parts: list[Path],
    keys: Committed,
    schema: pa.Schema,
    scratch: Path,
    memory_bytes: int = MEMORY_BYTES,
    before: Callable[[], None] | None = None,
) -> None:
    """Write the rows of `parts` to `result` in key order, atomically, by way of the existing folder `scratch`.

    `schema` is theirs, with the footer.

    `before` is called when the whole file is durable, before it takes its place.

    Raises:
        OutputError: the disk is full, or a part is damaged.
    """

    def write(stream: BinaryIO) -> None:
        with parquet_writer(stream, schema) as parquet:
            writer = ResultWriter(parquet)
            try:
                gather(parts, keys, writer, scratch, memory_bytes)
            except (pa.ArrowException, OSError) as error:
                # What the operating system says of writing has an errno; what Arrow says of reading has none.
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                raise _damaged(parts, error) from error
            writer.flush()
        stream.flush()
        with open_parquet(Path(stream.name)) as file:
            written = file.metadata.num_rows
        if written != len(keys):
            raise BatchgenError(f"{written} rows were written for {len(keys)} committed ones. Nothing was replaced.")

    write_durably(result, write, temporary=scratch / "result.parquet", before=before)


def _keys(parts: list[Path]) -> Committed:
    try:
        return read_keys(parts)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(parts, error) from error


def _damaged(parts: list[Path], error: BaseException) -> OutputError:
    """Name the part that cannot be read, which a reader of all of them does not; only a damaged one is to go."""
    for part in parts:
        try:
            with part_errors(part), part.open("rb") as stream:
                pq.read_table(stream, page_checksum_verification=True)
        except (pa.ArrowException, OSError):
            return OutputError(
                f"{part} is damaged ({error}). Remove it and run the same command again: its rows are computed anew."
            )
    return OutputError(f"the parts cannot be gathered ({error}). Check the disk and run the same command again.")
