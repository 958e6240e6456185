"""Retrying errors of a finished output keeps everything else, and the output until the new one is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.data import gather
from batchgen.data.committed import Committed
from batchgen.data.finish import finish
from batchgen.data.retry import open_for_retry
from batchgen.data.work import RunIdentity, open_work, output_paths
from batchgen.errors import FingerprintError, InputError
from tests.data.helpers import IDENTITY, begin, commit, expect, failed, group, stored

KEYS = [(row, 0, 2) for row in range(9)]


def finished(out: Path, bad: set[int]) -> None:
    with begin(out) as work:
        commit(work, [[failed(row)] if row in bad else group(row, samples=2) for row, _, _ in reversed(KEYS)])
        finish(work, expect(KEYS), {})


def test_only_errors_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "ROW_GROUP_ROWS", 4)
    finished(tmp_path / "good.parquet", set())
    out = tmp_path / "r.parquet"
    finished(out, {0, 4, 8})
    before = out.read_bytes()
    for kill in (True, True, False):
        work = open_for_retry(output_paths(out), IDENTITY, {})
        assert work is not None
        with work:
            committed = Committed.read(work, retry_errors=True)
            assert out.read_bytes() == before
            missing = [key for key in KEYS if key[:2] not in committed]
            assert {row for row, _, _ in missing} <= {0, 4, 8}
            commit(work, [group(row, samples=2) for row, _, _ in missing[: 1 if kill else None]])
            if not kill:
                assert len(missing) == 1, "an interrupted retry goes on where it was"
                finish(work, expect(KEYS), {})
    assert stored(out) == stored(tmp_path / "good.parquet")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "good.parquet", out]


def take_back(out: Path) -> None:
    """Begin to compute the errors of a finished output again, and stop."""
    again = open_for_retry(output_paths(out), IDENTITY, {})
    assert again is not None
    with again:
        assert len(again.part_files()) == 1


def test_overwrite_drops_what_a_retry_took_from_the_output(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    finished(out, {1})
    take_back(out)
    with begin(out, policy="overwrite") as work:
        assert work.part_files() == []
        commit(work, [group(0)])
    with begin(out, policy="overwrite") as work:
        assert len(work.part_files()) == 1, "what it computed itself stays"


def test_a_retry_of_an_overwriting_run_that_committed_nothing_is_none_of_it(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    finished(out, {1})
    begin(out, policy="overwrite").close()
    take_back(out)
    with begin(out, policy="overwrite") as work:
        assert work.part_files() == []


def test_work_that_another_job_began_over_the_output_is_not_dropped(tmp_path: Path) -> None:
    out, other = tmp_path / "r.parquet", RunIdentity("0ther")
    finished(out, {1})
    with begin(out, other, "overwrite") as work:
        commit(work, [group(0)])
    with pytest.raises(FingerprintError, match="unfinished work of a different job"):
        open_for_retry(output_paths(out), IDENTITY, {})
    with begin(out, other, "overwrite") as work:
        assert len(Committed.read(work)) == 1


def test_without_errors_nothing_is_done(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    finished(out, set())
    before = out.stat().st_mtime_ns
    assert open_for_retry(output_paths(out), IDENTITY, {}) is None
    assert out.stat().st_mtime_ns == before
    assert [*tmp_path.iterdir()] == [out]


def test_all_errors(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    finished(out, {row for row, _, _ in KEYS})
    work = open_for_retry(output_paths(out), IDENTITY, {})
    assert work is not None
    with work:
        assert len(Committed.read(work, retry_errors=True)) == 0
    assert open_work(output_paths(out), IDENTITY, {}) is None, "without the option the job is done"


def test_an_unfinished_job_is_opened_as_ever(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    with begin(out) as work:
        commit(work, [group(0)])
    again = open_for_retry(output_paths(out), IDENTITY, {})
    assert again is not None
    with again:
        assert len(again.part_files()) == 1


def test_a_damaged_output_says_so(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    finished(out, {1})
    data = bytearray(out.read_bytes())
    data[4:1500] = bytes(1496)
    out.write_bytes(bytes(data))
    with pytest.raises(InputError, match="--overwrite"):
        open_for_retry(output_paths(out), IDENTITY, {})
