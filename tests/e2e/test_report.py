"""`batchgen report`: what its page holds of jobs that are finished, resumed, sharded, merged or not finished."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen.data.results_file import parquet_writer
from batchgen.data.schema import OutputRow, completions_to_table, with_footer
from batchgen.request.completion import Completion
from tests.data.remote.bucket import use
from tests.e2e.report_rows import HOSTILE, data_of, write_rows
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import interrupt, run

SIMPLE: list[bytes | dict[str, Any]] = [{"id": f"s{i}", "text": f"Once {i}", "max_new_tokens": 6} for i in range(24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """in.jsonl, out.parquet, run.json and out.html of rows of every kind."""
    folder = tmp_path_factory.mktemp("report")
    write_rows(folder / "in.jsonl")
    run(["run", "in.jsonl", "-o", "out.parquet", "--report", "run.json", "--max-errors", "100"], folder)
    assert "samples shown" in run(["report", "out.parquet"], folder).stderr
    return folder


def by_id(data: Any) -> dict[str, Any]:
    return {row["id"]: row for row in data["rows"]}


def test_the_figures_are_those_of_the_run(folder: Path) -> None:
    data, report = data_of(folder / "out.html"), json.loads((folder / "run.json").read_text())
    assert data["complete"] is True
    assert {name: report[name] for name in data["figures"]} == data["figures"]
    (timeline,) = data["timeline"]
    generated = report["completion_tokens"] - report["copied_tokens"] + report["dropped_tokens"]
    assert sum(timeline["output_tokens"]) == pytest.approx(generated, abs=0.5)
    assert sum(timeline["prompt_tokens"]) == pytest.approx(report["computed_prompt_tokens"], abs=0.5)
    assert 0 < timeline["end"] <= report["seconds"]["generating"] + 0.01
    assert 0 < max(timeline["kv_use_seconds"]) <= timeline["seconds"]
    assert {row for row, _ in timeline["slowest"]} <= {row["row"][0] for row in data["rows"] if "slow" in row["tags"]}


def test_every_kind_of_row_is_shown(folder: Path) -> None:
    data = data_of(folder / "out.html")
    shown = by_id(data)
    stored = rows_of(folder / "out.parquet")
    assert len(data["rows"]) == data["samples"] == len(stored)
    assert [row["row"] for row in data["rows"]] == [
        [row["row_index"], row["prompt_index"], row["sample_index"]] for row in stored
    ]
    assert shown["lp-0"]["prompt"] == [["", "The capital 0 is é"]]
    (logprobs,) = [row["output_logprobs"] for row in stored if row["id"] == "lp-0"]
    tokens = shown["lp-0"]["tokens"]
    assert "".join(text for text, _ in tokens).startswith(shown["lp-0"]["text"])
    assert min(logprob for _, logprob in tokens) == pytest.approx(min(logprobs), abs=1e-3)
    assert {"constraint failed", "length"} <= {*shown["unmet-0"]["tags"]}
    assert shown["call-0"]["calls"].startswith("add(a=")
    assert shown["call-0"]["prompt"] == [["user", "Add 0"]]
    assert shown["bad-0"]["tags"] == ["error", "invalid_field"]
    assert "`top_p` must be" in shown["bad-0"]["text"]
    assert '"top_p": 1.5' in shown["bad-0"]["prompt"][0][1]
    pictured = shown["picture-0000"]
    assert "[image]" in pictured["prompt"][0][1]
    assert data["pictures"][pictured["pictures"][0]].startswith("data:image/jpeg;base64,/9j/")
    environment = dict(data["environment"])
    assert environment["--max-errors"] == "100"
    assert environment["version"]
    assert environment["input"].startswith("in.jsonl (")


def test_hostile_texts_are_escaped(folder: Path) -> None:
    text = (folder / "out.html").read_text(encoding="utf-8")
    data = data_of(text)
    assert text.count("</script>") == 3
    assert "onerror=alert(1)>" not in text
    (found,) = [row for row in data["rows"] if row["id"].endswith("{{data}}0")]
    escaped = "</script><img src=x onerror=alert(1)><!-- \\u2028\\u2029\\x00\\x1b[31m \\u202etxet \u0627\u0644 {{data}}"
    assert found["prompt"] == [["user", escaped]]
    assert found["id"] == f"{escaped}0"
    assert not set("\u2028\u2029\0\x1b\u202e") & set(json.dumps(data, ensure_ascii=False))
    assert HOSTILE not in text


def test_the_same_output_gives_the_same_page(folder: Path) -> None:
    run(["report", "out.parquet", "-o", "again.html"], folder)
    assert (folder / "again.html").read_bytes() == (folder / "out.html").read_bytes()
    done = run(["report", "out.parquet", "-o", "-"], folder)
    assert done.stdout == (folder / "out.html").read_text(encoding="utf-8")


def test_what_exists_is_not_replaced(folder: Path) -> None:
    before = (folder / "out.html").read_bytes()
    assert "--overwrite" in run(["report", "out.parquet"], folder, expect=5).stderr
    assert (folder / "out.html").read_bytes() == before
    run(["report", "out.parquet", "--overwrite"], folder)
    for name in ("in.jsonl", "out.parquet"):
        assert "Name another file" in run(["report", "out.parquet", "-o", name, "--overwrite"], folder, expect=2).stderr


def test_a_missing_library_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    done = run(["report", "out.parquet", "-o", "none.html"], folder, expect=2)
    assert "pip install 'batchgen[report]'" in done.stderr
    assert not (folder / "none.html").exists()


def test_inputs_that_moved_or_changed(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", SIMPLE)
    run(["run", "in.jsonl", "-o", "out.parquet", "--include-prompt"], tmp_path)
    (tmp_path / "in.jsonl").rename(tmp_path / "moved.jsonl")
    assert "Prompts are not read from the input" in run(["report", "out.parquet"], tmp_path).stderr
    assert "Once 3" in by_id(data_of(tmp_path / "out.html"))["s3"]["prompt"][0][1]  # from the column
    assert "not read" not in run(["report", "out.parquet", "moved.jsonl", "--overwrite"], tmp_path).stderr
    write_lines(tmp_path / "moved.jsonl", SIMPLE[::-1])
    assert "has changed" in run(["report", "out.parquet", "moved.jsonl", "--overwrite"], tmp_path).stderr


def test_an_output_at_a_url(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch).objects["b/out.parquet"] = (folder / "out.parquet").read_bytes()
    run(["report", "s3://b/out.parquet", str(folder / "in.jsonl")], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]
    assert data_of(tmp_path / "out.html")["figures"] == data_of(folder / "out.html")["figures"]


def test_a_stopped_and_resumed_job(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", SIMPLE)
    interrupt(["run", "in.jsonl", "-o", "out.parquet"], tmp_path)
    assert data_of(run(["report", "out.parquet", "-o", "-"], tmp_path).stdout)["complete"] is False
    unfinished = data_of(run(["report", "out.parquet", "-o", "-"], tmp_path).stdout)
    assert 0 < unfinished["samples"] < len(SIMPLE)
    assert len(unfinished["timeline"]) == 1
    run(["run", "in.jsonl", "-o", "out.parquet"], tmp_path)
    data = data_of(run(["report", "out.parquet", "-o", "-"], tmp_path).stdout)
    assert len(data["timeline"]) == 2
    assert data["timeline"][0]["began"] == unfinished["timeline"][0]["began"]
    generated = sum(sum(each["output_tokens"]) for each in data["timeline"])
    assert generated > 0.9 * data["figures"]["completion_tokens"]


def test_shards_and_their_merge(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", SIMPLE)
    for shard in ("0/2", "1/2"):
        run(["run", "in.jsonl", "-o", "out", "--shard", shard], tmp_path)
    run(["merge", "out", "-o", "all.parquet"], tmp_path)
    pages = [data_of(run(["report", out, "-o", "-"], tmp_path).stdout) for out in ("out", "all.parquet")]
    assert sorted(pages[0]["rows"], key=lambda row: row["row"]) == pages[1]["rows"]
    assert pages[0]["figures"] == pages[1]["figures"]
    assert pages[1]["figures"]["rows"] == len(SIMPLE)
    assert len(pages[1]["timeline"]) == 2


def test_replicas_are_one_run(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", SIMPLE)
    options = ["--replicas", "2", "--device", "cpu", "--report", "-"]
    report = run(["run", "in.jsonl", "-o", "out.parquet", *options], tmp_path).report
    (timeline,) = data_of(run(["report", "out.parquet", "-o", "-"], tmp_path).stdout)["timeline"]
    assert sum(timeline["output_tokens"]) == pytest.approx(report["completion_tokens"], abs=0.5)
    assert sum(timeline["prompt_tokens"]) == pytest.approx(report["computed_prompt_tokens"], abs=0.5)
    assert len(timeline["slowest"]) == 12


def test_a_large_output_is_sampled(tmp_path: Path) -> None:
    table = completions_to_table(
        [
            OutputRow(
                Completion(row, finish_reason="stop", text=f"{row} {HOSTILE}" * 20, completion_tokens=row), f"r{row}"
            )
            for row in range(8000)
        ]
    )
    schema = with_footer({"fingerprint": "f", "inputs": []})
    with (tmp_path / "out.parquet").open("wb") as stream, parquet_writer(stream, schema) as writer:
        writer.write_table(table.cast(writer.schema))
    run(["report", "out.parquet"], tmp_path)
    assert (tmp_path / "out.html").stat().st_size < 5_000_000
    data = data_of(tmp_path / "out.html")
    assert data["samples"] == 8000
    assert 500 < len(data["rows"]) < 3000
    assert 7999 in {row["row"][0] for row in data["rows"] if "longest" in row["tags"]}
