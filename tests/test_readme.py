"""The README cannot rot: its reference is generated, its examples run, its commands are the ones CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.cli.reference import reference
from batchgen.demo import adapter_path, model_path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(after: str) -> str:
    """The first fenced block behind a marker."""
    block = re.search(r"```\w*\n(.*?)```", README[README.index(after) + len(after) :], re.DOTALL)
    assert block is not None
    return block[1]


def flattened(text: str) -> str:
    """Words alone: line breaks, usage lines and type notes differ between releases of the command-line library."""
    lines = [line for line in text.splitlines() if not line.startswith(("Usage:", "```"))]
    return " ".join(re.sub(r"<[^<>]*>", "", " ".join(lines)).split()).replace("- ", "-")


def test_the_reference_is_what_help_says() -> None:
    begin, end = "<!-- reference begins -->", "<!-- reference ends -->"
    assert flattened(README[README.index(begin) + len(begin) : README.index(end)]) == flattened(reference())


def test_ci_runs_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in script
    command = fenced("<!-- test -->").strip()
    assert command.count("\n") == 0
    assert " && OMP_NUM_THREADS=" in command  # where .ci/run parts set-up from tests
    assert "pytest" in command


def test_the_example_rows_run(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(fenced("## What a run does"), encoding="utf-8")
    command = [sys.executable, "-m", "batchgen", "run", "rows.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "rows.out.parquet")
    assert table["status"].to_pylist() == ["ok"] * 6
    assert table["id"].to_pylist() == ["sum", "story", "story", "story", "story", "b-1"]


def test_the_adapter_commands_run(tmp_path: Path) -> None:
    script = fenced("<!-- adapter -->").replace("batchgen/demo/adapter", str(adapter_path()))
    script = re.sub(r"^batchgen ", f"{sys.executable} -m batchgen ", script, flags=re.MULTILINE)
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "framed.parquet")["text"].to_pylist() == ['{"answer": "7+5=12, 1+2+1=4: 42"}']
    assert "42" in done.stdout


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = fenced("## Python").replace("./Qwen3-0.6B", str(model_path()))
    exec(compile(code, "README", "exec"), {})
    assert capsys.readouterr().out
