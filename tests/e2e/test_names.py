"""Names of outputs and inputs that few would choose: each works, or is refused before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.config.units import NAME_BYTES, SUFFIX_BYTES
from tests.e2e.runner import ended_before_torch, run

LONGEST = NAME_BYTES - SUFFIX_BYTES
ROWS: list[dict[str, Any]] = [
    {"text": "Hello", "max_new_tokens": 2, "return_hidden_states": True, "stream": True},
    {"text": "Hello", "n": 0},
]
QUICK = ["--dtype", "float32", "--attention", "torch"]


def name_of(size: int, suffix: str, letter: str = "x") -> str:
    return letter * ((size - len(suffix)) // len(letter.encode())) + suffix


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """As `rows_of`, also of a name that is not UTF-8."""
    with path.open("rb") as stream:
        rows: list[dict[str, Any]] = pq.read_table(stream).to_pylist()
    return rows


def test_the_longest_names_leave_room_for_all_that_are_made_of_them(folder: Path, model: Path) -> None:
    letter = "é"  # the limit is one of bytes
    output = name_of(LONGEST, ".parquet", letter)
    words = ["run", "in.jsonl", "--model", model, *QUICK, "-o", output, "--events", name_of(LONGEST, "", letter)]
    run([*words, "--max-time", "0"], folder, expect=75)
    run(words, folder)
    assert [row["status"] for row in read_rows(folder / output)] == ["ok", "error"]
    assert "is complete" in run(words, folder).stderr
    run(["export", output, "--format", "openai-batch", "-o", name_of(LONGEST, ".jsonl", letter)], folder)
    run(["run", "in.jsonl", "--model", model, *QUICK, "--events", "-", "-o", name_of(LONGEST, ".jsonl", "y")], folder)


def test_names_that_work(folder: Path, model: Path) -> None:
    for output in ("caf\udce9.parquet", "a\nb.parquet", "-x.parquet", "*?[.parquet", ".parquet", "new/../z.parquet"):
        run(["run", "in.jsonl", "--model", model, *QUICK, f"--output={output}", "--events", "-"], folder)
        assert [row["status"] for row in read_rows(folder / output)] == ["ok", "error"]
        run(["show", "--", output], folder)


def test_a_home_folder_is_found(folder: Path, model: Path) -> None:
    """As a shell does it, also where it does not: in files, and after `--output=`."""
    home = folder / "home"
    home.mkdir()
    (folder / "job.toml").write_text('report = "~/report.json"\n')
    words = ["run", "in.jsonl", "--model", model, *QUICK, "--config", "job.toml", "--output=~/x.parquet"]
    run([*words, "--events", "-"], folder, env={"HOME": str(home)})
    found = {path.name for path in home.iterdir()} - {".cache"}  # what this user's commands keep
    assert found == {"report.json", "x.hidden.parquet", "x.parquet"}
    assert not (folder / "~").exists()


def test_inputs_that_work(folder: Path, model: Path) -> None:
    for name in ("caf\udce9.jsonl", "a\nb.jsonl", "-x.jsonl", "~.jsonl"):
        (folder / name).write_text('{"text": "Hello", "max_new_tokens": 1}\n')
        run(["run", "--model", model, *QUICK, "--include-source", "--", name], folder)
        (row,) = read_rows(folder / f"{name.removesuffix('.jsonl')}.out.parquet")
        source = json.loads(row["extra"])["source_file"]
        assert source == name.encode("utf-8", "backslashreplace").decode()


OTHER = "names of files to write have at most"
LONG = "and a file has at most"
FOLDER = "is the name of a folder"


def test_names_that_are_refused_at_once(folder: Path) -> None:
    deep = "d/" * 2048 + "x.parquet"
    named = ["run", "in.jsonl"]
    cases: list[tuple[list[Any], str]] = [
        *(([*named, "-o", name_of(size, ".parquet")], OTHER) for size in (LONGEST + 1, 250, 251, 255)),
        *(([*named, "-o", name_of(size, ".jsonl")], OTHER) for size in (LONGEST + 1, 255)),
        ([*named, "-o", name_of(LONGEST + 4, ".parquet", "é")], OTHER),
        *(([*named, "-o", name_of(size, ".parquet")], LONG) for size in (256, 4000, 5000)),
        ([*named, "-o", deep], "a name of 4105 bytes, and a file has at most 4095"),
        ([*named, "-o", name_of(250, ""), "--shard", "0/2"], OTHER),
        *(([*named, "-o", name], FOLDER) for name in ("new/", "new//", "../")),
        *(([*named, option, name], text) for option in ("--report", "--events") for name, text in (
            ("x" * 300, LONG), ("x" * 240, OTHER), ("new/", FOLDER),
        )),
        *(([*named, option, "x" * 300], LONG) for option in ("--model", "--tokenizer", "--media-root", "--reuse")),
        ([*named, "--lora", f"a={'x' * 300}"], LONG),
        ([*named, "--config", "x" * 300], LONG),
        (["run", "x" * 300], LONG),
        (["check", deep], "a name of 4105 bytes"),
        (["run", name_of(255, ".jsonl")], "name is too long for that of an output: name one with -o results.parquet"),
        *(([command, "x" * 300], LONG) for command in ("show", "verify")),
        (["export", "x" * 300, "--format", "jsonl"], LONG),
        (["export", "a", "--format", "jsonl", "-o", "x" * 240], OTHER),
        (["export", "a", "--format", "jsonl", "-o", "f/"], FOLDER),
        *((["merge", "a", "-o", name], text) for name, text in (("x" * 240, OTHER), ("f/", FOLDER))),
        (["merge", "x" * 300, "-o", "y"], LONG),
    ]  # fmt: skip
    before = set(folder.iterdir())
    for (words, text), done in zip(cases, ended_before_torch([words for words, _ in cases], folder), strict=True):
        assert done.code == 2, f"{words}: {done.stderr}"
        assert text in done.stderr, words
        assert len(done.stderr) < 300, "a long name is cut"
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize("option", ["output", "report", "events", "model", "tokenizer", "media_root", "reuse", "lora"])
def test_a_name_with_a_nul_character_is_refused(folder: Path, option: str) -> None:
    value = '{a = "a\\u0000b"}' if option == "lora" else '"a\\u0000b"'
    (folder / "job.toml").write_text(f"{option} = {value}\n")
    stderr = run(["run", "in.jsonl", "--config", "job.toml"], folder, expect=2).stderr
    assert stderr == f"error: `{option} in job.toml` 'a\\x00b' contains a NUL character, which no file name has\n"
