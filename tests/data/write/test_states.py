"""Hidden states: committed before their rows, complete after any interruption, and in key order."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.data import states_result as result_module
from batchgen.data.out.finish import finish
from batchgen.data.out.merge import merge
from batchgen.data.out.view import open_results
from batchgen.data.results_file import DamagedFile, read_footer
from batchgen.data.row_shapes import RowShapes
from batchgen.data.schema import STATES_CONTENTS, OutputRow
from batchgen.data.states import StateRecord, read_index, read_record, states_part, write_states_part
from batchgen.data.states_result import STATES_SCHEMA, write_states_result
from batchgen.data.store.committed import Committed
from batchgen.data.store.parts import PartWriter
from batchgen.data.store.work_folder import RunIdentity, WorkFolder, output_paths
from batchgen.data.store.work_owner import open_work
from batchgen.errors import FingerprintError, InputError, OutputError
from batchgen.request.completion import StateBlock
from tests.data.helpers import IDENTITY, begin, expect, failed, group, stored_keys

LAYERS = (-1, 0, 3)


def values(key: tuple[int, int, int], layer: int, rows: int = 3, width: int = 8) -> np.ndarray:
    """States determined by their key; those of odd rows are exact in bfloat16."""
    found = np.random.default_rng([*key, layer + 1]).standard_normal((rows, width)).astype(np.float32)
    return (found.view(np.uint32) & 0xFFFF0000).view(np.float32) if key[0] % 2 else found


def block(key: tuple[int, int, int], layer: int, **shape: int) -> StateBlock:
    return StateBlock(layer, "all", 2, values(key, layer, **shape), "bfloat16" if key[0] % 2 else "float32")


def with_states(rows: Iterable[OutputRow], layers: tuple[int, ...] = LAYERS) -> list[OutputRow]:
    """Add states to the rows whose index is not a multiple of 3."""
    return [
        replace(row, completion=replace(row.completion, states=[block(row.completion.key, layer) for layer in layers]))
        if row.completion.row_index % 3
        else row
        for row in rows
    ]


KEYS = [(row, prompt, 1 + (row + prompt) % 2) for row in range(10) for prompt in range(1 + row % 2)]


def compute(work: WorkFolder, order: list[tuple[int, int, int]], limit: int | None = None) -> None:
    committed = Committed.read(work)
    missing = [key for key in order if key[:2] not in committed]
    with PartWriter(work, commit_every=4) as writer:
        for row, prompt, samples in missing[:limit]:
            writer.add(with_states(group(row, prompt, samples)))
            if (row + prompt) % 2:
                writer.flush()


def run(out: Path, identity: RunIdentity = IDENTITY, rows: Iterable[int] = range(10)) -> WorkFolder:
    keys = [key for key in KEYS if key[0] in set(rows)]
    random.Random(3).shuffle(keys)
    with begin(out, identity) as work:
        compute(work, keys)
        finish(work, expect(keys), run_record(rows))
        return work


def run_record(rows: Iterable[int] = range(10)) -> dict[str, Any]:
    """The run record that a job writes to the footer."""
    shapes = RowShapes()
    for row in rows:
        shapes.add(row)
    return {"model": "m", "created": 7, "row_shapes": shapes.encode()}


def table(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return rows


def hidden(out: Path) -> Path:
    return output_paths(out).states


def expected_keys() -> list[tuple[int, int, int, int]]:
    keys = [(row, prompt, i) for row, prompt, samples in KEYS for i in range(samples) if row % 3]
    return sorted((*key, layer) for key in keys for layer in LAYERS)


def test_the_finished_file(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    run(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.hidden.parquet", "r.parquet"]
    assert pq.read_schema(hidden(out)).remove_metadata() == STATES_SCHEMA
    rows = table(hidden(out))
    assert [(r["row_index"], r["prompt_index"], r["sample_index"], r["layer"]) for r in rows] == expected_keys()
    for row in rows:
        key = (row["row_index"], row["prompt_index"], row["sample_index"])
        assert row["shape"] == [3, 8]
        assert row["span"] == "all"
        assert row["token_start"] == 2
        assert row["id"] == f"id-{key[0]}"
        assert row["dtype"] == ("bfloat16" if key[0] % 2 else "float32")
        assert np.array_equal(np.array(row["values"], np.float32).reshape(3, 8), values(key, row["layer"]))
    footer = read_footer(hidden(out), STATES_CONTENTS)
    assert footer is not None
    assert footer["fingerprint"] == "f00d"
    assert footer["rows"] == len(rows)
    assert read_footer(hidden(out)) is None, "it is not read as results"
    assert (read_footer(out) or {})["states"] == len(rows)
    with pytest.raises(InputError, match="holds hidden states"):
        open_results(hidden(out))
    group = pq.ParquetFile(hidden(out)).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert "BYTE_STREAM_SPLIT" in columns["values.list.element"].encodings
    assert columns["values.list.element"].compression == "ZSTD"


def test_bfloat16_values_take_less_than_two_bytes_each(tmp_path: Path) -> None:
    states = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    states = (states.view(np.uint32) & 0xFFFF0000).view(np.float32)
    record = StateRecord((0, 0, 0), "a", StateBlock(1, "all", 0, states, "bfloat16"))
    part = tmp_path / "a.states"
    assert write_states_part(part, [record]) < 2 * states.size + 500
    write_states_result(tmp_path / "x.parquet", [part], {})
    assert (tmp_path / "x.parquet").stat().st_size < 1.8 * states.size


def test_four_readers_agree(tmp_path: Path) -> None:
    """pandas, polars, DuckDB and HF datasets."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    out = tmp_path / "r.parquet"
    run(out)
    path = str(hidden(out))
    frame = pd.read_parquet(path)
    readers = {
        "pandas": (frame["row_index"].tolist(), frame["layer"].tolist(), [list(v) for v in frame["values"]]),
        "polars": tuple(pl.read_parquet(path)[name].to_list() for name in ("row_index", "layer", "values")),
        "duckdb": tuple(zip(*duckdb.sql(f"SELECT row_index, layer, values FROM '{path}'").fetchall(), strict=True)),
    }
    data = Dataset.from_parquet(path, cache_dir=str(tmp_path / "cache"))
    readers["datasets"] = (data["row_index"], data["layer"], data["values"])
    rows = table(hidden(out))
    for name, (indexes, layers, lists) in readers.items():
        assert list(indexes) == [row["row_index"] for row in rows], name
        assert list(layers) == [row["layer"] for row in rows], name
        assert [list(v) for v in lists] == [row["values"] for row in rows], name


@pytest.mark.parametrize(
    ("dtype", "bits", "size"),
    [("bfloat16", 0xFFFF0000, 2), ("float16", 0xFFFFE000, 2), ("float32", 0xFFFFFFFF, 4), ("bfloat16", 0xFFFFFFFF, 4)],
)
def test_records_are_stored_exactly(tmp_path: Path, dtype: str, bits: int, size: int) -> None:
    """Also values that their dtype cannot represent."""
    states = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)
    states = (states.view(np.uint32) & np.uint32(bits)).view(np.float32)
    states[0, :4] = [np.inf, -np.inf, -0.0, np.nan]
    path = tmp_path / "part-000000.states"
    records = [
        StateRecord((1, 2, 3), "ключ \udce9", StateBlock(4, "prompt", 0, states, dtype)),
        StateRecord((1 << 40, 0, 0), "", StateBlock(-1, "output", 9, np.zeros((0, 7), np.float32), dtype)),
    ]
    assert write_states_part(path, records) == path.stat().st_size
    index = read_index(path)
    with path.open("rb") as stream:
        first, second = (read_record(stream, entry) for entry in index)
    assert first.key == (1, 2, 3)
    assert first.id == records[0].id
    assert (first.block.layer, first.block.span, first.block.token_start, first.block.dtype) == (4, "prompt", 0, dtype)
    assert np.array_equal(first.block.values.view(np.uint32), states.view(np.uint32))
    assert second.key == (1 << 40, 0, 0)
    assert second.block.values.shape == (0, 7)
    assert size * states.size <= int(index[0]["length"]) < size * states.size + 120


def test_damaged_parts_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "part-000000.states"
    write_states_part(path, [StateRecord((0, 0, 0), "a", block((0, 0, 0), 1))])
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(OSError, match="cut short"):
            read_index(path)
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    with pytest.raises(OSError, match="its index has a wrong checksum"):
        read_index(path)
    path.write_bytes(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
    with pytest.raises(DamagedFile, match="a record has a wrong checksum"):
        write_states_result(tmp_path / "x.parquet", [path], {})
    assert not (tmp_path / "x.parquet").exists()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    out = tmp_path_factory.mktemp("uninterrupted") / "r.parquet"
    run(out)
    return out.read_bytes(), hidden(out).read_bytes()


HARM = st.sampled_from(["", "no results part", "no states", "cut states", "tmp states", "zero index"])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(st.tuples(st.integers(0, 8), HARM, st.integers(0, 10**6)), max_size=4), seed=st.integers(0, 99))
def test_interruptions_do_not_change_the_output(
    tmp_path_factory: pytest.TempPathFactory,
    uninterrupted: tuple[bytes, bytes],
    steps: list[tuple[int, str, int]],
    seed: int,
) -> None:
    out = tmp_path_factory.mktemp("r") / "r.parquet"
    order = [*KEYS]
    random.Random(seed).shuffle(order)
    for limit, kind, place in steps:
        with begin(out) as work:
            compute(work, order, limit)
            damage(work, kind, place)
        assert not out.exists()
    with begin(out) as work:
        compute(work, order)
        finish(work, expect(KEYS), run_record())
    assert (out.read_bytes(), hidden(out).read_bytes()) == uninterrupted
    left = {path.name for path in out.parent.iterdir()} - {f"{out.name}.damaged"}
    assert left == {hidden(out).name, out.name}


def damage(work: WorkFolder, kind: str, place: int) -> None:
    parts = [part for part in work.part_files() if states_part(part).exists()]
    if not parts or not kind:
        return
    part = parts[place % len(parts)]
    states = states_part(part)
    if kind == "no results part":
        part.unlink()
    elif kind == "no states":
        states.unlink()
    elif kind == "cut states":
        states.write_bytes(states.read_bytes()[: place % states.stat().st_size])
    elif kind == "tmp states":
        states.with_name(states.name + ".tmp").write_bytes(b"x" * place)
    else:
        content = states.read_bytes()
        states.write_bytes(content[:-60] + bytes(32) + content[-28:])


def test_a_run_resumes_after_a_crash_between_the_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: tuple[bytes, bytes]
) -> None:
    out = tmp_path / "r.parquet"
    with begin(out) as work:
        compute(work, KEYS)
        with monkeypatch.context() as patch:
            patch.setattr("batchgen.data.out.finish.merge_sort", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                finish(work, expect(KEYS), run_record())
        assert [*tmp_path.iterdir()] == [output_paths(out).work], "neither is replaced unless both are complete"
        real = Path.replace

        def fail(self: Path, target: Path) -> Path:
            if target == out:
                raise KeyboardInterrupt
            return real(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fail)
            with pytest.raises(KeyboardInterrupt):
                finish(work, expect(KEYS), run_record())
    assert hidden(out).exists()
    assert not out.exists()
    with begin(out) as work:
        compute(work, KEYS)
        finish(work, expect(KEYS), run_record())
    assert (out.read_bytes(), hidden(out).read_bytes()) == uninterrupted


def test_shards_are_merged_with_their_states(tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    run(whole)
    out = tmp_path / "out.parquet"
    for i in (1, 0):
        run(out, RunIdentity("f00d", (i, 2)), [row for row in range(10) if row % 2 == i])
    names = ["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"]
    assert sorted(p.name for p in out.iterdir()) == names
    assert sorted(p.name for p in (tmp_path / "out.hidden.parquet").iterdir()) == names
    merged = tmp_path / "merged.parquet"
    merge([out], merged)
    assert stored_keys(merged) == stored_keys(whole)
    assert table(hidden(merged)) == table(hidden(whole))
    with pytest.raises(OutputError, match=r"merged\.parquet exists"):
        merge([out], merged)
    merged.unlink()
    with pytest.raises(OutputError, match=r"merged\.hidden\.parquet exists"):
        merge([out], merged)
    (tmp_path / "out.hidden.parquet" / names[1]).unlink()
    with pytest.raises(InputError, match="part-00001-of-00002"):
        merge([out], tmp_path / "again.parquet")


def test_states_of_another_shard_or_job_are_refused(tmp_path: Path) -> None:
    shards = [range(0, 10, 2), range(1, 10, 2)]
    for fingerprint, name in (("f00d", "out"), ("0ther", "other")):
        for i, rows in enumerate(shards):
            run(tmp_path / name, RunIdentity(fingerprint, (i, 2)), rows)
    run(tmp_path / "fewer", RunIdentity("f00d", (1, 2)), (1, 3))
    own = tmp_path / "out.hidden.parquet" / "part-00001-of-00002.parquet"
    kept = own.read_bytes()
    wrong: list[tuple[Path, type[Exception], str]] = [
        (tmp_path / "other.hidden.parquet" / own.name, FingerprintError, "does not contain the hidden states of"),
        (own.with_name("part-00000-of-00002.parquet"), FingerprintError, "does not contain the hidden states of"),
        (tmp_path / "fewer.hidden.parquet" / own.name, InputError, "hidden states, but .* was written with"),
        (tmp_path / "out" / own.name, InputError, "cannot be read"),
    ]
    for file, kind, message in wrong:
        own.write_bytes(file.read_bytes())
        with pytest.raises(kind, match=f"^{own} .*{message}"):
            merge([tmp_path / "out"], tmp_path / "merged.parquet")
        assert not (tmp_path / "merged.parquet").exists()
        assert not output_paths(tmp_path / "merged.parquet").work.exists()
    own.write_bytes(kept)
    merge([tmp_path / "out"], tmp_path / "merged.parquet")


def test_a_retry_keeps_the_states_of_good_rows(tmp_path: Path, uninterrupted: tuple[bytes, bytes]) -> None:
    out = tmp_path / "r.parquet"
    bad = KEYS[2]
    with begin(out) as work, PartWriter(work) as writer:
        for row, prompt, samples in KEYS:
            writer.add(
                [failed(row, prompt)] if (row, prompt, samples) == bad else with_states(group(row, prompt, samples))
            )
        writer.flush()
        finish(work, expect(KEYS), run_record())
    before = table(hidden(out))
    again = open_work(output_paths(out), IDENTITY, {}, retry_errors=True)
    assert again is not None
    with again as work:
        assert len(Committed.read(work, retry_errors=True)) == len(stored_keys(out)) - 1
        compute(work, KEYS)
        finish(work, expect(KEYS), run_record())
    assert (out.read_bytes(), hidden(out).read_bytes()) == uninterrupted
    assert len(table(hidden(out))) == len(before) + len(LAYERS) * bad[2] * bool(bad[0] % 3)


def test_results_without_their_states_are_not_complete(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    run(out)
    assert open_work(output_paths(out), IDENTITY, {}) is None
    hidden(out).unlink()
    with pytest.raises(OutputError, match=r"its hidden states .* are missing"):
        open_work(output_paths(out), IDENTITY, {})


def test_states_of_another_job_are_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    run(out, RunIdentity("other"))
    out.unlink()
    with pytest.raises(FingerprintError, match=r"r\.hidden\.parquet exists"):
        open_work(output_paths(out), IDENTITY, {})
    with begin(out, policy="overwrite") as work:
        with PartWriter(work) as writer:
            writer.add(group(0))
        finish(work, expect([(0, 0, 1)]), {})
    assert [*tmp_path.iterdir()] == [out], "a job without states leaves none of an earlier one"


def test_row_groups_and_open_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_module, "GROUP_BYTES", 5 * 110)
    monkeypatch.setattr(result_module, "_OPEN_FILES", 2)  # fewer than there are parts
    out = tmp_path / "r.parquet"
    run(out)
    metadata = pq.ParquetFile(hidden(out)).metadata
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert max(sizes) == 5
    assert sum(sizes) == len(expected_keys())
    assert result_module.GROUP_BYTES <= 8 << 20


def test_the_bytes_do_not_depend_on_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_module, "GROUP_BYTES", 2000)
    rng, parts = np.random.default_rng(2), [tmp_path / "a.states", tmp_path / "b.states"]
    keys = rng.permutation(60).tolist()
    for part, own in zip(parts, (keys[:23], keys[23:]), strict=True):
        blocks = [block((i, 0, 0), 1, rows=int(rng.integers(0, 30))) for i in own]
        write_states_part(part, [StateRecord((i, 0, 0), "a", each) for i, each in zip(own, blocks, strict=True)])
    written = []
    for threads in (1, 2, 5):
        write_states_result(path := tmp_path / f"{threads}.parquet", parts, {}, threads)
        written.append(path.read_bytes())
    assert written[0] == written[1] == written[2]
    assert pq.ParquetFile(path).metadata.num_row_groups > 5
    assert pq.read_table(path)["row_index"].to_pylist() == list(range(60))


def test_a_record_larger_than_a_group_is_a_separate_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_module, "GROUP_BYTES", 250)
    part = tmp_path / "a.states"
    sizes = (1, 9, 1, 1)
    write_states_part(part, [StateRecord((i, 0, 0), "a", block((i, 0, 0), 1, rows=n)) for i, n in enumerate(sizes)])
    write_states_result(tmp_path / "x.parquet", [part], {})
    metadata = pq.ParquetFile(tmp_path / "x.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [1, 1, 2]


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from batchgen.data.store.parts import PartWriter
from batchgen.data.out.finish import finish
from batchgen.data.schema import OutputRow
from batchgen.request.completion import Completion, StateBlock
from tests.data.helpers import begin, expect

rows = int(sys.argv[2])
states = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)  # 2 MiB
with begin(Path(sys.argv[1])) as work:
    with PartWriter(work) as writer:
        for row in np.random.default_rng(1).permutation(rows).tolist():
            block = StateBlock(-1, "all", 0, states + np.float32(row), "float32")
            writer.add([OutputRow(Completion(row, finish_reason="stop", states=[block]), "a")])
    finish(work, expect((row, 0, 1) for row in range(rows)), {})
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) >> 10)
"""


def test_open_files_are_bounded_over_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_module, "GROUP_BYTES", 4000)
    parts = [tmp_path / f"{i}.states" for i in range(90)]
    for i, part in enumerate(parts):
        write_states_part(part, [StateRecord((i + 90 * j, 0, 0), "a", block((i, 0, 0), 1)) for j in range(4)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(file.name) for file in Path("/dev/fd").iterdir()) + 80, hard))
    try:
        write_states_result(tmp_path / "x.parquet", parts, {}, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pq.read_table(tmp_path / "x.parquet")["row_index"].to_pylist() == list(range(360))


def test_memory_does_not_grow_with_the_states(tmp_path: Path) -> None:
    """416 MiB of states, in shuffled order, are committed and merged in the memory that 224 MiB need, which fill a part
    that is written and one that is buffered. A quarter of the difference is allowed.
    """

    def peak(rows: int) -> int:
        out = tmp_path / f"{rows}.parquet"
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(out), str(rows)], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    small, large = peak(112), peak(208)
    assert large < small + 50
