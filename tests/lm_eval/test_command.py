"""The harness's command with batchgen: the page's transcript, the entry point, mistakes, and lm-eval missing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from batchgen.cli.help import page_path
from batchgen.demo import model_path
from tests.cases import each
from tests.docs.command_server import PYTHON
from tests.docs.snippets import run_snippet, snippets_of

ROOT = Path(__file__).parents[2]


def environment(folder: Path, *paths: Path) -> dict[str, str]:
    names = [str(path) for path in (*paths, ROOT)]
    own = {"PYTHONPATH": os.pathsep.join(names), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return {**os.environ, **own, "HF_HOME": str(folder / "home"), "COLUMNS": "200"}


def command(folder: Path, *arguments: str, paths: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "batchgen.lm_eval", *arguments]
    return subprocess.run(
        words, cwd=folder, env=environment(folder, *paths), capture_output=True, text=True, timeout=300, check=False
    )


def test_without_the_harness_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text("raise ImportError('no harness here')", encoding="utf-8")
    done = command(tmp_path, "--model", "batchgen", paths=(tmp_path,))
    expected = "error: lm-eval is not installed, or too old (no harness here): pip install 'batchgen[lm-eval]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


@pytest.mark.slow
def test_the_page_of_evaluation_runs(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", minversion="0.4.13")
    (tmp_path / "Qwen3-0.6B").symlink_to(model_path())
    (tmp_path / PYTHON).write_text(f'#!/bin/sh\nexec {sys.executable} -c "$1"\n', encoding="utf-8")
    (tmp_path / PYTHON).chmod(0o755)
    values = environment(tmp_path)
    values["PATH"] = f"{tmp_path}:{values['PATH']}"
    run = [one for one in snippets_of(page_path("evaluation")) if one.options.get("needs") != "network"]
    assert {one.language for one in run} >= {"console", "python"}
    for snippet in run:
        run_snippet(replace(snippet, words=tuple(w for w in snippet.words if "=" not in w)), tmp_path, values)


@pytest.mark.slow
def test_mistakes_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", minversion="0.4.13")
    for name in ("sums.jsonl", "sums.yaml"):
        text = next(one.text for one in snippets_of(page_path("evaluation")) if one.file == name)
        (tmp_path / name).write_text(text, encoding="utf-8")
    arguments = ["--model", "batchgen", "--model_args", f"pretrained={model_path()},max_batch=3"]
    done = command(tmp_path, *arguments, "--include_path", ".", "--tasks", "sums")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: `max_batch` is not an argument of Engine")


@pytest.mark.slow
@each(
    "options, problem",
    [
        ({"pretrained": "./absent"}, "absent"),
        ({"trust_remote_code": True}, "does not run code of a checkpoint"),
        ({"max_length": 100_000}, "the model's context is"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"enable_thinking": True}, "needs `think_end_token`"),
        ({"dtype": "int3"}, "`dtype`"),
        ({"peft": "./absent"}, "absent"),
    ],
)
def test_each_mistake_has_a_reason(options: dict[str, Any], problem: str) -> None:
    pytest.importorskip("lm_eval", minversion="0.4.13")
    from batchgen.errors import UsageError
    from batchgen.lm_eval.model import BatchgenLM

    with pytest.raises(UsageError) as raised:
        BatchgenLM(**{"pretrained": str(model_path()), **options})
    assert problem in str(raised.value)
    assert isinstance(raised.value, SystemExit), "the harness's command prints its message alone"


def test_the_entry_point_is_the_model() -> None:
    """As versions of the harness after 0.4.13 find it; the registry of 0.4.13 loads entry points, too."""
    pytest.importorskip("lm_eval", minversion="0.4.13")
    import tomllib

    from lm_eval.api.registry import get_model, model_registry

    from batchgen.lm_eval.model import BatchgenLM, register

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, value in project["entry-points"]["lm_eval.models"].items():
        model_registry.register(name, target=EntryPoint(name, value, "lm_eval.models"))
    register()
    assert get_model("batchgen") is BatchgenLM
