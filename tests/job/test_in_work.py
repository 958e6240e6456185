"""What the record of rows in work tells the next run: each death is a record that was not closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchgen.data.store.work_folder import RunIdentity, WorkFolder, output_paths
from batchgen.data.store.work_owner import open_work
from batchgen.job.in_work import InWork
from batchgen.plan.step_plan import StepPlan

Run = Callable[[InWork], None]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[WorkFolder]:
    found = open_work(output_paths(tmp_path / "out.parquet"), RunIdentity("job"), {})
    assert found is not None
    with found:
        yield found


def generating(*rows: int, steps: int = 3) -> Run:
    """Dies after some steps with samples of these rows running; others have ended before."""

    def run(record: InWork) -> None:
        read_all(record)
        generate(record, rows, steps)

    return run


def generate(record: InWork, rows: tuple[int, ...], steps: int) -> None:
    for number, row in enumerate([100, *rows]):
        record.started(number, row)
    record.ended(0, [0])
    for _ in range(steps):
        record.before(StepPlan())


def alone(row: int, steps: int) -> Run:
    def run(record: InWork) -> None:
        read_all(record)
        assert row in record.alone
        generate(record, (7, 8), 5)
        record.ended(0, [1, 2])
        record.run_alone(row)
        generate(record, (row,), steps)

    return run


def reading(low: int, high: int) -> Run:
    """Dies while rows are read: all below `low` are."""

    def run(record: InWork) -> None:
        for row in range(high + 1):
            if record.is_suspect(row) and low == high == row:
                record.parsing_alone(row)
            else:
                record.parsing(row)
            if row < low:
                record.parsed(row)

    return run


def read_all(record: InWork) -> None:
    reading(1000, 999)(record)
    record.end_reading()


def closed(run: Run) -> Run:
    """The same run, but it ends in an orderly way."""

    def close(record: InWork) -> None:
        run(record)
        record.close()

    return close


def after(work: WorkFolder, *runs: Run) -> InWork:
    for run in runs:
        run(InWork(work))
    return InWork(work)


BATCH, TWICE = generating(4, 5, 6), (generating(4, 5, 6), generating(3, 5, 6))
SUSPECTS = {
    "nothing has run": ((), []),
    "one death": ((BATCH,), []),
    "two deaths": (TWICE, [5, 6]),
    "two deaths with nothing in common": ((generating(1, 2), generating(3, 4)), []),
    "orderly ends": ((closed(BATCH), closed(BATCH), closed(BATCH)), []),
    "an orderly end between": ((BATCH, closed(BATCH), BATCH), [4, 5, 6]),
    "a run that a death ended comes last": ((*TWICE, alone(5, 2)), [6, 5]),
}


@pytest.mark.parametrize("name", SUSPECTS)
def test_rows_of_two_deaths_run_by_themselves(work: WorkFolder, name: str) -> None:
    runs, expected = SUSPECTS[name]
    record = after(work, *runs)
    assert (list(record.alone), record.set_aside, record.refused) == (expected, {}, {})


SET_ASIDE = {
    "twice alone at one step": ((alone(5, 2),) * 2, []),
    "three times alone at one step": ((alone(5, 2),) * 3, [5]),
    "three times alone at two steps": ((alone(5, 2), alone(5, 3), alone(5, 2)), []),
    "another one between": ((alone(5, 2), alone(5, 2), alone(6, 4), alone(5, 2)), [5]),
    "two rows": ((alone(5, 2), alone(6, 4)) * 3, [5, 6]),
    "one step of two rows": ((alone(5, 2), alone(6, 2), alone(5, 2)), []),
    "five times alone": (tuple(alone(5, step) for step in range(5)), [5]),
    "four times alone": (tuple(alone(5, step) for step in range(4)), []),
    "orderly ends alone": ((closed(alone(5, 2)),) * 4, []),
}


@pytest.mark.parametrize("name", SET_ASIDE)
def test_a_row_is_set_aside_after_equal_deaths_alone(work: WorkFolder, name: str) -> None:
    runs, expected = SET_ASIDE[name]
    record = after(work, *TWICE, *runs)
    assert [*record.set_aside] == expected
    assert not set(record.alone) & set(expected)
    assert {error.code for error in record.set_aside.values()} <= {"engine_crash"}


READING = {
    "one death": ((reading(4, 9),), [4, 9], []),
    "one death and an orderly end": ((reading(4, 9), closed(reading(2, 2))), [4, 9], []),
    "alone once": ((reading(4, 9), reading(7, 7)), [7, 9], []),
    "alone twice": ((reading(4, 9), *[reading(7, 7)] * 2), [7, 9], []),
    "alone three times": ((reading(4, 9), *[reading(7, 7)] * 3), [7, 9], [7]),
    "a run gets past it": ((reading(4, 9), *[reading(7, 7)] * 2, reading(8, 8), reading(7, 7)), [7, 9], []),
    "all is read": ((reading(4, 9), generating(1)), [], []),
    "the first row": ((reading(0, 0),) * 4, [0, 0], [0]),
}


@pytest.mark.parametrize("name", READING)
def test_rows_of_a_death_while_reading_are_read_one_by_one(work: WorkFolder, name: str) -> None:
    runs, expected, refused = READING[name]
    record = after(work, *runs)
    suspects = [row for row in range(20) if record.is_suspect(row)]
    assert suspects[:1] + suspects[-1:] == expected
    assert record.has_suspects == bool(expected)
    assert [*record.refused] == refused


def test_what_was_set_aside_is_tried_again_on_demand(work: WorkFolder) -> None:
    deaths = (*TWICE, *[alone(5, 2)] * 3)
    assert [*after(work, *deaths).set_aside] == [5]
    assert [*InWork(work).set_aside] == [5]
    record = InWork(work, retry_errors=True)
    assert (record.set_aside, [*record.alone]) == ({}, [6])
    assert InWork(work).set_aside == {}


def test_a_row_that_the_last_retry_died_of_is_set_aside(work: WorkFolder) -> None:
    after(work, *TWICE, *[alone(5, 2)] * 2)
    alone(5, 2)(InWork(work))
    assert [*InWork(work, retry_errors=True).set_aside] == [5]


@pytest.mark.parametrize("name", ["in-work", "deaths.json"])
@pytest.mark.parametrize("data", [b"", b"{", b"\0" * 8 * 4096, b'{"rows": []}', b"[" * 5000, b"x" * 7])
def test_damaged_files_are_ignored(work: WorkFolder, name: str, data: bytes) -> None:
    after(work, *TWICE)
    (work.paths.work / name).write_bytes(data)
    assert InWork(work).set_aside == {}


def test_another_job_knows_nothing_of_it(work: WorkFolder) -> None:
    after(work, *TWICE, *[alone(5, 2)] * 3)
    other = WorkFolder(work.paths, RunIdentity("other"), None)  # type: ignore[arg-type]
    record = InWork(other)
    assert (record.set_aside, [*record.alone]) == ({}, [])


def test_more_samples_than_cells(work: WorkFolder) -> None:
    record = InWork(work)
    for number in range(10_000):
        record.started(number, number)
    for number in range(10_000):
        record.ended(number, [number])
    record.started(1, 7)
    record.started(2, 8)
    record = InWork(work)
    generating(7, 8)(record)
    assert [*InWork(work).alone] == [7, 8]
