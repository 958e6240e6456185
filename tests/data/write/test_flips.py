"""Flipped bits and cuts, anywhere in any file of a job: never a wrong row, never a lost one, never a dead end."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.data.files import FileSystem
from batchgen.data.out.file_check import check_files
from batchgen.data.out.finish import finish
from batchgen.data.out.view import open_results
from batchgen.data.row_shapes import RowShapes
from batchgen.data.schema import OutputRow
from batchgen.data.store.committed import Committed
from batchgen.data.store.parts import PartWriter
from batchgen.data.store.work_folder import WorkFolder, output_paths
from batchgen.data.store.work_owner import open_work
from batchgen.errors import InputError, OutputError
from batchgen.request.completion import StateBlock
from tests.data.helpers import IDENTITY, begin, expect, failed, group

ROWS = 9
KEYS = [(row, 0, 1 + row % 2) for row in range(ROWS)]
SAMPLED, ALL = 10, 2500
"""Flips in each file: in every run of the tests, and in a slow one."""
FILES = ["parts/part-000000.parquet", "parts/part-000001.parquet", "states/part-000001.states", "run.json"]
COUNTS = pytest.mark.parametrize(
    "count", [SAMPLED, pytest.param(ALL, marks=pytest.mark.slow)], ids=["sampled", "thorough"]
)


@pytest.fixture(autouse=True)
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing loses power here, and thousands of syncs take time."""
    monkeypatch.setattr(FileSystem, "fsync", lambda *_: None)
    monkeypatch.setattr(FileSystem, "sync_folder", lambda *_: None)


def rows_of(row: int) -> list[OutputRow]:
    """The rows of one prompt: a failed one, and others of which some have hidden states."""
    if row == 4:
        return [failed(row)]
    rows = group(row, samples=1 + row % 2, size=30)
    if row % 3:
        return rows
    block = StateBlock(-1, "last", 0, np.full((1, 8), row, np.float32), "float32")
    return [replace(each, completion=replace(each.completion, states=(block,))) for each in rows]


def compute(work: WorkFolder) -> None:
    """Commit what is missing, in parts of three prompts."""
    committed = Committed.read(work)
    missing = [row for row in range(ROWS) if (row, 0) not in committed]
    with PartWriter(work) as writer:
        for number, row in enumerate(missing, 1):
            writer.add(rows_of(row))
            if number % 3 == 0:
                writer.flush()


def end(work: WorkFolder) -> None:
    shapes = RowShapes()
    for row in range(ROWS):
        shapes.add(row)
    record = {"created": 5, "row_shapes": shapes.encode(), "input_rows": ROWS, "rows_skipped": 0}
    finish(work, expect(KEYS), record)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all rows of a job committed."""
    folder = tmp_path_factory.mktemp("committed")
    with begin(folder / "r.parquet", model="m") as work:
        compute(work)
    return folder


@pytest.fixture(scope="module")
def done(committed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished output of the job."""
    folder = shutil.copytree(committed, tmp_path_factory.mktemp("done") / "job")
    with begin(folder / "r.parquet", model="m") as work:
        end(work)
    return folder


def damaged(data: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Single-bit flips at random places, half of them in the last kilobytes, and some cuts."""
    rng = random.Random(seed)
    for number in range(count):
        at = rng.randrange(len(data)) if number % 2 else rng.randrange(max(0, len(data) - 9000), len(data))
        bit = rng.randrange(8)
        yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    for number in range(count // 10):
        cut = rng.randrange(len(data)) if number % 2 else len(data) - 1 - number
        yield f"cut at {cut}", data[: max(0, cut)]


def content(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "r.parquet").read_bytes(), (folder / "r.hidden.parquet").read_bytes()


def each_damage(source: Path, tmp_path: Path, name: str, count: int, use: Callable[[Path, bytes], None]) -> None:
    """Call `use` with a copy of a job in which one file has other bytes, for each kind of damage."""
    whole = (source / name).read_bytes()
    for what, data in damaged(whole, count, seed=len(name)):
        folder = shutil.copytree(source, tmp_path / "job")
        (folder / name).write_bytes(data)
        try:
            use(folder, data)
        except BaseException as error:
            error.add_note(f"{name}: {what}")
            raise
        shutil.rmtree(folder)


def check_kept(folder: Path, name: str, data: bytes) -> None:
    """What was damaged is kept, byte for byte, unless it was read as it had been written."""
    kept = [path.read_bytes() for path in (folder / "r.parquet.damaged").rglob("*.damaged*")]
    assert data in kept or name == "run.json", "set aside, not deleted"


@COUNTS
@pytest.mark.parametrize("name", FILES)
def test_damage_before_a_resume(committed: Path, done: Path, tmp_path: Path, name: str, count: int) -> None:
    def resume(folder: Path, data: bytes) -> None:
        with begin(folder / "r.parquet", model="m") as work:
            compute(work)
            end(work)
        assert content(folder) == content(done)
        check_kept(folder, name, data)

    each_damage(committed, tmp_path, f"r.parquet.work/{name}", count, resume)


@COUNTS
@pytest.mark.parametrize("name", FILES)
def test_damage_between_the_resume_and_the_end(
    committed: Path, done: Path, tmp_path: Path, name: str, count: int
) -> None:
    whole = (committed / "r.parquet.work" / name).read_bytes()

    def finish_twice(folder: Path, data: bytes) -> None:
        path = folder / "r.parquet.work" / name
        path.write_bytes(whole)
        with begin(folder / "r.parquet", model="m") as work:
            compute(work)
            path.write_bytes(data)
            refused = False
            try:
                end(work)
            except OutputError as error:
                refused = "Run the same command again" in str(error)
            assert refused != (folder / "r.parquet").exists()
        if refused:
            with begin(folder / "r.parquet", model="m") as work:
                compute(work)
                end(work)
            check_kept(folder, name, data)
        assert content(folder) == content(done)

    each_damage(committed, tmp_path, f"r.parquet.work/{name}", count, finish_twice)


@COUNTS
@pytest.mark.parametrize("name", ["r.parquet", "r.hidden.parquet"])
def test_damage_of_a_finished_file(done: Path, tmp_path: Path, name: str, count: int) -> None:
    """Readers name it, `verify --file` finds it, and the same command computes the job again."""
    rows = [*open_results(done / "r.parquet").rows()]
    assert not any(finding.problems for finding in check_files(done / "r.parquet"))

    def read(folder: Path, data: bytes) -> None:
        out = folder / "r.parquet"
        found, message = rows, f"{out} is"
        try:
            found = [*open_results(out).rows()]
        except InputError as error:
            message = str(error)
        assert found == rows
        assert f"{out} is" in message
        assert any(finding.problems for finding in check_files(out)), "every byte is checked"
        if name == "r.parquet" and b"batchgen" not in data:  # too short to be known as batchgen's
            with pytest.raises(OutputError, match="Move it away, or name another output"):
                begin(out, model="m")
        elif name == "r.parquet":
            with begin(out, model="m") as work:
                compute(work)
                end(work)
            assert content(folder) == content(done)
            check_kept(folder, name, data)

    each_damage(done, tmp_path, name, count, read)


def test_a_finished_file_without_damage_is_left_alone(done: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(done, tmp_path / "job")
    before: Any = (folder / "r.parquet").stat()
    assert open_work(output_paths(folder / "r.parquet"), IDENTITY, {"model": "m"}) is None
    assert (folder / "r.parquet").stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(path.name for path in folder.iterdir()) == ["r.hidden.parquet", "r.parquet"]
