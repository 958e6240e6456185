"""What a run does before its first token: the modules that it imports, and the compiler that it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.kernels.cpu.library import COMPILING, library_file, loaded, missing
from tests.e2e.rows import write_lines
from tests.e2e.runner import ended_before_torch, run, start

ROOT = Path(__file__).parents[2]

COMPILERS = {"triton", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
"""Compilers that are slow to import; `transformers` imports them with any model's configuration."""
OTHERS = {"xgrammar", "pandas.core.frame", "transformers", "huggingface_hub", "jinja2", "peft"}


CODE = """
import json, sys
import batchgen.engine.loop as loop
from batchgen.cli.app import run_command
found, run = [], loop.Loop.run

def first(self, *arguments):
    for i, group in enumerate(run(self, *arguments)):
        if not i:
            found.append(sorted(sys.modules))
        yield group

loop.Loop.run = first
for name in ("plain", "constrained"):
    words = ["run", f"{name}.jsonl", "--device", "cpu", "--attention", "torch", "--max-new-tokens", "4"]
    assert run_command(words) == 0
json.dump(found, sys.stdout)
"""
"""Prints the modules that are imported when the first row is done, of two runs of the demonstration model."""


def test_rows_import_no_compiler_and_only_constrained_rows_a_grammar_library(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    write_lines(tmp_path / "plain.jsonl", [{"text": "Reverse: a b c", "max_new_tokens": 3}, chat])
    write_lines(tmp_path / "constrained.jsonl", [{"text": "Pick:", "choice": ["yes", "no"]}])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    plain, constrained = map(set, json.loads(done.stdout))
    assert {"torch", "batchgen.engine.loop"} <= plain
    assert (COMPILERS | OTHERS) & plain == set()
    assert "xgrammar" in constrained
    assert "transformers.modeling_utils" not in constrained


COMPILER = f"""#!{sys.executable}
import shutil, sys
target = sys.argv[sys.argv.index("-o") + 1]
shutil.copy({{library!r}}, target) if "-shared" in sys.argv else open(target, "w").close()
"""
"""A compiler that takes no time: it links the library that is already built."""


@pytest.mark.skipif(not loaded(), reason=str(missing()))
def test_compiling_the_kernels_is_a_phase(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(library=str(library_file())))
    compiler.chmod(0o755)
    write_lines(tmp_path / "in.jsonl", [{"text": "Reverse: a b c", "max_new_tokens": 3}])
    env = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ["run", "in.jsonl", "--device", "cpu", "--progress", "json", "--report", "report.json"]
    phases, reports = [], []
    for _ in range(2):
        done = start([*words, "--overwrite"], tmp_path, env=env).wait()
        assert done.code == 0, done.stderr
        states = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"')]
        phases.append([state.get("phase", state.get("note")) for state in states])
        reports.append(json.loads((tmp_path / "report.json").read_text())["seconds"])
    first, second = phases
    assert first[:1] == second[:1] == ["starting"]
    at = first.index(COMPILING)
    assert first[at + 1 : at + 3] == ["compiling", "starting"]
    assert not {COMPILING, "compiling"} & {*second}
    assert "compiling" in reports[0]
    assert "compiling" not in reports[1]
    assert all(seconds >= 0 for seconds in reports[0].values())


@pytest.fixture
def job(model: Path, tmp_path: Path) -> list[str]:
    """A command with a model folder, a tokenizer folder and a logit processor, which a test may change."""
    for name in ("own", "tok"):
        shutil.copytree(model, tmp_path / name)
    (tmp_path / "mine.py").write_text("def calm(ids, logits):\n    return logits\n")
    write_lines(tmp_path / "in.jsonl", [{"text": "Reverse: a b c"}])
    words = f"run in.jsonl --model {tmp_path}/own --tokenizer tok --device cpu --attention torch --max-new-tokens 3"
    return [*words.split(), "--logit-processor", "calm=mine:calm"]


def test_a_finished_job_is_found_without_torch(job: list[str], tmp_path: Path) -> None:
    options = (
        "--report a.json",
        "-o out.jsonl",
        "-o out --shard 0/1",
        "-o b.parquet --reuse in.out.parquet",
        "-o c.parquet --retry-errors",
    )
    commands = [[*job, *words.split()] for words in options]
    for words in commands:
        run(words, tmp_path)
    for done in ended_before_torch(commands, tmp_path):
        assert (done.code, done.stderr.endswith(" is complete: 1 rows, nothing to do\n")) == (0, True), done.stderr
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["already_done"], report["rows_ok"]) == (True, 1)


CHANGES = {
    "generation_config.json": ("own/generation_config.json", lambda text: '{"temperature": 0.5, "do_sample": true}'),
    "template": ("tok/chat_template.jinja", lambda text: "{{ messages[0].content }}"),
    "processor": ("mine.py", lambda text: f"{text}\n# another"),
    "input": ("in.jsonl", lambda text: text.replace("a b", "b a")),
    "config": ("own/config.json", lambda text: f"{text} "),
    "output": ("in.out.parquet", None),
    "option": ("in.jsonl", lambda text: text),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_from_a_finished_job_is_noticed(job: list[str], tmp_path: Path, change: str) -> None:
    run(job, tmp_path)
    name, edited = CHANGES[change]
    file = tmp_path / name
    if edited is None:
        file.unlink()
    else:
        file.write_text(edited(file.read_text() if file.exists() else ""))
    done = run([*job, *(["--seed", "5"] if change == "option" else [])], tmp_path, expect=None)
    assert "nothing to do" not in done.stderr
    assert (done.code, "Changed" in done.stderr) == ((0, False) if change == "output" else (2, True)), done.stderr
