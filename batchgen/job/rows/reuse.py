"""Finished rows of earlier jobs in this one: where they are looked for, and how they become rows of this job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.data.carry import carried_columns
from batchgen.data.files import exists, resolved
from batchgen.data.lines import is_lines
from batchgen.data.out.merge_sort import column_as
from batchgen.data.out.view import open_results
from batchgen.data.results_file import DamagedFile, keeps_rows, read_footer
from batchgen.data.schema import KEY_COLUMNS, results_schema
from batchgen.data.store.committed import Committed, checked_keys, find_prompts, first_of_prompt
from batchgen.data.store.parts import PartWriter, part_schema
from batchgen.data.store.reuse import Moves, copy_rows, find_moves, has_hashes
from batchgen.data.store.work_folder import WorkFolder
from batchgen.data.store.work_state import read_state
from batchgen.engine.workload import JobWorkload
from batchgen.errors import UsageError
from batchgen.job.rows.ingest import Ingested
from batchgen.job.rows.request_hashes import RequestHashes
from batchgen.request.completion import CachedTokens


def files_of(out: Path) -> list[Path]:
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
    files = [*open_results(out).files]
    for file in files:
        if not has_hashes(file):
            raise UsageError(f"{file} was written by a version whose rows cannot be reused. Leave out --reuse.")
        if read_footer(file) is None:  # a part
            checked_keys(file, None, whole=True)
    return files


def intact_files(
    parts: Iterable[Path], on_damage: Callable[[Path, DamagedFile], None] = lambda part, problem: None
) -> list[Path]:
    """The parts that are not damaged; `on_damage` is called for the others."""
    intact = []
    for part in parts:
        try:
            checked_keys(part, None, whole=True)
            intact.append(part)
        except DamagedFile as problem:
            on_damage(part, problem)
    return intact


def reusable_files(work: WorkFolder, named: Path | None) -> list[Path]:
    """The files whose rows a run may reuse: what it set aside, what it replaces, and what `--reuse` names.

    An output that `--overwrite` replaces is not among them.
    """
    state, result = read_state(work.paths.work) or {}, work.paths.result
    files = intact_files(work.earlier_parts(), work.set_part_aside)
    replaced = state.get("overwrite") and state.get("emptied_by") != work.identity.key
    if replaced and keeps_rows(result) and read_footer(result) is not None:
        files.append(result)
    if named is not None and resolved(named) not in {resolved(result), resolved(work.paths.work)}:
        files += files_of(named)
    return files


def rows_of(moves: Sequence[Moves]) -> int:
    """Number of input rows of which a prompt is moved."""
    return len(np.unique(np.concatenate([each.new["row_index"] for each in moves]))) if moves else 0


@dataclass(frozen=True, slots=True)
class Reuse:
    """The rows that a job takes over from earlier ones."""

    moves: Sequence[Moves]
    done: npt.NDArray[np.bool_]
    """[N] whether each request of the table is committed or taken over."""

    @property
    def rows(self) -> int:
        """Number of input rows of which a prompt is taken over."""
        return rows_of(self.moves)

    def commit(self, rows: Ingested, workload: JobWorkload, work: WorkFolder, writer: PartWriter) -> None:
        """Commit the rows that are taken over, one part for each file that they come from.

        Raises:
            InputError: a file is damaged.
            OutputError: a part cannot be written.
        """
        fill = partial(_fill, rows=rows, workload=workload, work=work)
        for moves in self.moves:
            part = writer.next_part()
            copy_rows(moves, part, lambda states: part_schema(work, states), fill, lambda row: rows.texts[row][0])
            writer.count(part)


def find_reuse(hashes: RequestHashes, rows: Ingested, committed: Committed, files: Sequence[Path]) -> Reuse:
    """Find the prompts of a job, not committed yet, that earlier jobs have finished with the same request.

    Raises:
        InputError: a file is damaged.
    """
    table = rows.table
    done = committed.contains(table.row_index, table.prompt_index)
    if not files:
        return Reuse((), done)
    prompts = hashes.all()
    moves = find_moves(files, prompts[~committed.contains(prompts["row_index"], prompts["prompt_index"])])
    for each in moves:
        new = each.new[np.lexsort((each.new["prompt_index"], each.new["row_index"]))]
        done |= find_prompts((new["row_index"], new["prompt_index"]), (table.row_index, table.prompt_index)) >= 0
    return Reuse(moves, done)


def _fill(table: pa.Table, *, rows: Ingested, workload: JobWorkload, work: WorkFolder) -> pa.Table:
    """Rows of another job with this job's ids, carried fields, prompt texts, `dedup_of` and `cached_tokens`."""
    carried, fields = work.identity.carried, results_schema((), work.asked)
    index, prompt, sample = (table[name].to_numpy() for name in KEY_COLUMNS)
    request, ends = _requests(workload, index, prompt)
    texts = [rows.texts[row] for row in index.tolist()]
    extras = [extra for _, extra, _ in texts]
    before = [table[name].to_pylist() for name in ("cached_tokens", "cached_tokens_details", "prompt_tokens")]
    cached: list[int | None] = []
    details: list[dict[str, int] | None] = []
    for old, old_details, total, first, end, number in zip(
        *before, request.tolist(), ends.tolist(), sample.tolist(), strict=True
    ):
        each = (workload.tree.cached_tokens(i, number) for i in range(first, end))
        cached.append(None if old is None else sum(each))
        details.append(None if old_details is None else asdict(CachedTokens.of(cached[-1], total) or CachedTokens()))
    leader = workload.leader[request]
    changed: dict[str, Any] = {
        "id": [name for name, _, _ in texts],
        "cached_tokens": cached,
        "cached_tokens_details": details,
        "dedup_of": pa.array(workload.table.row_index[leader], mask=leader == request),
        "prompt": [None if prompts is None else prompts[at] for (_, _, prompts), at in zip(texts, prompt, strict=True)],
        "extra": pa.nulls(len(table)) if carried else extras,
    }
    columns = [
        pa.array(changed[field.name], field.type) if field.name in changed else column_as(table, field)
        for field in fields
    ]
    return pa.table([*columns, *carried_columns(extras, carried)], schema=work.schema)


def _requests(
    workload: JobWorkload, row: npt.NDArray[np.int64], prompt: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[N] first request of each prompt in the job's table, and the end of its requests: one for each scored text."""
    known = workload.table.row_index, workload.table.prompt_index
    first = find_prompts(known, (row, prompt))
    starts = np.flatnonzero(first_of_prompt(*known))
    return first, np.append(starts, len(known[0]))[np.searchsorted(starts, first, "right")]
