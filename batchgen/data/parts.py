"""Committed rows: written in parts by a thread of their own, so that encoding does not hold the engine up.

A group is all samples of one (row_index, prompt_index). It is committed whole or not at all, so a key found in any part
is done. Hidden states of a part's rows are committed just before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import pyarrow as pa
import pyarrow.types as pat

from batchgen.data.budget import OutputBudget
from batchgen.data.carry import carried_columns
from batchgen.data.files import parquet_writer, write_durably
from batchgen.data.schema import (
    FINGERPRINT_KEY,
    SCHEMA,
    SCHEMA_VERSION,
    VERSION_KEY,
    OutputRow,
    completions_to_table,
    results_schema,
)
from batchgen.data.states import records_of, states_part, write_states_part
from batchgen.data.work import WorkFolder

__all__ = ["STATES_KEY", "PartWriter", "WriterStats", "part_schema"]

STATES_KEY = b"batchgen.states"
"""How many records the part's states hold; absent where it has none."""

_PART_BYTES = 64 << 20
"""A part is committed when it holds about this much, however few rows; `add` waits while so much is buffered, so that
however slow the disk is, no more than twice this and a group each is held: one part being written, one buffered."""

_LISTS = attrgetter(*(field.name for field in SCHEMA if pat.is_list(field.type)))
"""A completion's list columns."""


@dataclass(slots=True)
class WriterStats:
    """What the disk's pace did to the one who adds."""

    output_waits: int = 0
    """How often `add` found the buffer full."""
    output_wait_seconds: float = 0.0
    """How long it waited in all."""
    output_peak_bytes: int = 0
    """Most bytes of finished rows held at once, buffered or being written."""


class PartWriter:
    """Buffers finished groups and commits them as parts: whenever `commit_every` rows or 64 MiB are there, and at
    the latest `commit_seconds` after a group was added.

    An error of the writing thread is raised by the next `add`, `flush` or `close`. What was committed stays. Parts
    past `max_bytes` in all are such an error.
    """

    def __init__(
        self,
        work: WorkFolder,
        commit_every: int = 2000,
        commit_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int | None = None,
    ) -> None:
        assert commit_every > 0
        assert commit_seconds > 0
        self._folder = work.parts
        self._work = work
        self._budget = OutputBudget.of(work, max_bytes)
        self._commit_every = commit_every
        self._commit_seconds = commit_seconds
        self._clock = clock
        self._number = _next_number(work.part_files())
        self._changed = threading.Condition()
        self._buffer: list[OutputRow] = []
        self._weight = 0
        self._weight_written = 0
        self._since = 0.0
        self._flushing = False
        self._closing = False
        self._writing = False
        self._error: BaseException | None = None
        self._committed = 0
        self.stats = WriterStats()
        self._thread = threading.Thread(target=self._run, name="batchgen-parts", daemon=True)
        self._thread.start()

    @property
    def rows_committed(self) -> int:
        """Output rows this writer made durable."""
        return self._committed

    def add(self, group: Sequence[OutputRow]) -> None:
        """Hand over all samples of one (row_index, prompt_index).

        Raises:
            OutputError: an earlier part could not be written.
        """
        assert group
        assert len({row.completion.key[:2] for row in group}) == 1, "a group is the samples of one prompt"
        weight = sum(map(_weight, group))
        with self._changed:
            self._wait_for_room()
            self._raise_error()
            if not self._buffer:
                self._since = self._clock()
            self._buffer.extend(group)
            self._weight += weight
            self.stats.output_peak_bytes = max(self.stats.output_peak_bytes, self._weight + self._weight_written)
            # One wake-up starts the thread's clock, another is for a full part.
            if len(self._buffer) == len(group) or self._due():
                self._changed.notify_all()

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
        """Commit everything and end the thread.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException:
            # The error on its way out is the one to report; a writing error would hide it.
            if error is None:
                raise

    def _wait_for_room(self) -> None:
        if self._weight < _PART_BYTES or self._error is not None:
            return
        self.stats.output_waits += 1
        began = time.monotonic()
        self._changed.wait_for(lambda: self._weight < _PART_BYTES or self._error is not None)
        self.stats.output_wait_seconds += time.monotonic() - began

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _due(self) -> bool:
        if not self._buffer:
            return False
        full = len(self._buffer) >= self._commit_every or self._weight >= _PART_BYTES
        return full or self._flushing or self._closing or self._clock() >= self._since + self._commit_seconds

    def _run(self) -> None:
        try:
            while rows := self._take():
                self._commit(rows)
                with self._changed:
                    self._committed += len(rows)
                    rows.clear()  # not held on to while the next part fills up
                    self._weight_written = 0
                    self._writing = False
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._writing = False
                self._changed.notify_all()

    def _take(self) -> list[OutputRow]:
        """Wait for rows that are due and take them; empty when closing with nothing left."""
        with self._changed:
            while not self._due():
                if self._closing:
                    return []
                wait = self._since + self._commit_seconds - self._clock() if self._buffer else None
                self._changed.wait(wait)
            rows, self._buffer = self._buffer, []
            self._weight, self._weight_written = 0, self._weight
            self._writing = True
            self._changed.notify_all()
            return rows

    def _commit(self, rows: list[OutputRow]) -> None:
        path = self._folder / f"part-{self._number:06d}.parquet"
        count = sum(len(row.completion.states or ()) for row in rows)
        states_bytes = 0
        if count:
            records = (record for row in rows for record in records_of(row))
            states_bytes = write_states_part(states_part(path), records, self._budget.hold)
        table = _table(rows, self._work.identity.carried)

        def write(stream: BinaryIO) -> None:
            with parquet_writer(stream, part_schema(self._work, count)) as writer:
                writer.write_table(table)
            self._budget.hold(states_bytes + stream.tell())

        write_durably(path, write)
        self._budget.spend(states_bytes + path.stat().st_size)
        self._number += 1


def part_schema(work: WorkFolder, states: int = 0) -> pa.Schema:
    """The results' schema with the footer keys that make a part this job's, and say how many states it has."""
    keys = {VERSION_KEY: SCHEMA_VERSION.encode(), FINGERPRINT_KEY: work.identity.key.encode()}
    return results_schema(work.identity.carried).with_metadata(
        keys | ({STATES_KEY: str(states).encode()} if states else {})
    )


def _table(rows: list[OutputRow], carried: Sequence[pa.Field]) -> pa.Table:
    if not carried:
        return completions_to_table(rows)
    plain = completions_to_table([replace(row, extra=None) for row in rows])
    columns = carried_columns([row.extra for row in rows], carried)
    return pa.Table.from_arrays([*plain.columns, *columns], schema=results_schema(carried))


def _next_number(parts: list[Path]) -> int:
    return 1 + max((int(path.stem.removeprefix("part-")) for path in parts), default=-1)


def _weight(row: OutputRow) -> int:
    """About how many bytes a row takes in memory. The steps wait for this, so it is written out."""
    completion = row.completion
    weight = 512
    for values in _LISTS(completion):
        if values is not None:
            weight += 8 * len(values)
    for text in (completion.text, row.extra, row.prompt):
        if text is not None:
            weight += len(text)
    if completion.states:
        weight += sum(block.values.nbytes for block in completion.states)
    return weight
