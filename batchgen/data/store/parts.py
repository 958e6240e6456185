"""Writer of committed parts, on a separate thread, so that encoding does not block the engine.

A group is all samples of one (row_index, prompt_index). It is committed as a whole, so a key found in any part is
done. Hidden states of a part's rows are committed just before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, Self

import pyarrow as pa
import pyarrow.types as pat

from batchgen.data.carry import carried_columns
from batchgen.data.durable_files import write_durably
from batchgen.data.files import exists, size_of
from batchgen.data.results_file import parquet_writer
from batchgen.data.schema import (
    FINGERPRINT_KEY,
    SCHEMA,
    SCHEMA_VERSION,
    VERSION_KEY,
    OutputRow,
    completions_to_table,
)
from batchgen.data.states import records_of, states_part, write_states_part
from batchgen.data.store.output_budget import OutputBudget
from batchgen.data.store.work_folder import WorkFolder
from batchgen.data.store.work_state import state_copy
from batchgen.errors import ErrorInfo, apart, row_error
from batchgen.request.completion import Completion

STATES_KEY = b"batchgen.states"
"""Footer key: number of hidden-state records of the part; absent if there are none."""

_PART_BYTES = 64 << 20
"""Bytes at which a part is committed, however few its rows. `add` waits while this much is buffered, so that at most
one such part is being written and one buffered, however slow the disk is."""

_LISTS = attrgetter("embedding", *(field.name for field in SCHEMA if pat.is_list(field.type)))
"""Getter of a completion's list columns."""


@dataclass(slots=True)
class WriterStats:
    """Counters of a `PartWriter`: how often and how long `add` waited for the disk."""

    writer_stalls: int = 0
    """Number of times that `add` waited because the buffer was full."""
    writer_stall_seconds: float = 0.0
    """Total seconds of these waits."""
    writer_peak_bytes: int = 0
    """Peak bytes of finished rows in memory, buffered or being written."""


class PartWriter:
    """Buffer of finished groups that commits them as parts: at `commit_every` rows, at 64 MiB, or `commit_seconds`
    after the first group was added, whichever is first.

    An error of the writing thread, such as a total above `max_bytes`, is raised by the next `add`, `flush` or `close`.
    Committed parts are kept.
    """

    def __init__(
        self, work: WorkFolder, commit_every: int = 2000, commit_seconds: float = 30.0, max_bytes: int | None = None
    ) -> None:
        assert commit_every > 0
        assert commit_seconds > 0
        self._folder = work.parts
        self._work = work
        self._budget = OutputBudget.for_work(work, max_bytes)
        self._commit_every = commit_every
        self._commit_seconds = commit_seconds
        self.before_part: Callable[[], None] | None = None
        """Called before each part is written, to make durable what has to be there before it."""
        self.after_part: Callable[[Sequence[OutputRow]], None] | None = None
        """Called with the rows of each part when it is committed, on the writer's thread."""
        self.copy: Callable[[Path], None] = lambda part: None
        """Called with each part that is committed."""
        numbers = (int(path.stem.removeprefix("part-")) for path in work.part_files())
        self._number = 1 + max(numbers, default=-1)
        self._changed = threading.Condition()
        self._buffer: list[OutputRow] = []
        self._buffered_bytes = 0
        self._writing_bytes = 0
        self._buffered_since = 0.0
        self._flushing = False
        self._closing = False
        self._writing = False
        self._error: BaseException | None = None
        self.stats = WriterStats()
        self._thread = threading.Thread(target=self._run, name="batchgen-parts", daemon=True)
        self._thread.start()

    def add(self, group: Sequence[OutputRow]) -> None:
        """Add all samples of one (row_index, prompt_index) to the buffer.

        Raises:
            OutputError: an earlier part could not be written.
        """
        assert group
        assert len({row.completion.key[:2] for row in group}) == 1, "a group is the samples of one prompt"
        group_bytes = sum(map(_row_bytes, group))
        with self._changed:
            self._wait_for_room()
            self._raise_error()
            if not self._buffer:
                self._buffered_since = time.monotonic()
            self._buffer.extend(group)
            self._buffered_bytes += group_bytes
            self.stats.writer_peak_bytes = max(self.stats.writer_peak_bytes, self._buffered_bytes + self._writing_bytes)
            # Wake the thread to start its timer, or because a part is full.
            if len(self._buffer) == len(group) or self._due():
                self._changed.notify_all()

    def next_part(self) -> Path:
        """The path of a part that the caller commits itself."""
        with self._changed:
            self._number += 1
            return self._folder / f"part-{self._number - 1:06d}.parquet"

    def count(self, part: Path) -> None:
        """Count the bytes of a part that the caller has committed.

        Raises:
            OutputError: they exceed `max_bytes`.
        """
        states = states_part(part)
        size = size_of(part) + (size_of(states) if exists(states) else 0)
        self._budget.check(size)
        self._budget.add(size)
        self.copy(part)

    def flush(self) -> None:
        """Commit everything added so far; it is durable when this returns.

        Raises:
            OutputError: a part could not be written.
        """
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or not (self._buffer or self._writing))
            self._flushing = False
            self._raise_error()

    def close(self) -> None:
        """Commit everything and stop the thread.

        Raises:
            OutputError: a part could not be written.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._raise_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            self.close()
        except BaseException:
            # An exception that is already propagating is the one to report.
            if error is None:
                raise

    def _wait_for_room(self) -> None:
        if self._buffered_bytes < _PART_BYTES or self._error is not None:
            return
        self.stats.writer_stalls += 1
        began = time.monotonic()
        self._changed.wait_for(lambda: self._buffered_bytes < _PART_BYTES or self._error is not None)
        self.stats.writer_stall_seconds += time.monotonic() - began

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _due(self) -> bool:
        if not self._buffer:
            return False
        full = len(self._buffer) >= self._commit_every or self._buffered_bytes >= _PART_BYTES
        return (
            full or self._flushing or self._closing or time.monotonic() >= self._buffered_since + self._commit_seconds
        )

    def _run(self) -> None:
        try:
            while rows := self._wait_for_rows():
                self._commit(rows)
                with self._changed:
                    rows.clear()  # frees the memory before the next part fills up
                    self._writing_bytes = 0
                    self._writing = False
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._writing = False
                self._changed.notify_all()

    def _wait_for_rows(self) -> list[OutputRow]:
        """Wait until rows are due and return them; empty if the writer is closing and nothing is left."""
        with self._changed:
            while not self._due():
                if self._closing:
                    return []
                wait = self._buffered_since + self._commit_seconds - time.monotonic() if self._buffer else None
                self._changed.wait(wait)
            rows, self._buffer = self._buffer, []
            self._buffered_bytes, self._writing_bytes = 0, self._buffered_bytes
            self._writing = True
            self._changed.notify_all()
            return rows

    def _commit(self, rows: list[OutputRow]) -> None:
        if self.before_part is not None:
            self.before_part()
        path = self.next_part()
        rows, table = _writable(rows, self._work)
        count = sum(len(row.completion.states or ()) for row in rows)
        states_bytes = 0
        if count:
            records = (record for row in rows for record in records_of(row))
            states_bytes = write_states_part(states_part(path), records, self._budget.check)

        def write(stream: BinaryIO) -> None:
            with parquet_writer(stream, part_schema(self._work, count)) as writer:
                writer.write_table(table)
            self._budget.check(states_bytes + stream.tell())

        write_durably(path, write)
        self._budget.add(states_bytes + size_of(path))
        self.copy(path)
        if self.after_part is not None:
            self.after_part(rows)


def part_schema(work: WorkFolder, states: int = 0) -> pa.Schema:
    """The schema of a part, with footer keys: the job's fingerprint, the work's state, the number of state records."""
    keys = {VERSION_KEY: SCHEMA_VERSION.encode(), FINGERPRINT_KEY: work.identity.key.encode(), **state_copy(work.state)}
    keys |= {} if work.timeline is None else work.timeline.footer()
    return work.schema.with_metadata(keys | ({STATES_KEY: str(states).encode()} if states else {}))


def _writable(rows: list[OutputRow], work: WorkFolder) -> tuple[list[OutputRow], pa.Table]:
    """Whole groups and their table; a group that cannot be converted is replaced by its row's error."""
    try:
        return rows, _table(rows, work)
    except Exception as error:
        row_error(error, "writing the row")  # raises what is not a row's
    groups = [list(group) for _, group in groupby(rows, lambda row: row.completion.key[:2])]
    tables = apart(groups, lambda several: [_table(group, work) for group in several], "writing the row")
    kept = [
        [_failed(group[0], table)] if isinstance(table, ErrorInfo) else group
        for group, table in zip(groups, tables, strict=True)
    ]
    rows = [row for group in kept for row in group]
    return rows, _table(rows, work)


def _failed(row: OutputRow, error: ErrorInfo) -> OutputRow:
    """The error row of a group; its id stays, and nothing else that may be what cannot be written."""
    done = row.completion
    return OutputRow(Completion(done.row_index, done.prompt_index, error=error, seed=done.seed), row.id)


def _table(rows: list[OutputRow], work: WorkFolder) -> pa.Table:
    carried = work.identity.carried
    if not carried:
        return completions_to_table(rows, work.asked)
    plain = completions_to_table([replace(row, extra=None) for row in rows], work.asked)
    columns = carried_columns([row.extra for row in rows], carried)
    return pa.Table.from_arrays([*plain.columns, *columns], schema=work.schema)


def _row_bytes(row: OutputRow) -> int:
    """Approximate bytes of a row in memory. Written for speed: it runs on the engine's thread."""
    completion = row.completion
    size = 512
    for values in _LISTS(completion):
        if values is not None:
            size += 8 * len(values)
    for text in (completion.text, row.extra, row.prompt):
        if text is not None:
            size += len(text)
    if completion.states:
        size += sum(block.values.nbytes for block in completion.states)
    return size
