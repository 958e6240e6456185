"""Retrying the errors of a finished output keeps its good rows, and the output until the new one is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.data.out import merge_sort
from batchgen.data.out.finish import finish
from batchgen.data.store.committed import Committed
from batchgen.data.store.work_folder import output_paths
from batchgen.data.store.work_owner import open_work
from tests.data.helpers import IDENTITY, begin, commit, expect, failed, group, stored

KEYS = [(row, 0, 2) for row in range(9)]


def finished(out: Path, bad: set[int]) -> None:
    with begin(out) as work:
        commit(work, [[failed(row)] if row in bad else group(row, samples=2) for row, _, _ in reversed(KEYS)])
        finish(work, expect(KEYS), {})


def test_only_errors_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_sort, "ROW_GROUP_ROWS", 4)
    finished(tmp_path / "good.parquet", set())
    out = tmp_path / "r.parquet"
    finished(out, {0, 4, 8})
    before = out.read_bytes()
    for kill in (True, True, False):
        work = open_work(output_paths(out), IDENTITY, {}, retry_errors=True)
        assert work is not None
        with work:
            committed = Committed.read(work, retry_errors=True)
            assert out.read_bytes() == before
            missing = [key for key in KEYS if key[:2] not in committed]
            assert {row for row, _, _ in missing} <= {0, 4, 8}
            commit(work, [group(row, samples=2) for row, _, _ in missing[: 1 if kill else None]])
            if not kill:
                assert len(missing) == 1, "an interrupted retry continues"
                finish(work, expect(KEYS), {})
    assert stored(out) == stored(tmp_path / "good.parquet")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "good.parquet", out]


def start_retry(out: Path) -> None:
    """Start a retry of the errors of a finished output, and stop."""
    again = open_work(output_paths(out), IDENTITY, {}, retry_errors=True)
    assert again is not None
    with again:
        assert len(again.part_files()) == 1


def test_overwrite_drops_a_retry_even_if_it_had_emptied_the_folder_before(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    finished(out, {1})
    begin(out, policy="overwrite").close()
    start_retry(out)
    with begin(out, policy="overwrite") as work:
        assert work.part_files() == []


def test_an_output_of_errors_only(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    finished(out, {row for row, _, _ in KEYS})
    work = open_work(output_paths(out), IDENTITY, {}, retry_errors=True)
    assert work is not None
    with work:
        assert len(Committed.read(work, retry_errors=True)) == 0
    assert open_work(output_paths(out), IDENTITY, {}) is None, "without the option the job is done"


def test_a_damaged_output_is_set_aside_and_computed_again(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    finished(out, {1})
    data = bytearray(out.read_bytes())
    data[4:1500] = bytes(1496)
    out.write_bytes(bytes(data))
    notes: list[str] = []
    work = open_work(output_paths(out), IDENTITY, {}, note=notes.append, retry_errors=True)
    assert work is not None
    with work:
        assert work.part_files() == []
    assert not out.exists()
    kept = tmp_path / "r.parquet.damaged" / "r.parquet.damaged"
    assert kept.read_bytes() == bytes(data)
    assert f"it is set aside and kept as {kept}" in notes[0]
