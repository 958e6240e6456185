"""Finished rows of earlier jobs in this one: where they are looked for, and how they become rows of this job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.data.carry import carried_columns
from batchgen.data.files import exists, resolved
from batchgen.data.view import open_results
from batchgen.data.write.committed import Committed, find_prompts
from batchgen.data.write.lines import is_lines
from batchgen.data.write.parts import PartWriter, part_schema
from batchgen.data.write.results_file import DamagedFile, read_footer
from batchgen.data.write.reuse import Moves, ReuseFile, copy_rows, find_moves, has_hashes, part_file
from batchgen.data.write.schema import SCHEMA
from batchgen.data.write.work_folder import WorkFolder, output_paths
from batchgen.data.write.work_state import read_state
from batchgen.engine.workload import JobWorkload
from batchgen.errors import UsageError
from batchgen.job.ingest import Ingested
from batchgen.job.request_hashes import RequestHashes
from batchgen.request.completion import CachedTokens


def files_of(out: Path) -> list[ReuseFile]:
    """The results that `--reuse OUT` names: a finished output, a folder of shards, or unfinished work.

    Raises:
        InputError: there are no results, or a file is not batchgen's.
        UsageError: the results cannot be reused.
    """
    if is_lines(out) and exists(out):
        raise UsageError(
            f"{out} holds JSON lines, which do not say what was asked for. Rows are reused from Parquet: write -o "
            "OUT.parquet, and `batchgen export` the lines."
        )
    found: list[ReuseFile] = []
    for file in open_results(out).files:
        if not has_hashes(file):
            raise UsageError(f"{file} was written by a version whose rows cannot be reused. Leave out --reuse.")
        if file.parent.name == "parts":
            found.append(part_file(file))
        else:
            found.append(_finished(file))
    return found


def _finished(file: Path) -> ReuseFile:
    """A finished results file, with its hidden states."""
    if not (read_footer(file) or {}).get("states"):
        return ReuseFile(file)
    states = output_paths(file).states
    folder = output_paths(file.absolute().parent).states / file.name  # of a shard
    return ReuseFile(file, states if exists(states) or not exists(folder) else folder)


def reusable_files(work: WorkFolder, named: Path | None) -> list[ReuseFile]:
    """The files whose rows a run may reuse: what it replaces, what it set aside, and what `--reuse` names.

    An output that `--overwrite` replaces is not among them.
    """
    state = read_state(work.paths.work) or {}
    found = []
    for part in work.earlier_parts():
        try:
            found.append(part_file(part))
        except DamagedFile as problem:
            work.set_part_aside(part, problem)
    result = work.paths.result
    replaced = state.get("overwrite") and state.get("emptied_by") != work.identity.key
    if replaced and not is_lines(result) and read_footer(result) is not None and has_hashes(result):
        found.append(_finished(result))
    if named is not None and resolved(named) not in {resolved(result), resolved(work.paths.work)}:
        found += files_of(named)
    return found


@dataclass(frozen=True, slots=True)
class Reuse:
    """The rows that a job takes over from earlier ones."""

    moves: Sequence[Moves]
    done: npt.NDArray[np.bool_]
    """[N] whether each request of the table is committed or taken over."""

    @property
    def rows(self) -> int:
        """Number of input rows of which a prompt is taken over."""
        rows = [moves.new.row_index for moves in self.moves]
        return len(np.unique(np.concatenate(rows))) if rows else 0

    def commit(self, rows: Ingested, workload: JobWorkload, work: WorkFolder, writer: PartWriter) -> None:
        """Commit the rows that are taken over, one part for each file that they come from.

        Raises:
            InputError: a file is damaged.
            OutputError: a part cannot be written.
        """
        fill = partial(_fill, rows=rows, workload=workload, carried=work.identity.carried)
        for moves in self.moves:
            part = writer.next_part()
            copy_rows(moves, part, lambda states: part_schema(work, states), fill)
            writer.count(part)


def find_reuse(hashes: RequestHashes, rows: Ingested, committed: Committed, files: Sequence[ReuseFile]) -> Reuse:
    """Find the prompts of a job, not committed yet, that earlier jobs have finished with the same request.

    Raises:
        InputError: a file is damaged.
    """
    table = rows.table
    done = committed.contains(table.row_index, table.prompt_index)
    if not files:
        return Reuse((), done)
    prompts = hashes.all()
    missing = np.flatnonzero(~committed.contains(prompts.row_index, prompts.prompt_index))
    moves = find_moves(files, prompts.take(missing))
    for each in moves:
        order = np.lexsort((each.new.prompt_index, each.new.row_index))
        new = each.new.take(order)
        done |= find_prompts((new.row_index, new.prompt_index), (table.row_index, table.prompt_index)) >= 0
    return Reuse(moves, done)


def _fill(table: pa.Table, *, rows: Ingested, workload: JobWorkload, carried: Sequence[pa.Field]) -> pa.Table:
    """Rows of another job with this job's ids, carried fields, prompt texts, `dedup_of` and `cached_tokens`."""
    index = table["row_index"].to_numpy()
    prompt = table["prompt_index"].to_numpy()
    sample = table["sample_index"].to_numpy()
    texts = [rows.texts[row] for row in index.tolist()]
    extras = [extra for _, extra, _ in texts]
    request, ends = _requests(workload, index, prompt)
    cached = [
        None if old is None else sum(workload.tree.cached_tokens(i, number) for i in range(first, end))
        for old, first, end, number in zip(
            table["cached_tokens"].to_pylist(), request.tolist(), ends.tolist(), sample.tolist(), strict=True
        )
    ]
    details = [
        None if old is None else asdict(CachedTokens.of(count, total) or CachedTokens())
        for old, count, total in zip(
            table["cached_tokens_details"].to_pylist(), cached, table["prompt_tokens"].to_pylist(), strict=True
        )
    ]
    leader = workload.leader[request]
    changed: dict[str, Any] = {
        "id": pa.array([name for name, _, _ in texts], pa.string()),
        "cached_tokens": pa.array(cached, pa.int32()),
        "cached_tokens_details": pa.array(details, SCHEMA.field("cached_tokens_details").type),
        "dedup_of": pa.array(workload.table.row_index[leader], mask=leader == request),
        "prompt": pa.array(
            [None if prompts is None else prompts[at] for (_, _, prompts), at in zip(texts, prompt, strict=True)],
            pa.string(),
        ),
        "extra": pa.nulls(len(table), pa.string()) if carried else pa.array(extras, pa.string()),
    }
    columns = [changed[name] if name in changed else table[name] for name in SCHEMA.names]
    fields = [*SCHEMA, *carried]
    return pa.table([*columns, *carried_columns(extras, carried)], schema=pa.schema(fields))


def _requests(
    workload: JobWorkload, row: npt.NDArray[np.int64], prompt: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[N] first request of each prompt in the job's table, and the end of its requests: one for each scored text."""
    table = workload.table
    starts = np.flatnonzero(np.diff(table.row_index, prepend=-1) | np.diff(table.prompt_index, prepend=-1))
    places = find_prompts((table.row_index[starts], table.prompt_index[starts]), (row, prompt))
    ends = np.append(starts[1:], len(table))
    return starts[places], ends[places]
