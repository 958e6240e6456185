"""Shards join into the file that one run gives; anything else is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchgen.data.files import read_footer
from batchgen.data.finish import finish
from batchgen.data.merge import merge
from batchgen.data.row_shapes import RowShapes
from batchgen.data.work import RunIdentity, is_complete, output_paths
from batchgen.errors import FingerprintError, InputError, OutputError, UsageError
from tests.data.helpers import begin, commit, expect, group, stored, stored_keys


def run(out: Path, shard: tuple[int, int] | None, fingerprint: str = "f", rows: int = 20) -> Path:
    mine = [row for row in range(rows) if shard is None or row % shard[1] == shard[0]]
    with begin(out, RunIdentity(fingerprint, shard)) as work:
        commit(work, [group(row, samples=1 + row % 2) for row in reversed(mine)])
        shapes = RowShapes()
        for row in mine:
            shapes.add(row, chat=row % 3 == 1, echo=row % 5 == 0)
        counts = {"input_rows": len(mine), "rows_skipped": sum(row % 7 == 0 for row in mine)}
        made = {"model": "m", "created": 5, "row_shapes": shapes.encode(), **counts}
        finish(work, expect((row, 0, 1 + row % 2) for row in mine), made)
        return work.paths.result


def test_shards_join_into_what_one_run_gives(tmp_path: Path) -> None:
    shards = [run(tmp_path / "out", (i, 3)) for i in (2, 0, 1)]
    whole = run(tmp_path / "whole.parquet", None)
    merged = tmp_path / "merged.parquet"
    assert merge(shards, merged) == 30
    assert stored(merged) == stored(whole)
    assert read_footer(merged) == {**(read_footer(whole) or {}), "merged_shards": 3}
    assert is_complete(output_paths(merged), RunIdentity("f"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged.parquet", "out", "whole.parquet"]
    assert merge([tmp_path / "out"], tmp_path / "again.parquet") == 30
    assert (tmp_path / "again.parquet").read_bytes() == merged.read_bytes()


def test_a_shard_may_be_empty(tmp_path: Path) -> None:
    shards = [run(tmp_path / "out", (i, 3), rows=2) for i in range(3)]
    merge(shards, tmp_path / "m.parquet")
    assert stored_keys(tmp_path / "m.parquet") == [(0, 0, 0), (1, 0, 0), (1, 0, 1)]


def test_refusals(tmp_path: Path) -> None:
    a, b, c = (run(tmp_path / "out", (i, 3)) for i in range(3))
    other = run(tmp_path / "other", (2, 3), "g")
    fewer = run(tmp_path / "fewer", (0, 2))
    whole = run(tmp_path / "whole.parquet", None)
    junk = tmp_path / "junk.parquet"
    junk.write_bytes(b"junk")
    out = tmp_path / "m.parquet"
    refused: list[tuple[list[Path], type[Exception], str]] = [
        ([a, c], UsageError, "1 of 3 shards are missing, the first is 1"),
        ([a, b, b, c], UsageError, "both shard 1"),
        ([a, b, other], FingerprintError, "different jobs"),
        ([a, fewer], FingerprintError, "different jobs"),
        ([whole], UsageError, "not a shard"),
        ([a, junk], InputError, "not a finished batchgen output"),
        ([a, tmp_path / "nowhere"], InputError, "no such file"),
        ([], UsageError, "No shards"),
    ]
    for files, kind, part in refused:
        with pytest.raises(kind, match=part):
            merge(files, out)
    assert not out.exists()
    out.write_bytes(b"precious")
    with pytest.raises(OutputError, match="exists"):
        merge([a, b, c], out)
    assert out.read_bytes() == b"precious"
    assert merge([a, b, c], out, overwrite=True) == 30
    with pytest.raises(OutputError, match="is a folder"):
        merge([a, b, c], tmp_path / "other", overwrite=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="not a regular file"):
        merge([a, b, c], tmp_path / "pipe", overwrite=True)


def test_a_merge_that_was_killed_is_repeated(tmp_path: Path) -> None:
    shards = [run(tmp_path / "out", (i, 2)) for i in range(2)]
    out = tmp_path / "m.parquet"
    scratch = output_paths(out).work / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "shard-0.states").write_bytes(b"half")
    (scratch.parent / "lock").touch()
    assert merge(shards, out) == 30
    assert not scratch.parent.exists()


def test_an_unfinished_run_to_the_same_place_is_not_disturbed(tmp_path: Path) -> None:
    shards = [run(tmp_path / "out", (i, 2)) for i in range(2)]
    out = tmp_path / "m.parquet"
    with begin(out) as work:
        commit(work, [group(0)])
    with pytest.raises(OutputError, match="not finished"):
        merge(shards, out)
    assert len(work.part_files()) == 1
