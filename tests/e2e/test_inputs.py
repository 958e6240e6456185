"""Every input format with the same rows; the selection of rows; the columns of ids and prompts."""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.rows import assert_same, by_id, prompts, read, rows_of, write_lines
from tests.e2e.runner import run

OPTIONS = ["--dtype", "float32", "--temperature", "0", "--max-new-tokens", "4"]
TEXTS = prompts(24, 11)


def arguments(model: Path, *inputs: object) -> list[Any]:
    return ["run", *inputs, "-o", "out.parquet", "--model", model, *OPTIONS]


@pytest.fixture(scope="module")
def lines() -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory, lines: bytes) -> pa.Table:
    folder = tmp_path_factory.mktemp("expected")
    (folder / "in.jsonl").write_bytes(lines)
    run(arguments(model, "in.jsonl"), folder)
    return read(folder / "out.parquet")


def test_standard_input(model: Path, tmp_path: Path, lines: bytes, expected: pa.Table) -> None:
    done = run([*arguments(model, "-"), "--report", "-"], tmp_path, stdin=lines)
    assert_same(read(tmp_path / "out.parquet"), expected)
    assert done.report["rows"] == len(TEXTS)
    run([*arguments(model, "-"), "--overwrite", "--max-time", "0"], tmp_path, expect=75, stdin=lines)
    run([*arguments(model, "-"), "--overwrite"], tmp_path, stdin=lines)
    assert_same(read(tmp_path / "out.parquet"), expected)
    refused = run(["run", "-", "--model", model], tmp_path, expect=2, stdin=lines)
    assert "name the result file with -o" in refused.stderr


def test_several_files_and_globs_are_one_input_in_order(
    model: Path, tmp_path: Path, lines: bytes, expected: pa.Table
) -> None:
    split = lines.splitlines(keepends=True)
    (tmp_path / "z.jsonl").write_bytes(b"".join(split[:7]))
    (tmp_path / "a1.jsonl.gz").write_bytes(gzip.compress(b"".join(split[7:15])))
    (tmp_path / "a2.jsonl").write_bytes(b"".join(split[15:]))
    run(arguments(model, "z.jsonl", "a*.jsonl*"), tmp_path)
    assert_same(read(tmp_path / "out.parquet"), expected)
    footer = json.loads(read(tmp_path / "out.parquet").schema.metadata[b"batchgen.run"])
    names = ["z.jsonl", "a1.jsonl.gz", "a2.jsonl"]
    assert [Path(item["path"]).name for item in footer["inputs"]] == names


def test_a_glob_does_not_read_the_jobs_own_output(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    states = pa.array([True, *[False] * 5])
    for name, part in (("a.parquet", TEXTS[:6]), ("b.parquet", TEXTS[6:12])):
        pq.write_table(pa.table({"text": part, "return_hidden_states": states}), folder / name)
    command = ["run", "data/**/*.parquet", "-o", "data/all.parquet", "--model", model, *OPTIONS]
    run([*command, "--max-time", "0"], tmp_path, expect=75)
    run(command, tmp_path)
    assert (folder / "all.hidden.parquet").is_file()
    before = read(folder / "all.parquet")
    footer = json.loads(before.schema.metadata[b"batchgen.run"])
    assert [item["path"] for item in footer["inputs"]] == ["data/a.parquet", "data/b.parquet"]
    assert run(command, tmp_path).stderr.strip().endswith("nothing to do")
    run([*command, "--overwrite"], tmp_path)
    assert_same(read(folder / "all.parquet"), before)
    checked = run(["check", *command[1:], "--json"], tmp_path).stdout
    assert json.loads(checked)["fingerprint"] == footer["fingerprint"]
    verified = run(["verify", "data/all.parquet", "data/*.parquet", "--model", model], tmp_path)
    assert verified.stdout.endswith("10 of 10 rows are the same\n")
    for name in ("data/all.hidden.parquet", "data/all.parquet.work/parts/part-000000.parquet"):
        refused = run(["run", name, *command[2:]], tmp_path, expect=2)
        assert f"{name} is a file of the job's own output" in refused.stderr


def test_a_glob_does_not_read_the_jobs_own_events_and_report(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "The quick", "stream": true, "max_new_tokens": 3}\n')
    command = ["run", "*.json*", "-o", "out.parquet", "--model", model, "--dtype", "float32"]
    command += ["--events", "events.jsonl", "--report", "report.json"]
    run(command, tmp_path)
    first = json.loads((tmp_path / "report.json").read_text())
    events = (tmp_path / "events.jsonl").read_bytes()
    assert (first["rows"], events.count(b"\n")) == (1, 4)
    assert run(command, tmp_path).stderr.strip().endswith("nothing to do")
    assert json.loads((tmp_path / "report.json").read_text())["fingerprint"] == first["fingerprint"]
    assert (tmp_path / "events.jsonl").read_bytes() == events
    run([*command, "--overwrite"], tmp_path)
    assert (tmp_path / "events.jsonl").read_bytes() == events
    run(["run", "--dry-run", *command[1:]], tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["fingerprint"] == first["fingerprint"]
    assert run(command, tmp_path).stderr.strip().endswith("nothing to do"), "the report of a dry run is ignored too"


def test_an_empty_input_gives_a_file_without_rows(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b"\n \n"))
    report = run([*arguments(model, "in.jsonl.gz"), "--report", "-"], tmp_path).report
    table = read(tmp_path / "out.parquet")
    assert len(table) == 0
    assert table.schema.names[:3] == ["id", "row_index", "prompt_index"]
    assert (report["rows"], report["rows_ok"], report["completion_tokens"]) == (0, 0, 0)
    assert run(arguments(model, "in.jsonl.gz"), tmp_path).stderr.strip().endswith("nothing to do")


def indexes(folder: Path) -> list[int]:
    return [row["row_index"] for row in rows_of(folder / "out.parquet")]


def test_a_selection_of_the_rows(model: Path, tmp_path: Path, lines: bytes, expected: pa.Table) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines)
    run([*arguments(model, "in.jsonl"), "--offset", "6", "--limit", "3"], tmp_path)
    assert indexes(tmp_path) == [6, 7, 8]
    ids = read(tmp_path / "out.parquet")["output_ids"].to_pylist()
    assert ids == [expected["output_ids"][i].as_py() for i in range(6, 9)], "the rows are those of the whole input"
    chosen = []
    for seed in ("1", "1", "2"):
        run([*arguments(model, "in.jsonl"), "--sample", "8", "--seed", seed, "--overwrite"], tmp_path)
        chosen.append(indexes(tmp_path))
    assert len(chosen[0]) == len(set(chosen[0])) == 8
    assert chosen[0] == sorted(chosen[0]) == chosen[1] != chosen[2]


@pytest.mark.field("id", "messages")
def test_named_columns(model: Path, tmp_path: Path) -> None:
    rows = [
        {"uid": 17, "question": "The quick", "text": "displaced", "lang": "en"},
        {"uid": "b", "question": [{"role": "user", "content": "Hello"}], "id": "not this"},
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    named = ["--prompt-column", "question", "--id-column", "uid", "--include-prompt"]
    run([*arguments(model, "in.jsonl"), *named], tmp_path)
    output = by_id(tmp_path / "out.parquet")
    assert output["17"]["prompt"] == "<s>The quick"
    assert output["b"]["prompt"] == "<s><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert json.loads(output["17"]["extra"]) == {"text": "displaced", "lang": "en"}
    assert json.loads(output["b"]["extra"]) == {"id": "not this"}


@pytest.mark.field("id")
@pytest.mark.parametrize(
    ("policy", "ids", "errors"),
    [
        ("error", ["a", "a", "b", "a-2", "a"], [None, "duplicate_id", None, None, "duplicate_id"]),
        ("suffix", ["a", "a-2", "b", "a-2-2", "a-3"], [None] * 5),
        ("allow", ["a", "a", "b", "a-2", "a"], [None] * 5),
    ],
)
def test_duplicate_ids(model: Path, tmp_path: Path, policy: str, ids: list[str], errors: list[str | None]) -> None:
    write_lines(tmp_path / "in.jsonl", [{"id": name, "text": "x"} for name in ("a", "a", "b", "a-2", "a")])
    run([*arguments(model, "in.jsonl"), "--on-duplicate-id", policy], tmp_path)
    output = rows_of(tmp_path / "out.parquet")
    assert [row["id"] for row in output] == ids
    assert [row["error"] and row["error"]["code"] for row in output] == errors


ANY_BYTES = pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
NOT_UTF_8 = os.fsdecode(b"caf\xe9")
"""A file name that is not UTF-8: Python decodes the byte 0xE9 as U+DCE9."""


@ANY_BYTES
def test_file_names_that_are_not_utf_8(model: Path, tmp_path: Path) -> None:
    """They are written as escapes, which JSON decodes to the same names."""
    source, out = f"{NOT_UTF_8} in.jsonl", f"{NOT_UTF_8}.parquet"
    write_lines(tmp_path / source, [{"id": "a", "text": "The quick"}, {"id": "b", "txt": "The quick"}, b"nothing"])
    alone = ["--attention", "torch", "--max-num-seqs", "1", "--report", f"{NOT_UTF_8}.json"]
    base = ["run", source, "-o", out, "--model", model, *OPTIONS, *alone]
    run([*base, "--max-time", "0"], tmp_path, expect=75)
    shown = run(["show", out, "--errors"], tmp_path).stdout
    assert r"caf\udce9 in.jsonl, line 2: " in shown
    run(base, tmp_path)
    assert json.loads((tmp_path / f"{NOT_UTF_8}.json").read_text())["output"] == out
    with (tmp_path / out).open("rb") as stream:
        file = pq.ParquetFile(stream)
        errors = [row["error"]["message"] for row in file.read().to_pylist()[1:]]
        footer = json.loads(file.metadata.metadata[b"batchgen.run"])
    assert [error.split(": ")[0] for error in errors] == [rf"caf\udce9 in.jsonl, line {line}" for line in (2, 3)]
    assert footer["inputs"][0]["path"] == source
    assert r"caf\udce9.parquet is complete" in run(base, tmp_path).stderr
    assert run(["verify", out], tmp_path).stdout.endswith("1 of 1 rows are the same\n")
    for shape in ("jsonl", "openai-batch"):
        run(["export", out, "--format", shape], tmp_path)
    checked = json.loads(run(["check", source, "--model", model, "--json"], tmp_path).stdout)
    assert checked["configuration"]["inputs"] == [source]


@ANY_BYTES
def test_slurm_shards_under_names_that_are_not_utf_8(
    model: Path, tmp_path: Path, lines: bytes, expected: pa.Table
) -> None:
    (tmp_path / f"{NOT_UTF_8}.jsonl").write_bytes(lines)
    for task in ("0", "1"):
        env = {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "0"}
        command = ["run", f"{NOT_UTF_8}.jsonl", "-o", NOT_UTF_8, "--model", model, *OPTIONS, "--shard", "auto"]
        run(command, tmp_path, env=env)
    parts = sorted((tmp_path / NOT_UTF_8).iterdir())
    assert [part.name for part in parts] == ["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"]
    for shard, part in enumerate(parts):
        with part.open("rb") as stream:
            assert pq.read_table(stream)["row_index"].to_pylist() == [*range(shard, 24, 2)]
    run(["merge", NOT_UTF_8, "-o", f"{NOT_UTF_8}.parquet"], tmp_path)
    (tmp_path / f"{NOT_UTF_8}.parquet").rename(tmp_path / "out.parquet")
    assert_same(read(tmp_path / "out.parquet"), expected, ignore=["cached_tokens", "dedup_of"])


@pytest.mark.parametrize("command", ["run", "check"])
def test_results_of_another_number_of_shards_are_named(model: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n' * 2)
    (tmp_path / "out").mkdir()
    job = [command, "in.jsonl", "-o", "out", "--model", model, *OPTIONS, "--shard", "auto"]
    array = {f"SLURM_ARRAY_TASK_{name}": value for name, value in (("ID", "2"), ("COUNT", "2"), ("MIN", "0"))}
    array = {**array, "SLURM_ARRAY_TASK_MAX": "3", "SLURM_ARRAY_TASK_STEP": "1"}
    assert "must be evenly spaced" in run(job, tmp_path, expect=2, env=array).stderr
    (tmp_path / "out/part-00000-of-00002.parquet").touch()
    array["SLURM_ARRAY_TASK_ID"] = "3"
    assert "another number of shards" not in run(job, tmp_path, env=array).stderr
    (tmp_path / "out/part-00003-of-00016.parquet").touch()
    assert (
        "results of another number of shards than 2: part-00003-of-00016.parquet."
        in run([*job, "--overwrite"], tmp_path, env=array).stderr
    )


def test_csv_files_run_resume_and_verify_like_others(model: Path, tmp_path: Path, expected: pa.Table) -> None:
    with gzip.open(tmp_path / "in.csv.gz", "wt", encoding="utf-8-sig", newline="") as stream:
        csv.writer(stream).writerows([["question", "note"], *([text, "a\nb"] for text in TEXTS)])
    base = [*arguments(model, "in.csv.gz"), "--prompt-column", "question", "--carry", "note"]
    run([*base, "--max-time", "0"], tmp_path, expect=75)
    run(base, tmp_path)
    table = read(tmp_path / "out.parquet")
    assert_same(table.drop_columns(["note"]), expected)
    assert table["note"].to_pylist() == ["a\nb"] * len(TEXTS)
    assert run(base, tmp_path).stderr.strip().endswith("nothing to do")
    assert run(["verify", "out.parquet", "--rows", "3"], tmp_path, expect=None).stdout.count("row ") >= 3
    for shard in ("0/2", "1/2"):
        run(["run", "in.csv.gz", "-o", "parts", "--shard", shard, *base[4:]], tmp_path)
    run(["merge", "parts", "-o", "all.parquet"], tmp_path)
    assert_same(read(tmp_path / "all.parquet").drop_columns(["note"]), expected, ignore=["cached_tokens", "dedup_of"])


def test_the_format_of_the_input_can_be_named(model: Path, tmp_path: Path, lines: bytes, expected: pa.Table) -> None:
    rows = [json.loads(line) for line in lines.splitlines()]
    (tmp_path / "rows.txt").write_bytes(lines)
    refused = run([*arguments(model, "rows.txt")], tmp_path, expect=3)
    assert "ambiguous_prompt" in refused.stderr
    assert "--input-format jsonl" in refused.stderr
    run([*arguments(model, "rows.txt"), "--input-format", "jsonl", "--overwrite"], tmp_path)
    assert_same(read(tmp_path / "out.parquet"), expected)
    assert run(["verify", "out.parquet", "--rows", "2"], tmp_path, expect=None).stdout.count("row ") >= 2
    run([*arguments(model, "-"), "--input-format", "json", "--overwrite"], tmp_path, stdin=json.dumps(rows).encode())
    assert_same(read(tmp_path / "out.parquet"), expected)


def test_a_folder_with_partitions_and_the_sources_of_rows(model: Path, tmp_path: Path) -> None:
    for lang, text in (("en", "The quick"), ("de", "Hallo")):
        folder = tmp_path / "data" / f"lang={lang}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"text": [text]}), folder / "part-0.parquet")
    (tmp_path / "data" / "_SUCCESS").touch()
    base = ["run", "data", "--model", model, *OPTIONS]
    run(base, tmp_path)
    extras = [json.loads(row["extra"]) for row in rows_of(tmp_path / "data.out.parquet")]
    assert extras == [{"lang": "de"}, {"lang": "en"}]
    run([*base, "--overwrite", "--carry", "lang", "--include-source"], tmp_path)
    table = read(tmp_path / "data.out.parquet")
    assert table["lang"].to_pylist() == ["de", "en"]
    assert table["source_file"].to_pylist() == ["data/lang=de/part-0.parquet", "data/lang=en/part-0.parquet"]
    assert table["source_line"].to_pylist() == [1, 1]
    run(["run", "-i", "data/lang=de", "--input-file", "data/lang=en", *base[2:], "-o", "two.parquet"], tmp_path)
    assert [json.loads(row["extra"]) for row in rows_of(tmp_path / "two.parquet")] == extras
    moved = tmp_path / "data" / "lang=de"
    moved.rename(tmp_path / "data" / "lang=fr")
    refused = run([*base, "--carry", "lang", "--include-source"], tmp_path, expect=2)
    assert "is not this job's output" in refused.stderr, "a folder's value is part of the job"


@pytest.mark.parametrize(
    "command",
    [
        ["run", "ftp://b/in.jsonl"],
        ["run", "-i", "abfss://datasets/a"],
        ["show", "https://b/out.parquet"],
        ["merge", "parts", "-o", "s3://b/all.parquet"],
        ["export", "ftp://b/out.parquet", "--format", "jsonl"],
        ["export", "out.parquet", "--format", "jsonl", "-o", "gs://b/x.jsonl"],
        ["run", "a.jsonl", "--model", "s3://b/model"],
        ["run", "a.jsonl", "--work-dir", "https://b/work"],
    ],
    ids=" ".join,
)
def test_paths_with_other_schemes_are_refused_by_every_command(tmp_path: Path, command: list[str]) -> None:
    refused = run(command, tmp_path, expect=2)
    assert "is not a local path" in refused.stderr
    assert not any(tmp_path.iterdir())
