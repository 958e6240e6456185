"""One deterministic job with every kind of row: killed and resumed, sharded, in other batches, verified.

Plain rows, conversations, OpenAI lines, several samples, `best_of`, logprobs, hidden states, constraints, adapters,
processors, embeddings, scored texts, events, carried fields and invalid rows. Every comparison is exact.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.states import states_part
from tests.e2e.mixed import ADAPTERS, PROCESSOR, mixed_rows
from tests.e2e.rows import read, write_lines
from tests.e2e.runner import parts_of, run, start
from tests.models.adapters import KINDS, save_adapter

ROWS = 110
STEPS = ["--commit-every", "6", "--max-num-seqs", "8"]
INVALID: list[bytes | dict[str, Any]] = [
    b'{"id": "cut", "text": ',
    {"id": "empty", "note": "no prompt"},
    {"id": "cold", "text": "a", "temperature": -1, "note": [1, None]},
]

Events = dict[tuple[int, int, int], list[dict[str, Any]]]


@dataclass(frozen=True)
class EveryRow:
    """The job and the results of an uninterrupted run."""

    folder: Path
    arguments: list[Any]
    """Command line without `-o` and `--events`."""
    processor: list[str]
    table: pa.Table
    states: pa.Table
    events: Events
    report: dict[str, Any]

    def command(self, out: Path | str = "out.parquet", events: str = "events.jsonl") -> list[Any]:
        return [*self.arguments, "--events", events, "-o", out]

    @property
    def seconds(self) -> float:
        """Time of the run without that of imports."""
        return float(sum(self.report["seconds"].values()))


def job_lines() -> list[bytes | dict[str, Any]]:
    rows: list[bytes | dict[str, Any]] = [{**row, "note": i} for i, row in enumerate(mixed_rows(ROWS, seed=6))]
    twins = [{"id": f"twin {i}", "text": "Twice", "temperature": 0, "max_new_tokens": 9, "note": "é"} for i in "ab"]
    return [*rows[:20], *INVALID, *rows[20:], *twins]


@pytest.fixture(scope="module")
def every(model: Path, tmp_path_factory: pytest.TempPathFactory) -> EveryRow:
    folder = tmp_path_factory.mktemp("every")
    source = write_lines(folder / "in.jsonl", job_lines())
    adapters = {name: save_adapter(model, folder / name, seed=i, **KINDS[name]) for i, name in enumerate(ADAPTERS)}
    named = [word for name, path in adapters.items() for word in ("--lora", f"{name}={path}")]
    processor = ["--logit-processor", f"{PROCESSOR}=tests.e2e.processors:boost"]
    options = ["--deterministic", "--dtype", "float32", "--include-prompt", "--carry", "note,absent"]
    arguments = ["run", source, "--model", model, *options, *named, *processor, "--report", "-"]
    report = run([*arguments, *STEPS, "--events", "events.jsonl", "-o", "whole.parquet"], folder).report
    states = pq.read_table(folder / "whole.hidden.parquet")
    events = events_of(folder / "events.jsonl")
    return EveryRow(folder, arguments, processor, read(folder / "whole.parquet"), states, events, report)


def events_of(path: Path) -> Events:
    """Events of each sample; a sample that was computed again writes all its events again, and the last ones count."""
    found: Events = defaultdict(list)
    for line in path.read_text().splitlines():
        event = json.loads(line)
        events = found[event["row_index"], event["prompt_index"], event["sample_index"]]
        if event.get("position") == 0 or (events and events[-1]["event"] == "finish"):
            events.clear()
        events.append(event)
    return dict(found)


def assert_equal(actual: pa.Table, expected: pa.Table, ignore: tuple[str, ...] = ()) -> None:
    """Assert that every column and row is exactly equal."""
    assert actual.schema.remove_metadata() == expected.schema.remove_metadata()
    found, wanted = (_outcomes(table) for table in (actual, expected))
    assert found - wanted == wanted - found == set(), "rows of one of the two"
    for name in set(expected.column_names) - set(ignore):
        assert actual[name].to_pylist() == expected[name].to_pylist(), name


def _outcomes(table: pa.Table) -> set[tuple[Any, ...]]:
    """What each row is, and its error."""
    names = ("row_index", "prompt_index", "sample_index", "status", "error")
    kept = [table[name].to_pylist() for name in names if name in table.column_names]
    return {(*row[:-1], str(row[-1])) for row in zip(*kept, strict=True)}


def assert_finished(job: EveryRow, out: Path) -> None:
    names = {path.name for path in out.parent.iterdir() if not path.name.startswith(".")}
    assert names == {out.name, "out.hidden.parquet", "events.jsonl"}
    assert_equal(read(out), job.table)
    assert_equal(pq.read_table(out.with_name("out.hidden.parquet")), job.states)
    assert events_of(out.with_name("events.jsonl")) == job.events


def committed(out: Path) -> list[dict[str, Any]]:
    """Rows of all parts; hidden states are committed before their rows."""
    for part in parts_of(out):
        count = int((pq.read_metadata(part).metadata or {}).get(b"batchgen.states", 0))
        assert states_part(part).exists() == (count > 0)
    rows = [row for part in parts_of(out) for row in pq.read_table(part).to_pylist()]
    assert len({*map(key, rows)}) == len(rows), "a row was committed twice"
    return rows


def key(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["row_index"], row["prompt_index"], row["sample_index"]


def sizes(out: Path) -> Mapping[str, tuple[int, int]]:
    """Name of each committed part -> its inode and time of last change."""
    return {part.name: (part.stat().st_ino, part.stat().st_mtime_ns) for part in parts_of(out)}


def generated(rows: list[dict[str, Any]]) -> int:
    return sum((row["completion_tokens"] or 0) + (row["dropped_tokens"] or 0) for row in rows)


def kill(job: EveryRow, out: Path, moment: float | Callable[[], bool]) -> bool:
    """Run the job in small steps, `kill -9` after some seconds or as soon as a condition holds; False: it had ended."""
    before = sizes(out)
    process = start([*job.command(), *STEPS], out.parent)
    while callable(moment) and process.alive and not moment():
        sleep(0.0005)
    killed = process.kill_after(0 if callable(moment) else moment)
    if out.exists():  # killed while it removed the work folder, or ended before
        assert_equal(read(out), job.table)
    else:
        assert sizes(out).items() >= before.items(), "a committed part was changed"
    return killed


def resume(job: EveryRow, out: Path) -> list[dict[str, Any]]:
    """Run a killed job to its end, check report and results, and return the rows committed before."""
    kept, finished = committed(out), out.exists()
    report = run(job.command(), out.parent).report
    assert_finished(job, out)
    assert report["already_done"] == finished
    if finished:
        return kept
    assert report["rows_resumed"] == len({row["row_index"] for row in kept})
    done = {*map(key, kept)}
    rest = [row for row in job.table.to_pylist() if key(row) not in done]
    # A copy is generated only if its original was committed before.
    own = [row for row in rest if row["dedup_of"] is None]
    copies = [row for row in rest if row["dedup_of"] in {row["row_index"] for row in kept}]
    least = generated(own) + generated([*{json.dumps(row["output_ids"]): row for row in copies}.values()])
    assert least <= report["engine"]["sampled_tokens"] <= generated(own) + generated(copies)
    return kept


def test_replicas_give_the_same_rows(every: EveryRow, tmp_path: Path) -> None:
    run(
        [*every.command(tmp_path / "out.parquet", str(tmp_path / "events.jsonl")), *STEPS, "--replicas", "2"],
        every.folder,
    )
    assert_finished(every, tmp_path / "out.parquet")


def test_the_job_has_every_kind_of_row(every: EveryRow) -> None:
    table = every.table
    assert {"ok", "error"} == set(table["status"].to_pylist())
    assert table["note"].type == table["absent"].type == pa.string()
    filled = ["output_top_ids", "input_logprobs", "output_ids_logprobs", "scores", "constraint_ok", "dropped_tokens"]
    for name in [*filled, "min_new_tokens_unmet", "prompt", "note"]:
        assert table[name].null_count < len(table), name
    assert {2} <= set(table["sample_index"].to_pylist())
    assert table["dedup_of"].null_count < len(table)
    assert len(every.states) > 20
    assert len(every.events) > 5


def test_a_job_killed_in_every_phase_equals_one_that_was_not(every: EveryRow, tmp_path: Path) -> None:
    """`kill -9` while rows are read, while they are generated, and while the output is written."""
    out, work = tmp_path / "out.parquet", tmp_path / "out.parquet.work"
    assert kill(every, out, (work / "tokenized" / "texts").exists)
    assert kill(every, out, lambda: len(parts_of(out)) >= 2)
    kill(every, out, (work / "scratch" / "states.parquet").exists)
    resume(every, out)


def test_committed_rows_are_not_computed_again(every: EveryRow, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert kill(every, out, lambda: sum(pq.read_metadata(part).num_rows for part in parts_of(out)) >= 60)
    assert not out.exists()
    assert 60 <= len(resume(every, out)) < len(every.table)


def killed_until_done(job: EveryRow, folder: Path, rng: Random) -> int:
    """Run the job with at most four kills at random moments, then to its end; return the number of kills."""
    out = folder / "out.parquet"
    hits = 0
    for _ in range(rng.choice([1, 1, 2, 4])):
        if out.exists() or not kill(job, out, rng.uniform(0.1, job.seconds)):
            break
        hits += 1
    resume(job, out)
    return hits


@pytest.mark.parametrize("seed", range(3))
def test_jobs_killed_at_random_moments(every: EveryRow, tmp_path: Path, seed: int) -> None:
    killed_until_done(every, tmp_path, Random(seed))


@pytest.mark.slow
def test_twenty_kills_at_random_moments(every: EveryRow, tmp_path: Path) -> None:
    rng = Random(20)
    hits = trial = 0
    while hits < 20:
        folder = tmp_path / str(trial)
        folder.mkdir()
        hits += killed_until_done(every, folder, rng)
        shutil.rmtree(folder)
        trial += 1
        assert trial < 60, "the kills come too late to hit"


def test_merged_shards_equal_one_run(every: EveryRow, tmp_path: Path) -> None:
    for index in (2, 0, 1):
        run([*every.command("shards", f"{index}.jsonl"), "--shard", f"{index}/3"], tmp_path)
    names = [f"part-{i:05d}-of-00003.parquet" for i in range(3)]
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == names
    assert sorted(path.name for path in (tmp_path / "shards.hidden.parquet").iterdir()) == names
    assert not (tmp_path / "shards.work").exists()
    for index, name in enumerate(names):
        assert {row % 3 for row in read(tmp_path / "shards" / name)["row_index"].to_pylist()} == {index}
    run(["merge", "shards", "-o", "out.parquet"], tmp_path)
    assert_equal(read(tmp_path / "out.parquet"), every.table, ignore=("cached_tokens", "dedup_of"))
    assert_equal(pq.read_table(tmp_path / "out.hidden.parquet"), every.states)


def test_results_are_equal_in_other_batches(every: EveryRow, tmp_path: Path) -> None:
    """Small steps and pages. tests/engine/test_deterministic.py covers preempted rows."""
    run([*every.command(), "--max-num-seqs", "7", "--max-tokens-per-step", "31", "--page-size", "8"], tmp_path)
    assert_finished(every, tmp_path / "out.parquet")


def test_verify_finds_rows_the_same(every: EveryRow) -> None:
    """A replay does not write to the run's events."""
    assert b'"deterministic": true' in pq.read_metadata(every.folder / "whole.parquet").metadata[b"batchgen.run"]
    before = (every.folder / "events.jsonl").read_bytes()
    result = run(["verify", "whole.parquet", "--rows", "40", *every.processor], every.folder).stdout
    assert result.endswith("40 of 40 rows are the same\n")
    assert (every.folder / "events.jsonl").read_bytes() == before
