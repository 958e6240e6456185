"""Every kernel has a case and compiles for every chip, within the chip's registers and shared memory.

The compiler runs in a separate process, without the interpreter, through the command that also writes the committed
table (`compile.py`). It compiles the launchers' own specialisations. The tests in the interpreter check the results of
kernels, and the GPU checks their speed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen.kernels.chips import tuning_of
from tests.kernels.gpu.ptx import widest_load

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "batchgen" / "kernels" / "gpu"
TABLE = Path(__file__).parent / "resources.json"
CHIPS = ("sm_80", "sm_89", "sm_90")
SHARED = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448}
REGISTERS = 255
MOST_NEW = 200

MAY_SPILL = {"rope._rope_tables": 40}
"""Kernel -> most bytes of stack; 0 for others. Sine and cosine keep a table of pi there for large angles."""

MAY_SPILL_IN_FLOAT32 = {"deterministic_attention.deterministic_attention_kernel": 264}
"""The same for float32 operands, whose products do not use tensor cores: a dtype for tests, not for speed."""

MAY_SPILL_CONVERSIONS = 32
"""Most bytes of stack over keys and values in E4M3 on a chip without an instruction that converts them."""

MAY_USE_FLOAT64 = {"rope._rope_tables", "sampling._sample", "filtering._filter"}
"""Kernels with float64: the reduction of large angles, once per token and frequency; sums of masses."""

MULTIPLY = {
    "attention_kernel.attention_kernel",
    "deterministic_attention.deterministic_attention_kernel",
    "lora._shrink",
    "lora._expand",
    "moe._gate_up",
    "moe._down",
    "matmul._matmul",
    "quantized_matmul._product",
}
"""Kernels of matrix products, which run on tensor cores for 2-byte operands."""

LOADS_WIDE = MULTIPLY - {"quantized_matmul._product"} | {
    "activation._gated",
    "linear_attention._attend",
    "merge._merge_lists_kernel",
    "merge._merge_parts_kernel",
    "moe._combine",
    "norm._norm",
    "top._logits_kernel",
}
"""Kernels that read rows of aligned sizes, 16 bytes at once. Quantized weights come in groups that may be smaller."""

FIXED_BY_THE_MODEL = {
    "shaping._bitmask_kernel": {"vocab", "blocks"},
    # Room in a list of counts is a power of two from 64 on, and so always a multiple of 16.
    "counts._count_kernel": {"width"},
    "counts._penalise_kernel": {"width"},
    "filtering._filter": {"vocab"},
    "heads._qk_norm_rope_cache": {
        *("qkv_token", "qkv_head", "table_token"),
        *("key_slot", "key_head", "value_slot", "value_head"),
    },
    "lora._expand": {"outputs", "width"},
    "lora._shrink": {"inputs", "width"},
    "matmul._matmul": {
        *("inputs", "outputs"),
        *("x_token", "weight_out", "weight_in"),
    },
    "quantized_matmul._product": {"inputs", "outputs", "row_bytes", "groups", "size", "x_token"},
    "quantized_matmul._dequantise": {"inputs", "row_bytes", "groups", "size"},
    "moe._combine": {"hidden", "chosen", "experts"},
    "moe._down": {"hidden", "inner"},
    "moe._gate_up": {"up", "hidden", "inner", "chosen"},
    "noise._row_keys": {"s_seeds", "s_samples", "s_positions"},
    "norm._norm": {"x_outer", "x_inner", "delta_outer", "delta_inner"},
    "row_scan._join_kernel": {"blocks"},
    "row_scan._scan_kernel": {"vocab", "blocks", "groups"},
    "sampling._sample": {"vocab"},
    "shaping._bar_kernel": {"vocab", "blocks"},
    "top._groups_kernel": {"groups"},
    "top._logits_kernel": {"vocab"},
}
"""Kernel -> integers, except strides, whose value selects the machine code (1, multiples of 16, others).

The model fixes these values. Values that vary from step to step must not be listed: they would compile during a run.
"""


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the command: exit code, results and messages."""
    path = folder / "result.json"
    command = [sys.executable, "-m", "tests.kernels.gpu.compile", "--json", str(path), "--workers", "1", *arguments]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(path.read_text()) if path.exists() else {}, done.stdout + done.stderr


@pytest.mark.parametrize(
    "chip", [pytest.param(chip, marks=() if chip == "sm_90" else pytest.mark.slow) for chip in CHIPS]
)
def test_every_kernel_fits_the_chip(chip: str, tmp_path: Path) -> None:
    code, result, messages = run(tmp_path, "--arch", chip, "--quick")
    assert code == 0, messages[-4000:]
    assert all(row["chip"] == chip for row in result["rows"])
    same_triton = result["triton"] == json.loads(TABLE.read_text())["triton"]
    assert not same_triton or result["new"] <= MOST_NEW, (
        f"{result['new']} specialisations are not in {TABLE.name}: python -m tests.kernels.gpu.compile --write"
    )
    assert list(problems(result["rows"])) == []
    assert not missing(result)
    for kernel, names in result["specialised"].items():
        by_value = {name for name in names if "stride" not in name}
        assert by_value <= FIXED_BY_THE_MODEL.get(kernel, set()), kernel
    assert result["beyond"] == [], "the size of a step selects the machine code"


def test_the_committed_table_is_within_the_bounds() -> None:
    rows = json.loads(TABLE.read_text())["rows"]
    assert {row["chip"] for row in rows} == set(CHIPS)
    assert list(problems(rows)) == []


def problems(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Resources of each row that exceed its chip."""
    for row in rows:
        where = f"{row['kernel']} ({row['case']}) on {row['chip']}"
        if row["registers"] > REGISTERS:
            yield f"{where}: {row['registers']} registers"
        may_spill = MAY_SPILL_IN_FLOAT32 if "float32" in row["case"] else MAY_SPILL
        converts = MAY_SPILL_CONVERSIONS if row["chip"] == "sm_80" and ",fp8" in row["case"] else 0
        if row["stack"] > max(may_spill.get(row["kernel"], 0), MAY_SPILL.get(row["kernel"], 0), converts):
            yield f"{where}: {row['stack']} bytes of stack"
        if row["shared"] > SHARED[row["chip"]]:
            yield f"{where}: {row['shared']} bytes of shared memory"
        if row["float64"] and row["kernel"] not in MAY_USE_FLOAT64:
            yield f"{where}: {row['float64']} instructions on float64"
        if row["kernel"] in LOADS_WIDE and "odd sizes" not in row["case"] and row["load"] != 16:
            yield f"{where}: loads at most {row['load']} bytes at once"
        if row["kernel"] in MULTIPLY and "float32" not in row["case"]:
            wide = row["chip"] == "sm_90" and max(map(int, re.findall(r"(?:BLOCK_M|ROWS)=(\d+)", row["tile"]))) >= 64
            if row["products"] != ("wgmma" if wide else "mma"):
                yield f"{where}: multiplies by {row['products'] or 'no tensor cores'} ({row['tile']})"


def test_the_limits_equal_the_chip_table() -> None:
    assert {chip: tuning_of(chip).shared_bytes for chip in CHIPS} == SHARED


# The kernels that exist, from the source.


def jitted(tree: ast.Module) -> list[ast.FunctionDef]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [node for node in found if any("jit" in ast.unparse(d).split("(")[0] for d in node.decorator_list)]


TREES = {path: ast.parse(path.read_text()) for path in sorted(KERNELS.glob("*.py"))}


def entry_kernels() -> set[str]:
    """`<file>.<function>` of every jitted function that is not called by another."""
    used = {
        node.id
        for tree in TREES.values()
        for function in jitted(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id != function.name
    }
    return {f"{path.stem}.{x.name}" for path, tree in TREES.items() for x in jitted(tree) if x.name not in used}


def launch_sites() -> list[tuple[str, int, int]]:
    """File, first and last line of every call of `launch`."""
    return [
        (path.name, node.lineno, node.end_lineno or node.lineno)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch"
    ]


def missing(result: dict[str, Any]) -> list[str]:
    """Kernels that no case compiles, and calls of `launch` that no case reaches."""
    kernels = entry_kernels() - {row["kernel"] for row in result["rows"]}
    reached = [(name, int(line)) for name, line in (site.split(":") for site in result["sites"])]
    sites = [
        f"{name}:{first}"
        for name, first, last in launch_sites()
        if not any(file == name and first <= line <= last for file, line in reached)
    ]
    return [*sorted(kernels), *sites]


def test_all_kernels_start_through_launch() -> None:
    starts = [
        f"{path.name}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    assert [start for start in starts if not start.startswith("launch.py:")] == []
    assert launch_sites()
    assert entry_kernels()


# The checks themselves can fail.


@pytest.mark.slow
def test_the_command_reports_errors(tmp_path: Path) -> None:
    code, result, messages = run(tmp_path, "--arch", "sm_80,sm_90", "--cases", "tests.kernels.gpu.probes")
    assert code == 1
    assert "6 compiled kernels, 2 failed" in messages
    rows = {(r["kernel"], r["case"].split(",")[0], r["chip"]): r for r in result["rows"]}
    half = "product[torch.bfloat16"
    # One specialisation for 1, 16 and 1000 rows: T is declared as not specialised, H is not.
    assert set(rows) == {
        (kernel, case, chip)
        for chip in ("sm_80", "sm_90")
        for kernel, case in (
            ("probes.product", half),
            ("probes.product", "product[torch.float32"),
            ("probes.wrong", "wrong"),
        )
    }
    assert result["specialised"] == {"probes.product": ["H"], "probes.wrong": []}
    assert rows["probes.product", half, "sm_80"]["products"] == "mma"
    assert rows["probes.product", half, "sm_90"]["products"] == "wgmma"
    assert "incompatible dimensions" in rows["probes.wrong", "wrong", "sm_80"]["error"]
    spilled = rows["probes.product", "product[torch.float32", "sm_80"]
    assert spilled["stack"] > 0
    assert spilled["products"] == ""
    assert len(list(problems([spilled]))) == 1
    assert missing(result)


def test_a_narrow_load_is_a_problem() -> None:
    wide = next(row for row in json.loads(TABLE.read_text())["rows"] if row["kernel"] == "norm._norm")
    assert list(problems([wide])) == []
    assert ["4 bytes" in problem for problem in problems([{**wide, "load": 4}])] == [True]


LOADS = {
    "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];": 16,
    "ld.global.L1::evict_last.v2.b32 { %r1, %r2 }, [ %rd1 ];": 8,
    "ld.global.b16 { %rs1 }, [ %rd1 + 0 ];\nst.global.v4.b32 [ %rd2 ], { %r1, %r2, %r3, %r4 };": 2,
    "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd2 + 0 ], 0x10, %r3;": 16,
    "cp.async.ca.shared.global [ %r1 + 0 ], [ %rd2 + 0 ], 4;\nld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r5 ];": 4,
    "add.s32 %r1, %r2, %r3;": 0,
}


def test_the_widest_load_is_that_of_global_memory() -> None:
    assert {text: widest_load(text) for text in LOADS} == LOADS


def test_the_command_rejects_the_interpreter() -> None:
    command = [sys.executable, "-m", "tests.kernels.gpu.compile"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("TRITON_INTERPRET is set, so nothing would be compiled: unset it\n")
