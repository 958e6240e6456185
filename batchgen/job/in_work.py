"""The rows that a run has in work, in a file that outlives the process; rows that end run after run are set aside.

A process that dies (a fault of a library, too little memory, `kill -9`) leaves no exception behind. But the pages of a
mapped file stay, so the next run of the job finds in `OUT.work/in-work` what was in work: the rows read since the last
one that was finished, or the rows whose samples were running. From death to death suspects are narrowed down:

- Reading: the rows of the batch in work are read one by one from then on, until a run gets past them.
- Generation: rows that were in work at two deaths run by themselves, one after the other, when all others are done.

A row is set aside, as an error row with `engine_crash`, only if `DEATHS_ALONE` runs have died while it alone was in
work: of a row that generates, after the same number of steps, or `_MOST_ALONE` times after any number. A healthy job
that is killed loses no row, since each kill is likely to hit another row, or another step. Two may hit the same one: a
run may spend most of its time in the first step of a row. A run that ends by an exception or a signal that it handles
leaves nothing in work.
"""

from __future__ import annotations

import heapq
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from batchgen.data.durable_files import output_errors, write_durably
from batchgen.data.files import files_in, open_new, open_own, remove_file, system
from batchgen.data.store.work_folder import WorkFolder
from batchgen.engine.settings import WorkRecord
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.plan.step_plan import StepPlan
from batchgen.request.foreign_text import ForeignTextError, Kinds, read_json, typed

_RECORD, _HISTORY = "in-work", "deaths.json"
_JOB, _STAMP, _LOW, _HIGH, _READ, _ALONE, _STEPS, _ROWS = range(8)
"""Cells: checksum of the job's key; time of the run's start; first row that is being read and last one (index plus
one, 0 for none); number of rows that were read before; row that is alone in work (index plus one); steps since a sample
started; first of the rows with running samples (index plus one, 0 for none)."""
_CELLS: Final = 4096
_MAX_RANGES: Final = 16
_DEATHS_TO_SUSPECT: Final = 2
DEATHS_ALONE: Final = 3
_MOST_ALONE: Final = 5
_SLOWEST: Final = 12
"""Most samples whose times are kept."""

_KINDS: Final[Kinds] = {"job": str, "counted": int, "reading": list, "rows": dict}


@dataclass(slots=True)
class _Row:
    """What deaths tell about a row."""

    deaths: int = 0
    """Deaths while its samples were running"""
    read_alone: int = 0
    """Deaths while it alone was read"""
    alone: list[int] = field(default_factory=list)
    """Steps at which runs died while it alone generated"""
    set_aside: bool = False

    def judge(self) -> None:
        """Set it aside if enough deaths tell the same."""
        same = max(map(self.alone.count, self.alone), default=0)
        if max(self.read_alone, same) >= DEATHS_ALONE or len(self.alone) >= _MOST_ALONE:
            self.set_aside = True


@dataclass(slots=True)
class _History:
    """What all deaths of a job tell, kept in the work folder."""

    counted: int = 0
    """Stamp of the last run that was looked at"""
    reading: list[tuple[int, int]] = field(default_factory=list)
    """First and last row of what is read one by one"""
    rows: dict[int, _Row] = field(default_factory=dict)

    @classmethod
    def read(cls, work: WorkFolder) -> _History:
        """The history of this job; empty if there is none, or it is damaged."""
        with suppress(OSError, ForeignTextError, ValueError, TypeError):
            with open_own(work.paths.work / _HISTORY) as stream:
                history = typed(read_json(stream.read()), _KINDS)
            if history["job"] == work.identity.key:
                rows = {int(row): _Row(*values) for row, values in history["rows"].items()}
                return cls(history["counted"], [(int(low), int(high)) for low, high in history["reading"]], rows)
        return cls()

    def write(self, work: WorkFolder) -> None:
        rows = {str(row): [r.deaths, r.read_alone, r.alone, r.set_aside] for row, r in self.rows.items()}
        history = {"job": work.identity.key, "counted": self.counted, "reading": self.reading, "rows": rows}
        write_durably(work.paths.work / _HISTORY, lambda stream: stream.write(json.dumps(history).encode()))

    def learn(self, work: WorkFolder, paths: Sequence[Path]) -> None:
        """Learn from records of this job that processes have left, dead or not. Those of replicas are then removed."""
        for path in paths:
            cells = _left(path, work)
            if cells is not None and cells[_STAMP] != self.counted:
                self._add(cells, counts=path.name == _RECORD)
        if self.rows or self.reading:
            self.write(work)
        for path in paths:
            if path.name != _RECORD:
                remove_file(path)

    def _add(self, cells: Sequence[int], *, counts: bool) -> None:
        self.counted = cells[_STAMP] if counts else self.counted
        read = max(cells[_READ], cells[_LOW] - 1)
        self.reading = [(max(low, read), high) for low, high in self.reading if high >= read]  # it got past the others
        for row, known in self.rows.items():
            if row < read and not known.set_aside:
                known.read_alone = 0
        low, high, alone = cells[_LOW] - 1, cells[_HIGH] - 1, cells[_ALONE] - 1
        running = {row - 1 for row in cells[_ROWS:] if row > 0}
        for row in running:
            self._row(row).deaths += 1
        if running and alone >= 0:
            self._row(alone).alone.append(cells[_STEPS])
        elif 0 <= low <= high:
            if alone == high:
                self._row(alone).read_alone += 1
            self.reading = [*self.reading, (low, high)][-_MAX_RANGES:]
        for known in self.rows.values():
            known.judge()

    def _row(self, row: int) -> _Row:
        return self.rows.setdefault(row, _Row())


class Record(WorkRecord):
    """What one process has in work. Close it when the process ends in an orderly way."""

    def __init__(self, path: Path, key: str, set_aside: Mapping[int, ErrorInfo]) -> None:
        """Begin the record.

        Args:
            path: its file.
            key: of the job.
            set_aside: row -> its error, for rows that do not generate.

        Raises:
            OutputError: the file cannot be written.
        """
        self.set_aside = set_aside
        self.alone: Sequence[int] = ()
        """Rows that generate by themselves when all others are done."""
        self.refused: Mapping[int, ErrorInfo] = {}
        """Row -> its error, for rows that are not read."""
        self._ranges: Sequence[tuple[int, int]] = ()
        """First and last row of what is read one by one."""
        with output_errors(path), open_new(path) as stream:
            stream.write(bytes(8 * _CELLS))
            stream.flush()
            self._map = system.mmap_shared(stream.fileno())
        self._cells = memoryview(self._map).cast("q")
        self._cells[_JOB], self._cells[_STAMP], self._cells[_LOW] = _job_of(key), time.time_ns(), 1
        self._free = list(range(_CELLS - 1, _ROWS - 1, -1))
        self._places: dict[int, int] = {}
        self._began: dict[int, tuple[float, int]] = {}
        """Running sample -> when it began, and its row."""
        self.slowest: list[tuple[float, int]] = []
        """Seconds of the samples that took longest, and their rows; a heap."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is in work any more. May be called from any thread, and again."""
        self.ended(-1, list(self._places))
        self._cells[_STEPS] = 0
        self.end_reading()

    # Reading.

    def is_suspect(self, row: int) -> bool:
        """Whether a row is read by itself."""
        return any(low <= row <= high for low, high in self._ranges)

    @property
    def has_suspects(self) -> bool:
        """Whether any row is read by itself."""
        return bool(self._ranges)

    def parsing(self, row: int) -> None:
        """A row is being parsed; it is in work until `parsed` names it or a later one."""
        self._cells[_HIGH] = row + 1

    def parsed(self, row: int) -> None:
        """A row and all before it are read."""
        self._cells[_LOW] = row + 2

    def parsing_alone(self, row: int) -> None:
        """A row is about to be parsed, all before it are read, and no other is until it is."""
        cells = self._cells
        cells[_ALONE], cells[_LOW], cells[_HIGH] = row + 1, row + 1, row + 1

    def end_reading(self) -> None:
        """No row is being read."""
        cells = self._cells
        cells[_READ] = max(cells[_READ], cells[_LOW] - 1)
        cells[_LOW] = cells[_HIGH] = cells[_ALONE] = 0

    # Generation.

    def run_alone(self, row: int) -> None:
        """The next samples are those of this row."""
        self._cells[_ALONE], self._cells[_STEPS] = row + 1, 0

    def started(self, number: int, row: int) -> None:
        """Sample `number` of a row is about to start."""
        self._began[number] = time.monotonic(), row
        if self._free:  # more samples than cells: the others keep their rows' names
            place = self._places[number] = self._free.pop()
            self._cells[place] = row + 1

    def ended(self, request: int, numbers: Sequence[int], samples: int = 1) -> None:
        """These samples have ended, and their completions are made."""
        for number in numbers:
            if (place := self._places.pop(number, None)) is not None:
                self._cells[place] = 0
                self._free.append(place)
            if (known := self._began.pop(number, None)) is not None and request >= 0:
                self.took(time.monotonic() - known[0], known[1])

    def took(self, seconds: float, row: int) -> None:
        """A sample of a row took so long from its start to its end."""
        (heapq.heappush if len(self.slowest) < _SLOWEST else heapq.heappushpop)(self.slowest, (seconds, row))

    def before(self, plan: StepPlan) -> float:
        """A step begins."""
        self._cells[_STEPS] += 1
        return 0.0


def replica_record(work: Path, number: int) -> Path:
    """The file of the record of a replica, by the work folder and its number."""
    return work / f"{_RECORD}-{number}"


def _job_of(key: str) -> int:
    return zlib.crc32(key.encode())


def _left(path: Path, work: WorkFolder) -> list[int] | None:
    """The cells of a record of this job; None for another file."""
    with suppress(OSError), open_own(path) as stream:
        data = stream.read(8 * _CELLS + 1)
        cells = memoryview(data).cast("q").tolist() if len(data) == 8 * _CELLS else [0]
        if cells[_JOB] == _job_of(work.identity.key):
            return cells
    return None


class InWork(Record):
    """The record of one run, and what it must know of earlier ones."""

    def __init__(self, work: WorkFolder, *, retry_errors: bool = False) -> None:
        """Learn from the last run of the job in a locked folder, and begin the record of this one.

        Args:
            work: the folder.
            retry_errors: whether rows that were set aside are tried again.

        Raises:
            OutputError: the folder cannot be written.
        """
        self._work = work
        history = _History.read(work)
        known = bool(history.rows or history.reading)
        if retry_errors:  # those of earlier runs; a row that the last one died of may be set aside now
            history.rows = {row: known for row, known in history.rows.items() if not known.set_aside}
        history.learn(work, [work.paths.work / _RECORD, *files_in(work.paths.work, f"{_RECORD}-*")])
        if known and not (history.rows or history.reading):
            history.write(work)
        super().__init__(work.paths.work / _RECORD, work.identity.key, {})
        self._ranges = history.reading
        self._judge(history)

    def _judge(self, history: _History) -> None:
        aside = {row: known for row, known in history.rows.items() if known.set_aside}
        self.refused = {row: engine_crash() for row, known in aside.items() if known.read_alone}
        self.set_aside = {row: engine_crash() for row, known in aside.items() if not known.read_alone}
        suspects = [row for row, r in history.rows.items() if not r.set_aside and r.deaths >= _DEATHS_TO_SUSPECT]
        self.alone = sorted(suspects, key=lambda row: (len(history.rows[row].alone), row))

    def close(self) -> None:
        """Nothing is in work any more, in replicas neither. May be called from any thread, and again."""
        super().close()
        for path in files_in(self._work.paths.work, f"{_RECORD}-*"):
            remove_file(path)

    def learn(self, number: int) -> None:
        """Learn from what a replica that died has left.

        Raises:
            OutputError: the folder cannot be written.
        """
        history = _History.read(self._work)
        history.learn(self._work, [replica_record(self._work.paths.work, number)])
        self._judge(history)


def engine_crash() -> ErrorInfo:
    """The error of a row that is set aside."""
    return ErrorInfo(
        ErrorCode.ENGINE_CRASH,
        "runs of this job died again and again while this row alone was in work: a library crashed on it, it needs "
        "more memory than there is, or the process was killed; it is not tried any more. Change the row, or try it "
        "again with --retry-errors",
    )
