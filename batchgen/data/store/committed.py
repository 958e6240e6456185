"""Keys of the committed rows of a work folder, as flat arrays; what is interrupted or damaged is put away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.durable_files import output_errors, write_durably
from batchgen.data.files import files_in, is_set_aside, remove_file
from batchgen.data.results_file import DamagedFile, StoredTable, open_parquet, open_part, parquet_writer
from batchgen.data.schema import FINGERPRINT_KEY, KEY_COLUMNS, SCHEMA_VERSION, VERSION_KEY
from batchgen.data.states import check_states_part, states_part
from batchgen.data.store.parts import STATES_KEY
from batchgen.data.store.work_folder import WorkFolder
from batchgen.errors import BatchgenError

_Keys = tuple[npt.NDArray[Any], ...]
"""(row_index, prompt_index, sample_index, is_error) of a file's rows, as stored."""
_Prompts = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]
"""(row_index, prompt_index) of prompts."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Distinct keys of output rows [N], in key order; 25 bytes per row."""

    row_index: npt.NDArray[np.int64]
    prompt_index: npt.NDArray[np.int32]
    sample_index: npt.NDArray[np.int32]
    is_error: npt.NDArray[np.bool_]
    order: npt.NDArray[np.int64]
    """[N] int64: position of each row in the concatenation of the files as read."""

    def __len__(self) -> int:
        return len(self.row_index)

    def __contains__(self, key: tuple[int, int]) -> bool:
        """Whether (row_index, prompt_index) is committed, with all its samples. O(log N)."""
        row, prompt = key
        first, end = np.searchsorted(self.row_index, (row, row + 1))
        return bool((self.prompt_index[first:end] == prompt).any())

    @classmethod
    def read(cls, work: WorkFolder, retry_errors: bool = False) -> Committed:
        """Read the committed keys, which a run skips, and clean up. Called once, under the lock, before writing starts.

        What interrupted commits left is removed. A damaged part, or one with damaged hidden states, is set aside, and
        its rows are computed again. A part that cannot be read for another reason (permissions, disk, memory) is kept:
        that may pass.

        Args:
            work: the work folder.
            retry_errors: remove every prompt of which a sample failed, so that it is computed again.

        Raises:
            OutputError: the folder cannot be changed, or a part that may be intact cannot be read.
        """
        _clean(work)
        keys = intact_parts(work, whole=True)
        work.forget_aside()  # this run computes their rows
        if retry_errors:
            keys = {part: good for part in keys if (good := _drop_errors(part, keys[part])) is not None}
        return cls.of_files(keys.values())

    @classmethod
    def of_files(cls, files: Iterable[_Keys]) -> Committed:
        """The keys of several files, in their order.

        Raises:
            BatchgenError: two rows have the same key.
        """
        empty = (np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.bool_))
        columns = zip(empty, *files, strict=True)
        row, prompt, sample, is_error = (np.concatenate(column) for column in columns)
        order = np.lexsort((sample, prompt, row))
        row = row[order]  # one after the other, so that one more column is in memory and not four
        prompt = prompt[order]
        sample = sample[order]
        is_error = is_error[order]
        first = first_of_prompt(row, prompt)
        duplicates = np.flatnonzero(~first[1:] & (sample[1:] == sample[:-1]))
        if len(duplicates):
            at = duplicates[0]
            raise BatchgenError(
                f"row {row[at]}, prompt {prompt[at]}, sample {sample[at]} is in these files twice. Nothing was "
                "replaced."
            )
        return cls(row, prompt, sample, is_error, order.astype(np.int64, copy=False))

    def contains(self, rows: npt.NDArray[np.int64], prompts: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """[N] bool: whether each (rows[i], prompts[i]) is committed."""
        return find_prompts((self.row_index, self.prompt_index), (rows, prompts)) >= 0

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[prompts] position of the first row of each prompt."""
        return np.flatnonzero(first_of_prompt(self.row_index, self.prompt_index))

    @property
    def rows(self) -> int:
        """Number of distinct input rows."""
        return len(np.unique(self.row_index))

    @property
    def errors(self) -> int:
        """Number of output rows with status `error`."""
        return int(self.is_error.sum())


def read_keys(paths: Sequence[Path]) -> Committed:
    """Read the keys of results files.

    Raises:
        BatchgenError: two rows have the same key.
        DamagedFile: a file is damaged.
        OSError: a file cannot be read.
    """
    return Committed.of_files(map(_file_keys, paths))


def first_of_prompt(row: npt.NDArray[np.int64], prompt: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """[N] which of the (row, prompt) pairs differ from the pair before them."""
    first = np.ones(len(row), np.bool_)
    first[1:] = (row[1:] != row[:-1]) | (prompt[1:] != prompt[:-1])
    return first


def find_prompts(known: _Prompts, wanted: _Prompts) -> npt.NDArray[np.int64]:
    """[len(wanted)] first position of each wanted (row_index, prompt_index) in `known`, which is sorted; -1: absent."""
    if not len(known[0]) or not len(wanted[0]):
        return np.full(len(wanted[0]), -1, np.int64)
    stride = 1 + max(int(known[1].max()), int(wanted[1].max()))
    assert (1 + max(int(known[0][-1]), int(wanted[0].max()))) * stride < 1 << 63
    keys, sought = (rows.astype(np.int64) * stride + prompts for rows, prompts in (known, wanted))
    places = np.minimum(np.searchsorted(keys, sought), len(keys) - 1)
    return np.where(keys[places] == sought, places, -1).astype(np.int64)


def _file_keys(path: Path) -> _Keys:
    with open_parquet(path) as table:
        return keys_of(table)


def keys_of(table: StoredTable) -> _Keys:
    """The keys of an open results file."""
    rows = table.read([*KEY_COLUMNS, "status"])
    return (*(rows[name].to_numpy() for name in KEY_COLUMNS), pc.equal(rows["status"], "error").to_numpy())


def intact_parts(work: WorkFolder, *, whole: bool) -> dict[Path, _Keys]:
    """The committed parts with the keys of their rows; what is damaged is set aside.

    Args:
        work: the work folder.
        whole: check every byte of the parts and of their hidden states; otherwise what the keys are read from.

    Raises:
        OutputError: a part that may be intact cannot be read, or a damaged one cannot be moved.
    """
    keys: dict[Path, _Keys] = {}
    for part in work.part_files():
        try:
            keys[part] = checked_keys(part, work.identity.key, whole)
        except DamagedFile as problem:
            work.set_part_aside(part, problem)
    for part in doubled_parts(keys):
        work.set_part_aside(part, DamagedFile(part, "another part holds a row of it as well"))
        del keys[part]
    return keys


def checked_keys(part: Path, job: str | None, whole: bool) -> _Keys:
    """The keys of a part of a job, or of any job if None.

    Raises:
        DamagedFile: the part or its hidden states are damaged, or it is of another job.
        OutputError: it cannot be read now.
    """
    with open_part(part) as table:
        if job is not None:
            if not table.has_checksums or table.about.get(VERSION_KEY) != SCHEMA_VERSION.encode():
                raise DamagedFile(part, "an earlier version of batchgen wrote it")
            if table.about.get(FINGERPRINT_KEY) != job.encode():
                raise DamagedFile(part, "it is of another job")
        if whole:
            table.check()
        keys = keys_of(table)
        states = int(table.about.get(STATES_KEY, 0))
    if states:
        check_states_part(states_part(part), states, whole=whole)
    return keys


def doubled_parts(keys: Mapping[Path, _Keys]) -> list[Path]:
    """The parts that hold a prompt that an earlier part holds, as after a part was copied."""
    parts = [*keys]
    row, prompt = (np.concatenate([np.zeros(0, np.int64), *(each[i] for each in keys.values())]) for i in range(2))
    file = np.repeat(np.arange(len(parts)), [len(each[0]) for each in keys.values()])
    order = np.lexsort((file, prompt, row))
    same = ~first_of_prompt(row[order], prompt[order])
    return [parts[number] for number in np.unique(file[order][1:][same[1:] & (np.diff(file[order]) > 0)]).tolist()]


def _clean(work: WorkFolder) -> None:
    """Remove what interrupted commits left: temporary files, and hidden states without their part."""
    with output_errors(work.parts):
        kept = set(map(states_part, work.part_files()))
        states = (file for file in files_in(work.states) if file not in kept and not is_set_aside(file))
        for entry in [*files_in(work.parts, "*.tmp"), *states]:
            remove_file(entry)


def _drop_errors(part: Path, keys: _Keys) -> _Keys | None:
    """Remove prompts with failed samples from a part, atomically; returns the other keys, None if there are none.

    After a crash some errors are still committed, and the same command continues.
    """
    failed = Committed.of_files([tuple(column[keys[3]] for column in keys)])
    if not len(failed):
        return keys
    kept = ~failed.contains(keys[0], keys[1])
    if not kept.any():
        with output_errors(part):
            remove_file(part)
        return None
    with open_part(part) as stored:
        table = stored.read().filter(pa.array(kept))

    def write(stream: BinaryIO) -> None:
        with parquet_writer(stream, table.schema) as writer:
            writer.write_table(table)

    write_durably(part, write)
    return tuple(column[kept] for column in keys)
