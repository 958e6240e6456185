"""Finished rows as rows of another job: which prompts match, and copies of them with new indexes.

A prompt of a results file matches a prompt of the new job with the same `request_hash`. Its output rows and hidden
states are copied to one part of the new job; what depends on the new input is filled in by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.data.durable_files import write_durably
from batchgen.data.files import exists, open_own
from batchgen.data.results_file import open_parquet, parquet_writer, read_footer
from batchgen.data.states import StateRecord, read_index, read_record, states_part, write_states_part
from batchgen.data.states_result import records_of_result
from batchgen.data.store.committed import Committed, find_prompts, keys_of
from batchgen.data.store.work_folder import output_paths

_HASH = "request_hash"

Int64s = npt.NDArray[np.int64]
PROMPTS: Final = np.dtype([("row_index", "<i8"), ("prompt_index", "<i4"), ("hash", "<i8")])
Prompts = npt.NDArray[np.void]
"""[P] of `PROMPTS`: prompts in key order with their request hashes, which are 0 in files without them."""


def prompts_of(row: Int64s, prompt: npt.NDArray[np.int32], hashes: Int64s | int = 0) -> Prompts:
    """Prompts from their columns."""
    prompts = np.zeros(len(row), PROMPTS)
    prompts["row_index"], prompts["prompt_index"], prompts["hash"] = row, prompt, hashes
    return prompts


@dataclass(frozen=True, slots=True)
class Moves:
    """Prompts of one results file, in its order, and the prompts of the new job that they become, [M] each."""

    file: Path
    old: Prompts
    new: Prompts


def has_hashes(path: Path) -> bool:
    """Whether a results file has the column of request hashes."""
    with open_parquet(path) as file:
        return _HASH in file.schema.names


def good_prompts(path: Path) -> Prompts:
    """The prompts of a results file of which no sample failed.

    Raises:
        DamagedFile: the file is damaged.
    """
    with open_parquet(path) as file:
        keys = Committed.of_files([keys_of(file)])
        hashes = np.zeros(len(keys), np.int64)
        if _HASH in file.schema.names:
            hashes = file.read([_HASH])[_HASH].fill_null(0).to_numpy()
    starts = keys.starts
    if len(starts):
        starts = starts[~np.logical_or.reduceat(keys.is_error, starts)]
    return prompts_of(keys.row_index[starts], keys.prompt_index[starts], hashes[keys.order[starts]])


def find_moves(files: Sequence[Path], wanted: Prompts) -> list[Moves]:
    """The good prompts of each file that are among the `wanted` ones by their hash; each prompt is moved once.

    Raises:
        DamagedFile: a file is damaged.
    """
    moves = []
    for file in files:
        old = good_prompts(file)
        old_places, new_places = _pairs(old["hash"], wanted["hash"])
        if len(old_places):
            order = np.argsort(old_places)
            moves.append(Moves(file, old[old_places[order]], wanted[new_places[order]]))
            wanted = np.delete(wanted, new_places)
    return moves


def _pairs(old: Int64s, new: Int64s) -> tuple[Int64s, Int64s]:
    """Places in `old` and in `new` of equal values, each place once: the k-th of a value goes to the k-th."""
    by_old, by_new = np.argsort(old, kind="stable"), np.argsort(new, kind="stable")
    olds, news = np.append(old[by_old], 0), new[by_new]
    number = np.arange(len(news)) - np.searchsorted(news, news)  # k
    places = np.minimum(np.searchsorted(olds[:-1], news) + number, len(old))
    same = (places < len(old)) & (olds[places] == news)
    return by_old[places[same]], by_new[same]


def copy_rows(
    moves: Moves,
    part: Path,
    schema: Callable[[int], pa.Schema],
    fill: Callable[[pa.Table], pa.Table] = lambda table: table,
    id_of: Callable[[int], str] | None = None,
) -> None:
    """Write the output rows of moved prompts, and their hidden states, as one part.

    Args:
        moves: the prompts.
        part: path of the part; its states are written to `states_part(part)` first.
        schema: number of hidden-state records -> schema of the part.
        fill: sets the columns of rows that depend on the new input; `row_index` and `prompt_index` are the new ones.
        id_of: new row index -> id of the row; None if ids stay.

    Raises:
        DamagedFile: the file is damaged.
        OutputError: the part cannot be written.
    """
    count = 0
    if (states := _states_of(moves.file)) is not None:
        write_states_part(states_part(part), _moved_states(moves, states, id_of))
        count = len(read_index(states_part(part)))

    def write(stream: BinaryIO) -> None:
        with parquet_writer(stream, schema(count)) as writer:
            for table in _moved_tables(moves):
                writer.write_table(fill(table).cast(writer.schema))

    write_durably(part, write)


def _states_of(file: Path) -> Path | None:
    """The hidden states of a part or of a finished output; None if it has none."""
    footer = read_footer(file)
    if footer is None:
        states = states_part(file)
        return states if exists(states) else None
    if not footer.get("states"):
        return None
    states = output_paths(file).states
    folder = output_paths(file.absolute().parent).states / file.name  # of a shard
    return states if exists(states) or not exists(folder) else folder


def _moved_tables(moves: Moves) -> Iterator[pa.Table]:
    """The moved rows of the file with their new indexes, a row group at a time."""
    known = moves.old["row_index"], moves.old["prompt_index"]
    with open_parquet(moves.file) as file:
        for group in file.groups():
            table = group.replace_schema_metadata(None)
            places = find_prompts(known, (table["row_index"].to_numpy(), table["prompt_index"].to_numpy()))
            if (places >= 0).any():
                table = table.filter(pa.array(places >= 0))
                for name in ("row_index", "prompt_index"):
                    at, values = table.schema.get_field_index(name), moves.new[name][places[places >= 0]]
                    table = table.set_column(at, table.schema.field(at), pa.array(values))
                yield table


def _moved_states(moves: Moves, states: Path, id_of: Callable[[int], str] | None) -> Iterator[StateRecord]:
    new = dict(zip(*(each[["row_index", "prompt_index"]].tolist() for each in (moves.old, moves.new)), strict=True))
    for record in _records(states):
        if (moved := new.get(record.key[:2])) is not None:
            row_id = record.id if id_of is None else id_of(moved[0])
            yield StateRecord((*moved, record.key[2]), row_id, record.block)


def _records(states: Path) -> Iterator[StateRecord]:
    if states.suffix == ".parquet":
        yield from records_of_result(states)
        return
    with open_own(states) as stream:
        for entry in read_index(states):
            yield read_record(stream, entry)
