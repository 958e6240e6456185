"""Reading back: finished files, shards and unfinished work, filtered without loading them."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.data import gather
from batchgen.data.finish import finish
from batchgen.data.schema import OutputRow
from batchgen.data.view import open_results
from batchgen.data.work import RunIdentity
from batchgen.errors import InputError
from tests.data.helpers import begin, commit, expect, failed, group


def groups() -> list[list[OutputRow]]:
    return [[failed(row)] if row % 5 == 2 else group(row, samples=2) for row in (7, 3, 2, 0, 1, 6, 4, 5)]


def write(out: Path, end: bool) -> None:
    with begin(out) as work:
        commit(work, groups())
        if end:
            finish(work, expect((row, 0, 2) for row in range(8)), {"model": "m"})


def test_a_finished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "ROW_GROUP_ROWS", 4)
    out = tmp_path / "r.parquet"
    write(out, end=True)
    results = open_results(out)
    assert results.complete
    assert results.footer is not None
    assert results.footer["model"] == "m"
    assert len(results) == 14
    assert [row["row_index"] for row in results.rows()] == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7]
    assert [(row["row_index"], row["sample_index"]) for row in results.rows(row=3)] == [(3, 0), (3, 1)]
    assert [row["row_index"] for row in results.rows(errors=True)] == [2, 7]
    assert [row["row_index"] for row in results.rows(row=7, errors=True)] == [7]
    assert [*results.rows(row=99)] == []
    assert next(results.rows(columns=["text", "id"])) == {"id": "id-0", "text": "text of 0.0.0 \u2028 é"}


def test_unfinished_work_in_order_of_completion(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    write(out, end=False)
    work = tmp_path / "r.parquet.work"
    (work / "parts" / "part-000099.parquet").write_bytes(b"just being written")
    results = open_results(out)
    assert not results.complete
    assert results.footer is None
    assert len(results) == 14
    assert next(results.rows())["row_index"] == 7
    assert [row["row_index"] for row in results.rows(errors=True)] == [7, 2]
    assert [row["sample_index"] for row in results.rows(row=4)] == [0, 1]
    assert [*open_results(work).rows()] == [*results.rows()]
    assert (work / "parts" / "part-000099.parquet").exists(), "looking changes nothing"


def test_shards(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for i in range(2):
        with begin(out, RunIdentity("f", (i, 2))) as work:
            commit(work, [group(i)])
            if i == 0:
                assert not open_results(out).complete
            finish(work, expect([(i, 0, 1)]), {})
    results = open_results(out)
    assert results.complete
    assert [row["row_index"] for row in results.rows()] == [0, 1]


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        open_results(tmp_path / "r.parquet")
    (tmp_path / "r.parquet").write_bytes(b"x")
    with pytest.raises(InputError, match="not a batchgen output"):
        open_results(tmp_path / "r.parquet")


def test_damage_is_an_input_error(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    write(out, end=True)
    data = bytearray(out.read_bytes())
    data[4:40] = bytes(36)
    out.write_bytes(bytes(data))
    with pytest.raises(InputError, match="cannot be read"):
        [*open_results(out).rows()]
