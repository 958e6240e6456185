"""`--prompt-template`: each format's rows are run as if the text, or the messages, had been written into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from tests.e2e.rows import write_lines
from tests.e2e.runner import run

ROWS = [
    {"uid": "a", "question": 'Say "hi"', "lang": "de", "text": "mine", "temperature": 0.5},
    {"uid": "b", "question": "Zwei\nZeilen", "lang": None, "text": None, "temperature": 0.0},
    {"uid": "c", "question": "[1, 2]", "lang": "fr", "text": "{x", "temperature": 0.0},
]
TEMPLATE = "{{ uid }}) {{ question }}{% if lang %} ({{ lang }}){% endif %}"
CHAT = """[{"role": "system", "content": {{ (lang or "any") | tojson }}},
{"role": "user", "content": {{ question | tojson }}}]"""
WORDS = ["--dtype", "float32", "--max-new-tokens", "3", "--id-column", "uid"]
COMPARED = ["id", "status", "text", "output_ids", "prompt_tokens", "request_hash"]


def save(folder: Path, form: str) -> Path:
    path = folder / f"in.{form}"
    if form == "jsonl":
        return write_lines(path, [{name: value for name, value in row.items() if value is not None} for row in ROWS])
    table = pa.Table.from_pylist(ROWS)
    pacsv.write_csv(table, path) if form == "csv" else pq.write_table(table, path)
    return path


def result(out: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(out, columns=COMPARED).to_pylist())


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_rows_equal_those_with_the_prompt_written_out(model: Path, tmp_path: Path, form: str) -> None:
    words = ["--model", model, *WORDS]
    texts = [f"{r['uid']}) {r['question']}" + (f" ({r['lang']})" if r["lang"] else "") for r in ROWS]
    written = [
        {"id": row["uid"], "text": text, "temperature": row["temperature"]}
        for row, text in zip(ROWS, texts, strict=True)
    ]
    expected = write_lines(tmp_path / "written.jsonl", written)
    run(["run", expected, "-o", "expected.parquet", "--model", model, *WORDS[:4]], tmp_path)
    (tmp_path / "template.txt").write_text(TEMPLATE + "\n")
    source = save(tmp_path, form)
    run(["run", source, "-o", "out.parquet", *words, "--prompt-template", "@template.txt"], tmp_path)
    assert result(tmp_path / "out.parquet") == result(tmp_path / "expected.parquet")
    (extra, *_) = pq.read_table(tmp_path / "out.parquet")["extra"].to_pylist()
    assert json.loads(extra) == {"question": ROWS[0]["question"], "lang": "de", "text": "mine"}


def test_messages_equal_those_written_out(model: Path, tmp_path: Path) -> None:
    words = ["--model", model, *WORDS[:4]]
    chats = [
        {
            "id": row["uid"],
            "messages": [
                {"role": "system", "content": row["lang"] or "any"},
                {"role": "user", "content": row["question"]},
            ],
            "temperature": row["temperature"],
        }
        for row in ROWS
    ]
    run(["run", write_lines(tmp_path / "w.jsonl", chats), "-o", "expected.parquet", *words], tmp_path)
    source = save(tmp_path, "parquet")
    run(["run", source, "-o", "out.parquet", "--model", model, *WORDS, "--prompt-template", CHAT], tmp_path)
    assert result(tmp_path / "out.parquet") == result(tmp_path / "expected.parquet")


def test_a_job_has_its_template_in_the_fingerprint_and_in_the_check(model: Path, tmp_path: Path) -> None:
    words = [save(tmp_path, "jsonl"), "--model", model, *WORDS]
    checked = run(["check", *words, "--prompt-template", TEMPLATE], tmp_path).stdout
    assert "reads lang, question, uid" in checked
    assert 'a) Say "hi" (de)' in checked
    run(["run", *words, "-o", "out.parquet", "--prompt-template", TEMPLATE], tmp_path)
    other = ["run", *words, "-o", "out.parquet", "--prompt-template", TEMPLATE.replace("(", "[")]
    assert "--prompt-template" in run(other, tmp_path, expect=2).stderr
    assert "1 of 3 rows are reused" in run([*other, "--resume-anyway"], tmp_path).stderr
    assert "3 of 3" in run(["verify", "out.parquet", "--rows", "3"], tmp_path).stdout


REFUSED = {
    "a misspelt field": (["--prompt-template", "{{ qestion }}"], "no field `qestion`, which --prompt-template names"),
    "no template": (["--prompt-template", "{{ question "], "is not a template"),
    "two prompts": (["--prompt-template", TEMPLATE, "--prompt-column", "question"], "leave one out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_of_no_use_is_refused_before_anything_is_written(model: Path, tmp_path: Path, case: str) -> None:
    options, problem = REFUSED[case]
    lines = run(["run", save(tmp_path, "jsonl"), "-o", "out.parquet", "--model", model, *options], tmp_path, expect=2)
    assert problem in lines.stderr
    assert not list(tmp_path.glob("out*"))


def test_a_null_that_is_printed_is_an_error_of_its_row(model: Path, tmp_path: Path) -> None:
    words = ["run", save(tmp_path, "parquet"), "-o", "out.parquet", "--model", model, *WORDS]
    run([*words, "--prompt-template", "{{ question }} {{ lang }}"], tmp_path)
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["status"] for row in table] == ["ok", "error", "ok"]
    assert [row["id"] for row in table] == ["a", "b", "c"]
    assert "row 2: `--prompt-template` failed: `lang` is null or missing" in table[1]["error"]["message"]
