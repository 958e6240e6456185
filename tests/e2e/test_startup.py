"""Modules that a run imports before its first token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

COMPILERS = {"triton", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
"""Compilers that are slow to import; `transformers` imports them with any model's configuration."""
OTHERS = {"xgrammar", "pandas.core.frame", "transformers.modeling_utils", "transformers.models.llama", "peft"}


def modules_after(folder: Path, rows: list[dict[str, object]], *options: str) -> set[str]:
    """Modules imported when the first row is done, by the demonstration model in a fresh interpreter."""
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (
        "import sys\nimport batchgen.engine.loop as loop\nfrom batchgen.cli.app import run_command\n"
        "modules = []\nrun = loop.Loop.run\n"
        "def first(self, *arguments):\n"
        "    for group in run(self, *arguments):\n"
        "        modules or modules.append(sorted(sys.modules))\n"
        "        yield group\n"
        "loop.Loop.run = first\n"
        "status = run_command(sys.argv[1:])\n"
        "print(*modules[0], sep='\\n')\nsys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", str(source), "-o", str(folder / "out.parquet"), *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_plain_rows_import_no_compiler_and_no_grammar_library(tmp_path: Path) -> None:
    rows = [{"text": "Reverse: a b c", "max_new_tokens": 3}, {"messages": [{"role": "user", "content": "Hello"}]}]
    modules = modules_after(tmp_path, [*rows], "--device", "cpu", "--attention", "torch", "--max-new-tokens", "4")
    assert {"torch", "batchgen.engine.loop"} <= modules
    assert not (COMPILERS | OTHERS) & modules


def test_constrained_rows_import_only_the_grammar_library(tmp_path: Path) -> None:
    rows = [{"text": "Pick:", "choice": ["yes", "no"], "max_new_tokens": 4}]
    modules = modules_after(tmp_path, [*rows], "--device", "cpu", "--attention", "torch")
    assert "xgrammar" in modules
    assert "transformers.modeling_utils" not in modules
