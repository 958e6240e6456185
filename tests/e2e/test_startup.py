"""What a run does before its first token: the modules that it imports, and the compiler that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.kernels.cpu.library import COMPILING, library_file, loaded, missing
from tests.e2e.rows import write_lines
from tests.e2e.runner import batchgen

ROOT = Path(__file__).parents[2]

COMPILERS = {"triton", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
"""Compilers that are slow to import; `transformers` imports them with any model's configuration."""
OTHERS = {"xgrammar", "pandas.core.frame", "transformers.modeling_utils", "transformers.models.llama", "peft"}


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
    assert not (COMPILERS | OTHERS) & plain
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
    env = os.environ | {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ["run", "in.jsonl", "--device", "cpu", "--progress", "json", "--report", "report.json"]
    phases, reports = [], []
    for _ in range(2):
        done = batchgen([*words, "--overwrite"], tmp_path, env=env)
        assert done.returncode == 0, done.stderr
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
