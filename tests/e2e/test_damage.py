"""Damage in the work folder or the output of a job: the same command says so, keeps the bytes, and ends the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rows import assert_same, prompts, read, write_lines
from tests.e2e.runner import interrupt, parts_of, run

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}


def command(folder: Path, model: Path) -> list[Any]:
    rows: list[Any] = [{"text": text, **GREEDY} for text in prompts(120, 6)]
    write_lines(folder / "in.jsonl", rows)
    return ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"]


def flip(path: Path, at: float = 0.5) -> bytes:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 8
    path.write_bytes(bytes(data))
    return bytes(data)


def test_a_job_with_damaged_work_ends_with_the_same_output(model: Path, tmp_path: Path) -> None:
    words = command(tmp_path, model)
    run([*words[:3], "whole.parquet", *words[4:]], tmp_path)
    interrupt(words, tmp_path, parts=4)
    parts = parts_of(tmp_path / "out.parquet")
    work = tmp_path / "out.parquet.work"
    damaged = [flip(path, at) for path, at in ((parts[0], 0.4), (parts[1], 0.999), (work / "run.json", 0.5))]
    flip(work / "tokenized" / "columns.npz")
    assert "damaged (" in run(["verify", "out.parquet.work", "--file"], tmp_path, expect=8).stdout
    assert "damaged parts are left out" in run(["show", "out.parquet", "--limit", "1"], tmp_path).stderr
    done = run([*words, "--report", "-"], tmp_path)
    for path in (*parts[:2], work / "run.json"):
        kept = f"out.parquet.damaged/{path.name}.damaged"
        assert f"{path.name} is damaged (" in done.stderr
        assert f"kept as {kept}" in done.stderr
    assert done.report["rows_resumed"] > 0
    assert sorted(path.read_bytes() for path in (tmp_path / "out.parquet.damaged").iterdir()) == sorted(damaged)
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "whole.parquet"))
    assert not work.exists()


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_a_damaged_output_is_computed_again(model: Path, tmp_path: Path, name: str) -> None:
    words = command(tmp_path, model)
    words[3] = name
    run(words, tmp_path)
    out = tmp_path / name
    whole = out.read_bytes()
    if name.endswith(".jsonl"):
        out.write_bytes(damaged := whole[:-20])
    else:
        damaged = flip(out)
    done = run(words, tmp_path)
    assert f"{name} is damaged (" in done.stderr
    assert (tmp_path / f"{name}.damaged" / f"{name}.damaged").read_bytes() == damaged
    if name.endswith(".jsonl"):
        assert out.read_bytes() == whole
    run(["verify", name, "--file"], tmp_path)
    assert "nothing to do" in run(words, tmp_path).stderr


def test_a_damaged_file_of_another_program_is_not_moved(model: Path, tmp_path: Path) -> None:
    words = command(tmp_path, model)
    (tmp_path / "out.parquet").write_bytes(b"PAR1 and something else")
    refused = run(words, tmp_path, expect=5).stderr
    assert "out.parquet exists and cannot be read as Parquet" in refused
    assert "Move it away, or name another output with -o" in refused
    assert (tmp_path / "out.parquet").read_bytes() == b"PAR1 and something else"


def test_damaged_hidden_states_are_computed_again_with_their_output(model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"text": "a", **GREEDY, "return_hidden_states": True}])
    words = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"]
    run(words, tmp_path)
    before = read(tmp_path / "out.parquet")
    damaged = flip(tmp_path / "out.hidden.parquet", 0.95)
    assert "out.hidden.parquet is damaged (" in run(words, tmp_path).stderr
    assert (tmp_path / "out.parquet.damaged" / "out.hidden.parquet.damaged").read_bytes() == damaged
    run(["verify", "out.parquet", "--file"], tmp_path)
    assert_same(read(tmp_path / "out.parquet"), before)


def test_joined_lines_of_several_jobs_do_not_count_as_damage(model: Path, tmp_path: Path) -> None:
    words = command(tmp_path, model)
    for name, tokens in (("a.jsonl", "2"), ("b.jsonl", "3")):
        write_lines(tmp_path / "in.jsonl", [{"text": "a", "temperature": 0}])
        run([*words[:3], name, *words[4:], "--max-new-tokens", tokens], tmp_path)
    joined = tmp_path / "all.jsonl"
    joined.write_bytes((tmp_path / "a.jsonl").read_bytes() + (tmp_path / "b.jsonl").read_bytes())
    before = joined.read_bytes()
    refused = run([*words[:3], "all.jsonl", *words[4:]], tmp_path, expect=5).stderr
    assert "all.jsonl holds lines of several jobs: line 2 is the first of another one" in refused
    assert joined.read_bytes() == before


@pytest.mark.parametrize("name", [".", "/"])
def test_a_folder_without_its_own_name_is_refused_in_words(tmp_path: Path, name: str) -> None:
    assert run(["verify", name, "--file"], tmp_path, expect=4).stderr.startswith("error: ")
