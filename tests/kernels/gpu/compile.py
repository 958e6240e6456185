"""Compile every kernel for chips that are not present, and print the resources of each.

    python -m tests.kernels.gpu.compile [--arch sm_80,sm_89,sm_90] [--only NAME] [--json FILE] [--write] [--quick]

`--write` updates `resources.json`, the table whose bounds a test checks. `TRITON_INTERPRET` must not be set.

Every row of the table has a digest of the kernel's source, its specialisation and Triton's version. `--quick` reuses
rows with a matching digest, except one of every chip, and compiles all others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "resources.json"

_found: list[Any] = []


def _compile(index: int) -> tuple[int, Any]:
    from tests.kernels.gpu.aot import compile_launch

    return index, compile_launch(_found[index])


def compiled(
    chips: tuple[str, ...], modules: list[str], only: str, workers: int, known: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Results for the table and its test: resources per specialisation, call sites, specialised integers.

    Args:
        chips: chips to compile for.
        modules: modules of cases; empty: `aot_cases`.
        only: substring of the names of kernels or cases; "" for all.
        workers: number of processes.
        known: rows by digest that are reused, except one of every chip.
    """
    import triton

    from tests.kernels.gpu import aot

    launches, sites = aot.variants(chips, modules or [aot.CASES], only)
    samples = {x.chip: x.digest for x in reversed(launches)}
    rows = [
        aot.Resources(**known[x.digest]) if x.digest in known and samples[x.chip] != x.digest else None
        for x in launches
    ]
    todo = [index for index, row in enumerate(rows) if row is None]
    _found[:] = launches
    # Forked workers inherit the recorded launches: kernels and meta tensors need not be pickled.
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for done, (index, row) in enumerate(pool.imap_unordered(_compile, todo), 1):
            rows[index] = row
            print(f"[{done}/{len(todo)}] {_line(row)}", file=sys.stderr, flush=True)
    ptxas = subprocess.run([str(aot.TOOLS / "ptxas"), "--version"], check=True, capture_output=True, text=True).stdout
    return {
        "triton": triton.__version__,
        "ptxas": ptxas.split("release ")[1].split(",")[0],
        "rows": [asdict(row) for row in rows],
        "sites": sorted(sites),
        "beyond": [] if modules else aot.beyond(chips, launches),
        "new": sum(x.digest not in known for x in launches),
        "specialised": {
            x.name: sorted({n for y in launches if y.name == x.name for n in y.specialised()}) for x in launches
        },
    }


def _line(row: Any) -> str:
    if row.error:
        return f"{row.chip} {row.kernel} {row.case}: {row.error}"
    return (
        f"{row.chip} {row.registers:3} registers, stack {row.stack}, shared {row.shared:6}, "
        f"{row.products or '-':5} {row.seconds:5.1f} s  {row.kernel}  ({row.case}; {row.tile})"
    )


def written(result: dict[str, Any]) -> str:
    """The table in its committed form: one line per row, without values that vary from run to run."""
    drop = ("seconds", "error")
    rows = sorted(result["rows"], key=lambda r: (r["kernel"], r["case"], r["chip"], r["digest"]))
    lines = [json.dumps({k: v for k, v in row.items() if k not in drop}) for row in rows]
    head = f'{{"triton": "{result["triton"]}", "ptxas": "{result["ptxas"]}", "rows": [\n'
    return head + ",\n".join(lines) + "\n]}\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.gpu.compile", description=__doc__)
    parser.add_argument("--arch", default="sm_80,sm_89,sm_90", help="chips, separated by commas")
    parser.add_argument("--only", default="", help="compile kernels or cases whose name contains this")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--write", action="store_true", help=f"update {TABLE.name}")
    parser.add_argument("--cache", type=Path, help="folder for compiled kernels; default: a temporary folder")
    parser.add_argument("--cases", nargs="*", default=[], help="modules with launches(); default: aot_cases")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help=f"reuse rows of {TABLE.name} that are still valid")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set, so nothing would be compiled: unset it")
    table = json.loads(TABLE.read_text("utf-8"))["rows"] if args.quick and TABLE.exists() else []
    known = {row["digest"]: row for row in table}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(args.cache or folder)
        result = compiled(tuple(args.arch.split(",")), args.cases, args.only, args.workers, known)
    failed = [row for row in result["rows"] if row["error"]]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if args.write and not failed:
        TABLE.write_text(written(result), "utf-8")
    print(f"{len(result['rows'])} compiled kernels, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
