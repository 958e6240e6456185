"""Finished rows of earlier jobs as rows of another one: which prompts match, and copies of them with new indexes.

A prompt of a results file matches a prompt of the new job with the same `request_hash`. Its output rows and hidden
states are copied to one part of the new job; what depends on the new input is filled in by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.files import open_own
from batchgen.data.write.committed import find_prompts, first_of_prompt
from batchgen.data.write.durable_files import write_durably
from batchgen.data.write.parts import STATES_KEY
from batchgen.data.write.results_file import open_parquet, open_part, parquet_writer
from batchgen.data.write.schema import KEY_COLUMNS
from batchgen.data.write.states import (
    StateRecord,
    check_states_part,
    read_index,
    read_record,
    states_part,
    write_states_part,
)
from batchgen.data.write.states_result import records_of_result

_HASH = "request_hash"

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReuseFile:
    """A results file whose rows may be used again."""

    path: Path
    states: Path | None = None
    """Its hidden states: `OUT.hidden.parquet`, or a part of a work folder; None if it has none."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts by row and prompt index, in that order, [P] each."""

    row_index: Int64s
    prompt_index: npt.NDArray[np.int32]
    hashes: Int64s
    """Request hashes."""

    def __len__(self) -> int:
        return len(self.hashes)

    def take(self, places: npt.NDArray[np.int64]) -> Prompts:
        """The prompts at `places`."""
        return Prompts(self.row_index[places], self.prompt_index[places], self.hashes[places])


@dataclass(frozen=True, slots=True)
class Moves:
    """Prompts of one file, in its order, and the prompts of the new job that they become, [M] each."""

    file: ReuseFile
    old: Prompts
    new: Prompts

    def places(self, row: Int64s, prompt: npt.NDArray[np.int32]) -> Int64s:
        """[N] place of each (row, prompt) of the file among the moved prompts; -1: not moved."""
        return find_prompts((self.old.row_index, self.old.prompt_index), (row, prompt))


def part_file(part: Path) -> ReuseFile:
    """A committed part as a file whose rows may be reused.

    Raises:
        DamagedFile: it or its hidden states are damaged.
    """
    with open_part(part) as table:
        table.check()
        count = int(table.about.get(STATES_KEY, 0))
    if not count:
        return ReuseFile(part)
    check_states_part(states_part(part), count, whole=True)
    return ReuseFile(part, states_part(part))


def find_moves(files: Sequence[ReuseFile], wanted: Prompts) -> list[Moves]:
    """The prompts of each file that are among the `wanted` ones; each prompt is moved once.

    Raises:
        DamagedFile: a file is damaged.
    """
    found = []
    for file in files:
        old = _good_prompts(file.path)
        old_places, new_places = _pairs(old.hashes, wanted.hashes)
        if len(old_places):
            order = np.argsort(old_places)
            found.append(Moves(file, old.take(old_places[order]), wanted.take(new_places[order])))
            wanted = wanted.take(np.setdiff1d(np.arange(len(wanted)), new_places))
    return found


def _good_prompts(path: Path) -> Prompts:
    """The prompts of which no sample failed and that have a hash, in order."""
    with open_parquet(path) as file:
        if _HASH not in file.schema.names:
            return _no_prompts()
        table = file.read([*KEY_COLUMNS, "status", _HASH])
    row, prompt, sample = (table[name].to_numpy() for name in KEY_COLUMNS)
    order = np.lexsort((sample, prompt, row))
    bad = pc.or_(pc.not_equal(table["status"], "ok"), table[_HASH].is_null()).to_numpy()[order]
    hashes = table[_HASH].fill_null(0).to_numpy()[order]
    row, prompt = row[order], prompt[order]
    starts = np.flatnonzero(first_of_prompt(row, prompt))
    if not len(starts):
        return _no_prompts()
    starts = starts[~np.logical_or.reduceat(bad, starts)]
    return Prompts(row[starts], prompt[starts], hashes[starts])


def _no_prompts() -> Prompts:
    return Prompts(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64))


def _pairs(old: Int64s, new: Int64s) -> tuple[Int64s, Int64s]:
    """Places in `old` and in `new` of equal values, each place once: the k-th of a value goes to the k-th."""
    codes = np.unique(np.concatenate([old, new]), return_inverse=True)[1].reshape(-1)
    size = len(codes) + 1
    keys_old, keys_new = (each * size + _occurrence(each) for each in (codes[: len(old)], codes[len(old) :]))
    _, old_places, new_places = np.intersect1d(keys_old, keys_new, assume_unique=True, return_indices=True)
    return old_places.astype(np.int64), new_places.astype(np.int64)


def _occurrence(codes: Int64s) -> Int64s:
    """[N] number of earlier places with the same value."""
    order = np.argsort(codes, kind="stable")
    places = np.arange(len(codes))
    first = np.ones(len(codes), np.bool_)
    first[1:] = codes[order][1:] != codes[order][:-1]
    found = np.empty(len(codes), np.int64)
    found[order] = places - np.maximum.accumulate(np.where(first, places, 0))
    return found


Fill = Callable[[pa.Table], pa.Table]
"""Sets the columns of copied rows that depend on the new input; `row_index` and `prompt_index` are the new ones."""


def copy_rows(moves: Moves, part: Path, schema: Callable[[int], pa.Schema], fill: Fill) -> None:
    """Write the output rows of moved prompts, and their hidden states, as one part.

    Args:
        moves: the prompts.
        part: path of the part; its states are written to `states_part(part)` first.
        schema: number of hidden-state records -> schema of the part.
        fill: completes each batch of rows; may drop and change columns but not rows.

    Raises:
        DamagedFile: the file is damaged.
        OutputError: the part cannot be written.
    """
    count = 0
    if moves.file.states is not None:
        count = _copy_states(moves, moves.file.states, part, fill)

    def write(stream: BinaryIO) -> None:
        with parquet_writer(stream, schema(count)) as writer:
            for table in _moved_tables(moves):
                writer.write_table(fill(table).cast(writer.schema))

    write_durably(part, write)


def _moved_tables(moves: Moves) -> Iterator[pa.Table]:
    """The moved rows of the file with their new indexes, a row group at a time."""
    with open_parquet(moves.file.path) as file:
        for group in file.groups():
            table = group.replace_schema_metadata(None)
            places = moves.places(table["row_index"].to_numpy(), table["prompt_index"].to_numpy())
            if (places >= 0).any():
                yield _renumbered(table.filter(pa.array(places >= 0)), moves.new, places[places >= 0])


def _renumbered(table: pa.Table, new: Prompts, places: Int64s) -> pa.Table:
    for name, values in (("row_index", new.row_index), ("prompt_index", new.prompt_index)):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.array(values[places]))
    return table


def _copy_states(moves: Moves, states: Path, part: Path, fill: Fill) -> int:
    """Write the hidden states of moved prompts; returns the number of records."""
    count = 0

    def records() -> Iterator[StateRecord]:
        nonlocal count
        ids = _ids_of(moves, fill)
        prompts = zip(moves.old.row_index.tolist(), moves.old.prompt_index.tolist(), strict=True)
        places = {prompt: place for place, prompt in enumerate(prompts)}
        for record in _records(states):
            row, prompt, sample = record.key
            if (place := places.get((row, prompt))) is not None:
                count += 1
                key = (int(moves.new.row_index[place]), int(moves.new.prompt_index[place]), sample)
                yield StateRecord(key, ids[key[0]], record.block)

    write_states_part(states_part(part), records())
    return count


def _ids_of(moves: Moves, fill: Fill) -> dict[int, str]:
    """New row index -> id of the moved rows. Only for jobs with hidden states, whose rows are few for their bytes."""
    found: dict[int, str] = {}
    for table in _moved_tables(moves):
        filled = fill(table)
        found |= dict(zip(filled["row_index"].to_pylist(), filled["id"].to_pylist(), strict=True))
    return found


def _records(states: Path) -> Iterator[StateRecord]:
    if states.suffix == ".parquet":
        yield from records_of_result(states)
        return
    index = read_index(states)
    with open_own(states) as stream:
        for entry in index:
            yield read_record(stream, entry)


def has_hashes(path: Path) -> bool:
    """Whether a results file has the column of request hashes."""
    with open_parquet(path) as file:
        return _HASH in file.schema.names
