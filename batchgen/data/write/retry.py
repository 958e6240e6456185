"""`--retry-errors` on a finished output: its good rows become committed work again, its failed rows are recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.files import open_named
from batchgen.data.write.committed import Committed, read_keys
from batchgen.data.write.durable_files import parquet_writer, read_footer, write_durably
from batchgen.data.write.lines import is_lines
from batchgen.data.write.parts import part_schema
from batchgen.data.write.states import states_part
from batchgen.data.write.states_result import part_from_result
from batchgen.data.write.work_folder import (
    OutputPaths,
    Policy,
    RunIdentity,
    WorkFolder,
    has_other_work,
    is_complete,
    open_work,
)
from batchgen.errors import FingerprintError, InputError


def open_for_retry(
    paths: OutputPaths,
    identity: RunIdentity,
    info: Mapping[str, Any],
    policy: Policy = "resume",
    clock: str | None = None,
) -> WorkFolder | None:
    """Open the work folder as `open_work` does, for a run that recomputes failed prompts, also of a finished output.

    The finished output is kept until the new one is complete.

    Returns:
        The folder, locked; None if the output is complete and has no errors.

    Raises:
        InputError: the finished output is damaged.
        OutputError, FingerprintError: as `open_work`.
    """
    if policy == "overwrite" or is_lines(paths.result) or not is_complete(paths, identity):
        return open_work(paths, identity, info, policy, clock)
    try:
        keys = read_keys([paths.result])
        if not keys.errors:
            return open_work(paths, identity, info, policy, clock)
        if has_other_work(paths, identity):
            raise FingerprintError(
                f"{paths.work} contains unfinished work of a different job. Finish it with its own command, drop it "
                "with --overwrite, or name another output with -o."
            )
        work = open_work(paths, identity, info, "retry", clock)
        assert work is not None
        if not work.part_files():
            _commit_good_rows(work, keys)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{paths.result} cannot be read ({error}). Compute it again with --overwrite.") from error
    return work


def _commit_good_rows(work: WorkFolder, keys: Committed) -> None:
    """Commit the good prompts of the finished output as one part, atomically."""
    good = keys.without_failed_prompts()
    part = work.parts / "part-000000.parquet"
    # Failed prompts have no hidden states, so all states belong to good prompts.
    states = part_from_result(work.paths.states, states_part(part)) if _has_states(work.paths) else 0

    def write(stream: BinaryIO) -> None:
        schema = part_schema(work, states)
        with parquet_writer(stream, schema) as writer, open_named(work.paths.result) as result:
            file = pq.ParquetFile(result, pre_buffer=False, page_checksum_verification=True)
            start = 0
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, use_threads=False).replace_schema_metadata(writer.schema.metadata)
                kept = table.filter(pa.array(good[start : start + len(table)]))
                start += len(table)
                if len(kept):
                    writer.write_table(kept)

    write_durably(part, write)


def _has_states(paths: OutputPaths) -> bool:
    return bool((read_footer(paths.result) or {}).get("states"))
