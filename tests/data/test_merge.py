"""Merged shards equal the output of one run; other files are refused."""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.out import merge as merge_module
from batchgen.data.out.finish import finish
from batchgen.data.out.merge import merge
from batchgen.data.results_file import read_footer
from batchgen.data.row_shapes import RowShapes
from batchgen.data.store.work_folder import RunIdentity, is_complete, output_paths
from batchgen.errors import FingerprintError, InputError, OutputError, UsageError
from batchgen.request.completion import StateBlock
from tests.data.helpers import begin, commit, expect, failed, group, stored, stored_keys


def run(out: Path, shard: tuple[int, int] | None, fingerprint: str = "f", rows: int = 20) -> Path:
    mine = [row for row in range(rows) if shard is None or row % shard[1] == shard[0]]
    with begin(out, RunIdentity(fingerprint, shard)) as work:
        commit(work, [group(row, samples=1 + row % 2) for row in reversed(mine)])
        shapes = RowShapes()
        for row in mine:
            shapes.add(row, chat=row % 3 == 1, echo=row % 5 == 0)
        counts = {"input_rows": len(mine), "rows_skipped": sum(row % 7 == 0 for row in mine)}
        made = {"model": "m", "created": 5, "row_shapes": shapes.encode(), **counts}
        backends = ["llguidance", "xgrammar"]  # of a shard one of them, or none
        made["grammar_backends"] = backends if shard is None else backends[shard[0] : shard[0] + 1]
        finish(work, expect((row, 0, 1 + row % 2) for row in mine), made)
        return work.paths.result


def test_merged_shards_equal_the_output_of_one_run(tmp_path: Path) -> None:
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
    merge([run(tmp_path / "few", (i, 3), rows=2) for i in range(3)], tmp_path / "few.parquet")  # one shard is empty
    assert stored_keys(tmp_path / "few.parquet") == [(0, 0, 0), (1, 0, 0), (1, 0, 1)]


def test_other_files_are_refused(tmp_path: Path) -> None:
    a, b, c = (run(tmp_path / "out", (i, 3)) for i in range(3))
    other = run(tmp_path / "other", (2, 3), "g")
    fewer = run(tmp_path / "fewer", (0, 2))
    whole = run(tmp_path / "whole.parquet", None)
    junk = tmp_path / "junk.parquet"
    junk.write_bytes(b"junk")
    out = tmp_path / "m.parquet"
    refused: list[tuple[list[Path], type[Exception], str]] = [
        ([a, c], UsageError, "1 of 3 shards are missing, the first is 1"),
        ([b, c], UsageError, "1 of 3 shards are missing, the first is 0"),
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
    for target in (a, tmp_path / "link"):
        if target != a:
            target.symlink_to(a)
        before = a.read_bytes()
        with pytest.raises(UsageError, match="is one of the shards"):
            merge([a, b, c], target, overwrite=True)
        assert a.read_bytes() == before
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="not a regular file"):
        merge([a, b, c], tmp_path / "pipe", overwrite=True)


def test_a_killed_merge_can_be_repeated(tmp_path: Path) -> None:
    shards = [run(tmp_path / "out", (i, 2)) for i in range(2)]
    out = tmp_path / "m.parquet"
    scratch = output_paths(out).work / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "shard-0.states").write_bytes(b"half")
    (scratch.parent / "lock").touch()
    assert merge(shards, out) == 30
    assert not scratch.parent.exists()


def test_the_work_of_an_unfinished_run_to_the_same_output_is_kept(tmp_path: Path) -> None:
    shards = [run(tmp_path / "out", (i, 2)) for i in range(2)]
    out = tmp_path / "m.parquet"
    with begin(out) as work:
        commit(work, [group(0)])
    with pytest.raises(OutputError, match="not finished"):
        merge(shards, out)
    assert len(work.part_files()) == 1


def shard_of_ids(out: Path, shard: tuple[int, int], ids: dict[int, str], bad: set[int], **made: Any) -> None:
    """Write a shard with the given ids by row index, two samples per row."""
    with begin(out, RunIdentity("f", shard)) as work:
        groups = [[failed(row)] if row in bad else group(row, samples=2) for row in ids]
        commit(work, [[replace(each, id=ids[each.completion.row_index]) for each in its] for its in groups])
        shapes = RowShapes()
        for row in ids:
            shapes.add(row)
        finish(work, expect((row, 0, 2) for row in ids), {"created": 5, "row_shapes": shapes.encode(), **made})


@pytest.mark.parametrize("policy", ["error", "suffix"])
def test_an_id_in_two_shards_is_refused_with_both_rows(tmp_path: Path, policy: str) -> None:
    made = {"configuration": {"options": {"on_duplicate_id": {"value": policy}}}}
    out = tmp_path / "out"
    shard_of_ids(out, (0, 2), {0: "a", 2: "same\x1b", 4: "late", 6: "bad"}, {6}, **made)
    shard_of_ids(out, (1, 2), {1: "late", 3: "b", 5: "same\x1b", 7: "bad", 9: "b"}, {9}, **made)
    files = [out / f"part-0000{i}-of-00002.parquet" for i in range(2)]
    merged = tmp_path / "m.parquet"
    with pytest.raises(UsageError) as caught:
        merge([out], merged)
    assert str(caught.value) == (
        f"id 'late' (one of 2 repeated ids) is used by row 1 in {files[1]} and by row 4 in {files[0]}. Make ids "
        "unique and run the job again, or merge the shards as they are with --allow-duplicate-ids."
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert merge([out], merged, allow_duplicate_ids=True) == 16
    assert [row["id"] for row in stored(merged) if row["row_index"] in (1, 4)] == ["late"] * 4


def test_duplicate_ids_are_merged_if_the_job_allowed_them(tmp_path: Path) -> None:
    made = {"configuration": {"options": {"on_duplicate_id": {"value": "allow"}}}}
    for i in range(2):
        shard_of_ids(tmp_path / "out", (i, 2), {i: "same", 2 + i: "same"}, set(), **made)
    assert merge([tmp_path / "out"], tmp_path / "m.parquet") == 8


def test_different_ids_with_equal_hashes_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(2):
        shard_of_ids(tmp_path / "out", (i, 2), {i: f"id-{i}", 2 + i: f"id-{2 + i}"}, set())
    monkeypatch.setattr(merge_module, "hash", lambda _: 7, raising=False)
    assert merge([tmp_path / "out"], tmp_path / "m.parquet") == 8


def test_random_ids_against_a_counter(tmp_path: Path) -> None:
    """Merging is refused if and only if two rows with results have the same id."""
    rng = random.Random(5)
    seen: Counter[bool] = Counter()
    for trial in range(12):
        ids = {row: f"{rng.randrange(120)}" for row in range(12)}
        bad = {row for row in ids if rng.random() < 0.2}
        for i in range(3):
            its = {row: name for row, name in ids.items() if row % 3 == i}
            shard_of_ids(tmp_path / f"{trial}", (i, 3), its, bad)
        repeated = max(Counter(name for row, name in ids.items() if row not in bad).values()) > 1
        with pytest.raises(UsageError) if repeated else nullcontext():
            merge([tmp_path / f"{trial}"], tmp_path / f"{trial}.parquet")
        seen[repeated] += 1
    assert min(seen[True], seen[False]) > 2


def job(
    out: Path,
    ids: list[str],
    bad: frozenset[int] = frozenset(),
    states: bool = False,
    record: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A finished output of a whole job: two prompts a row, the last row a duplicate of the first."""
    with begin(out, RunIdentity(out.stem)) as work:
        groups = []
        for row, name in enumerate(ids):
            made = [[failed(row)]] if row in bad else [group(row, prompt, samples=2) for prompt in range(2)]
            groups += [[replace(each, id=name) for each in its] for its in made]
        last = groups[-1]
        if len(ids) > 1 and last[0].completion.error is None:
            leader = {"dedup_of": 0, "states": (state_block(len(ids)),) if states else None}
            groups[-1] = [replace(each, completion=replace(each.completion, **leader)) for each in last]
        commit(work, groups)
        shapes = RowShapes()
        for row in range(len(ids)):
            shapes.add(row, chat=row % 2 == 1)
        keys = [(row, prompt, 2) for row in range(len(ids)) for prompt in range(1 if row in bad else 2)]
        made_of = {"--seed": 0, "input files": [[len(ids), "ab"]]} | options
        about: dict[str, Any] = {"job": made_of, "inputs": [{"size": 1, "sha256": "ab"}]} | (record or {})
        finish(work, expect(keys), about | {"created": 5, "row_shapes": shapes.encode(), "input_rows": len(ids)})
        return work.paths.result


def state_block(row: int) -> StateBlock:
    return StateBlock(-1, "last", 0, np.full((1, 4), row, np.float32), "float32")


def test_whole_jobs_are_merged_in_the_order_given(tmp_path: Path) -> None:
    """Rows are renumbered, with their leaders, shapes and hidden states; nothing else changes."""
    a = job(tmp_path / "a.parquet", ["a0", "a1"], states=True)
    b = job(tmp_path / "b.parquet", ["b0", "b1", "b2"], frozenset({1}), states=True)
    merged = tmp_path / "all.parquet"
    assert merge([b, a], merged) == len(stored(a)) + len(stored(b))
    expected = stored(b) + [{**row, "row_index": row["row_index"] + 3} for row in stored(a)]
    moved = {None: None, 0: 3}
    expected[len(stored(b)) :] = [{**row, "dedup_of": moved[row["dedup_of"]]} for row in expected[len(stored(b)) :]]
    assert stored(merged) == expected
    states = [(row["id"], row["row_index"]) for row in stored(tmp_path / "all.hidden.parquet")]
    assert states == [("b2", 2), ("b2", 2), ("a1", 4), ("a1", 4)]
    footer = read_footer(merged) or {}
    assert (footer["input_rows"], footer["merged_jobs"]) == (5, ["b", "a"])
    assert [shape.chat for shape in RowShapes.decode(footer["row_shapes"])] == [False, True, False, False, True]
    assert not output_paths(merged).work.exists()


def test_whole_jobs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    a = job(tmp_path / "a.parquet", ["x", "y"])
    overlap = job(tmp_path / "overlap.parquet", ["z", "y"], frozenset({1}))
    other = job(tmp_path / "other.parquet", ["w"], **{"--seed": 1, "--limit": 3})
    limited = job(tmp_path / "limited.parquet", ["w"], **{"--limit": 3})
    shard = run(tmp_path / "out", (0, 2))
    merged = tmp_path / "m.parquet"
    refused: list[tuple[list[Path], type[Exception], str]] = [
        ([a, overlap], UsageError, "id 'y' is used by row 1 in .*--reuse.*--allow-duplicate-ids"),
        ([a, other], FingerprintError, r"different options: --seed was 0, is 1\. "),
        ([a, a], UsageError, "named twice"),
        ([a, shard], UsageError, "not a shard"),
        ([a], UsageError, "not a shard"),
    ]
    for files, kind, part in refused:
        with pytest.raises(kind, match=part):
            merge(files, merged)
    with pytest.raises(UsageError, match="is one of the files"):
        merge([a, limited], a, overwrite=True)
    with pytest.raises(UsageError, match="writes Parquet"):
        merge([a, limited], tmp_path / "m.jsonl")
    assert not merged.exists()
    assert merge([a, limited], merged) == 12
    assert merge([a, overlap], merged, overwrite=True, allow_duplicate_ids=True) == 13


def test_a_merged_record_says_of_all_jobs_only_what_is_true_of_all(tmp_path: Path) -> None:
    def recorded(*made: dict[str, Any]) -> dict[str, Any]:
        files = [job(tmp_path / f"{i}.parquet", [f"{i}"], record=each) for i, each in enumerate(made)]
        merge(files, tmp_path / "m.parquet", overwrite=True)
        for file in files:
            file.unlink()
        return read_footer(tmp_path / "m.parquet") or {}

    noon: dict[str, Any] = {"clock": "2026-01-01T12:00", "clock_text": {"%d": "01"}}
    later = {"clock": "2026-01-01T13:00", "clock_text": {"%d": "01"}}
    asked = {"rows_skipped": 1, "grammar_backends": ["xgrammar"], **noon}
    footer = recorded(asked, {"rows_skipped": 2, "grammar_backends": ["llguidance"], **noon})
    assert footer["grammar_backends"] == ["llguidance", "xgrammar"]
    assert (footer["rows_skipped"], footer["clock"], footer["clock_text"]) == (3, *noon.values())
    footer = recorded(asked, {"grammar_backends": [], **later})
    assert footer["grammar_backends"] == ["xgrammar"]
    assert (footer["rows_skipped"], footer["clock"], footer["clock_text"]) == (None, None, {"%d": "01"})
    assert recorded({}, noon)["clock"] is None
    assert "clock" not in recorded({}, {})
    assert "merged_shards" not in recorded({"merged_shards": 2}, {})


def test_a_merged_output_is_merged_again_as_its_jobs_would_be(tmp_path: Path) -> None:
    files = [job(tmp_path / f"{name}.parquet", [f"{name}0", f"{name}1"], states=True) for name in "abc"]
    merge(files[:2], tmp_path / "ab.parquet")
    merge([tmp_path / "ab.parquet", files[2]], tmp_path / "again.parquet")
    merge(files, tmp_path / "all.parquet")
    assert (read_footer(tmp_path / "again.parquet") or {})["merged_jobs"] == ["a", "b", "c"]
    for name in ("{}.parquet", "{}.hidden.parquet"):
        assert stored(tmp_path / name.format("again")) == stored(tmp_path / name.format("all"))
        assert read_footer(tmp_path / name.format("again")) == read_footer(tmp_path / name.format("all"))


@pytest.mark.parametrize("other", [pa.array(["x"] * 4), pa.array([1] * 4, pa.int32()), None])
def test_a_carried_column_of_two_types_is_refused_by_name(tmp_path: Path, other: pa.Array | None) -> None:
    def with_column(file: Path, values: pa.Array | None) -> Path:
        table = pq.read_table(file)
        pq.write_table(table if values is None else table.append_column("k", values), file)
        return file

    a = with_column(job(tmp_path / "a.parquet", ["a0", "a1"]), pa.array([1] * 8))
    b = with_column(job(tmp_path / "b.parquet", ["b0"]), other)
    kind = "missing" if other is None else other.type
    with pytest.raises(UsageError, match=f"Column 'k' is int64 in {a} and {kind} in {b}") as caught:
        merge([a, b], tmp_path / "m.parquet")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "m.parquet").exists()
    same = with_column(job(tmp_path / "c.parquet", ["c0"]), pa.array([2] * 4))
    merge([a, same], tmp_path / "m.parquet")
    assert [row["k"] for row in stored(tmp_path / "m.parquet")] == [1] * 8 + [2] * 4
