"""No row makes the process grow by more than 1.5 GiB, measured with a model that computes nothing; other rows go on."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
GOOD = b'{"id":"good","text":"Hello","max_new_tokens":2}\n'


def line(head: str, unit: str, tail: str, size: int) -> bytes:
    """A line of at most `size` bytes: `unit` as often as it fits between `head` and `tail`."""
    units = (size - len((head + tail).encode()) - 1) // len(unit.encode())
    return head.encode() + (unit.encode() * units).removesuffix(b",") + tail.encode() + b"\n"


MESSAGE = '{"role":"user","content":"hello there my friend how are you"},'
TOOL = '{"type":"function","function":{"name":"f","description":"word word word word word"}},'
LINES: dict[str, tuple[float, str, str, str]] = {
    # kind: MiB, head, repeated, tail
    "text": (255, '{"text":"', "word ", '"}'),
    "text with one wide character": (255, '{"text":"\N{GRINNING FACE}', "word ", '"}'),
    "wide text": (255, '{"text":"', "東京", '"}'),
    "escapes": (255, '{"text":"', "\\u0000", '"}'),
    "text that ends too early": (255, '{"text":"', "word ", '",,}'),
    "conversation": (255, '{"messages":[{"role":"user","content":"', "word ", '"}]}'),
    "carried text": (255, '{"text":"a","max_new_tokens":1,"doc":"', "word ", '"}'),
    "stop": (255, '{"text":"a","stop":"', "word ", '"}'),
    "ids": (255, '{"input_ids":[', "1,", "]}"),
    "ids within the limit": (69, '{"input_ids":[', "1999,", "]}"),
    "lists": (255, '{"text":"a","x":[', "[],", "]}"),
    "lists within the limit": (12, '{"text":"a","max_new_tokens":1,"x":[', "[],", "]}"),
    "objects within the limit": (11, '{"text":"a","max_new_tokens":1,"x":[', '{"a":1},', "]}"),
    "numbers within the limit": (129, '{"text":"a","max_new_tokens":1,"x":[', "0.12345678,", "]}"),
    "messages within the limit": (49, '{"messages":[', MESSAGE, "]}"),
    "tools within the limit": (39, '{"messages":[{"role":"user","content":"hi"}],"tools":[', TOOL, "]}"),
    "prompts": (27, '{"text":[', '"ab",', "]}"),
}


def peak(folder: Path, model: Path, name: str) -> tuple[int, list[str]]:
    """(peak memory of a job over one file in bytes, status of each output row)"""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.e2e.instant import main; sys.exit(main())"
    words = ["run", name, "-o", "out.parquet", "--model", str(model), "--kv-memory", "64MiB", "--overwrite"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    statuses = pq.read_table(folder / "out.parquet", columns=["status"])["status"].to_pylist()
    return int(done.stdout.split()[-1]), statuses


@pytest.fixture(scope="module")
def empty(model: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Peak memory of a job of one short row."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "in.jsonl").write_bytes(GOOD)
    return peak(folder, model, "in.jsonl")[0]


def test_hostile_rows_of_some_megabytes(model: Path, tmp_path: Path) -> None:
    """A sample of the rows below, a sixteenth as large, in one file."""
    with (tmp_path / "in.jsonl").open("wb") as stream:
        for kind in ("text", "text with one wide character", "conversation", "lists within the limit", "prompts"):
            mebibytes, *parts = LINES[kind]
            stream.write(line(*parts, int(mebibytes * (1 << 16))))
        stream.write(GOOD)
    found, statuses = peak(tmp_path, model, "in.jsonl")
    assert statuses == ["error", "error", "error", "ok", "error", "ok"]
    assert found < 768 << 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", LINES)
def test_a_hostile_line_takes_less_than_the_limit(kind: str, empty: int, model: Path, tmp_path: Path) -> None:
    mebibytes, *parts = LINES[kind]
    (tmp_path / "in.jsonl").write_bytes(line(*parts, int(mebibytes * (1 << 20))) + GOOD)
    found, statuses = peak(tmp_path, model, "in.jsonl")
    assert statuses[-1] == "ok"
    assert found - empty < 3 << 29


def write_long_line(path: Path) -> None:
    with path.open("wb") as stream:
        stream.write(b'{"text":"')
        for _ in range(700):
            stream.write(b"a" * (1 << 20))
        stream.write(b'"}\n' + GOOD)


def write_bomb(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for _ in range(700):
            stream.write(b"a" * (1 << 20))
        stream.write(b"\n" + GOOD)


def write_cell(path: Path) -> None:
    table = pa.table({"text": ["word " * (40 << 20), "Hello"], "max_new_tokens": [2, 2]})
    pq.write_table(table, path, compression="zstd")


def write_row(path: Path) -> None:
    with path.open("w", newline="") as stream:
        stream.write("text,max_new_tokens\n")
        for _ in range(300):
            stream.write("words " * 170_000)
        stream.write(",2\nHello,2\n")


FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a line of 700 MiB": ("in.jsonl", write_long_line),
    "a line of 700 MiB in a small file": ("in.jsonl.gz", write_bomb),
    "a cell of 200 MiB": ("in.parquet", write_cell),
    "a row of 290 MiB": ("in.csv", write_row),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_a_hostile_file_takes_less_than_the_limit(kind: str, empty: int, model: Path, tmp_path: Path) -> None:
    name, write = FILES[kind]
    write(tmp_path / name)
    found, statuses = peak(tmp_path, model, name)
    assert (statuses[0], statuses[-1]) == ("error", "ok")
    assert found - empty < 3 << 29
