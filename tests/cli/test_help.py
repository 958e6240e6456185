"""`batchgen help`: the list of topics and the pages, for people and for pipes."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.cli.app import run_command
from batchgen.cli.help import TOPICS, page_path

ROOT = Path(__file__).parents[2]


def test_topics_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"    {topic} " in listed for topic in TOPICS)


@pytest.mark.parametrize("topic", ["stops", "hidden-states"])
def test_a_pipe_gets_the_page_as_it_is(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help", topic]) == 0
    assert capsys.readouterr().out == page_path(topic).read_text(encoding="utf-8")


def test_an_unknown_topic_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help", "constraint"]) == 2
    assert "Did you mean `constraints`?" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [40, 200])
def test_a_terminal_gets_a_rendered_page(columns: int) -> None:
    """No marks of Markdown, no line wider than the terminal, and through the pager."""
    main, child = pty.openpty()
    environment = {**os.environ, "PAGER": "cat", "TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "batchgen", "help", "glossary"], cwd=ROOT, env=environment, stdout=child, stderr=child
    ) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                shown += os.read(main, 1 << 16)
            except OSError:  # the child has closed its end
                break
    os.close(main)
    assert process.returncode == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()
    assert any("Glossary" in line for line in lines)
    assert not any(line.startswith(("# ", "|---")) for line in lines)
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("llava", ["llava", "native", "image", "text, of `llama`"]),
        ("Qwen3-VL", ["qwen3_vl", "transformers", "image", "text, of `qwen3_vl_text`"]),
        ("mamba2", ["mamba2", "no", "it keeps a recurrent state in addition to keys and values"]),
    ],
)
def test_model_types_are_listed(name: str, row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["models", name]) == 0
    lines = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ["type", "runs"]
    assert row in lines


def test_a_model_type_that_no_library_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["models", "nothing-like-it"]) == 2
    assert "`nothing-like-it`" in capsys.readouterr().err
