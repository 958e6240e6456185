"""Modules that a run imports before its first token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.rows import write_lines

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
