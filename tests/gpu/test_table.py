"""The table of GPU figures, made from stored reports."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.gpu.goals import GOALS, with_goal
from tests.gpu.report import Measure
from tests.gpu.table import markdown, stored, unmeasured


def report(**changes: Any) -> dict[str, Any]:
    """A made-up report."""
    measures = [
        asdict(
            with_goal(Measure("w-nano", "8b", "output_tokens_per_second", 12.0, "tokens/s", share=0.5, checked=True))
        ),
        asdict(Measure("w-nano", "8b", "output_tokens_per_second", 4.0, "tokens/s", engine="other", version="1")),
        asdict(with_goal(Measure("start", "0.6b", "seconds", 1.0, "s", checked=True, factor=1.0))),
        asdict(with_goal(Measure("w-tree", "1b", "output_tokens_per_second", 7.0, "tokens/s", checked=False))),
    ]
    shape = {"rows": 256, "context": 1024, "heads": 32, "kv_heads": 8, "dim": 128}
    figures = [{"op": "triton", "what": "paged decode", "shape": shape, "share": 0.5, "checked": True}]
    made = {"toy": False, "hardware": {"name": "made-up H200"}, "versions": {"torch": "0"}, "commit": "abc"}
    return {**made, "date": "2027-01-31T00:00:00", "measures": measures, "figures": figures, **changes}


def test_without_figures_the_table_is_a_line(tmp_path: Path) -> None:
    assert "unmeasured" in markdown(stored(tmp_path)) == unmeasured()


def test_every_goal_has_a_line() -> None:
    lines = markdown([report()]).splitlines()
    assert len([line for line in lines if line.startswith("| ") and "measured | of" not in line]) == len(GOALS)
    (nano,) = [line for line in lines if "`w-nano`), output" in line and "| 8b |" in line]
    assert "| 12 | 50% | all | 7,500 | 9,200 |" in nano
    assert nano.endswith("| abc |")
    (start,) = [line for line in lines if line.startswith("| start")]
    assert "| **1 s** |" in start, "a goal that is met is bold"
    (tree,) = [line for line in lines if "`w-tree`" in line]
    assert r"| 7 \* |" in tree, "its run was not checked"
    (kernel,) = [line for line in lines if "decode kernel" in line]
    assert "| 50 % |" in kernel
    assert "other 1, w-nano 8b: 4 tokens/s on 1 of it." in lines


def test_the_latest_measurement_of_each_figure_is_shown() -> None:
    later = [asdict(with_goal(Measure("start", "0.6b", "seconds", 3.0, "s")))]
    lines = markdown([report(), report(measures=later, commit="def")]).splitlines()
    (nano,) = [line for line in lines if "`w-nano`), output" in line and "| 8b |" in line]
    (start,) = [line for line in lines if line.startswith("| start")]
    assert "| 12 |" in nano
    assert nano.endswith("| abc |")
    assert "| **3 s** |" in start
    assert start.endswith("| def |")


def test_real_runs_on_one_device_are_stored(tmp_path: Path) -> None:
    runs = {
        "old": report(date="2027-01-01"),
        "new": report(date="2027-01-02"),
        "toy": report(date="2027-01-03", toy=True),
        "other": report(date="2027-01-04", hardware={"name": "A100"}),
        "kernels": report(date="2027-01-05", measures=[]),
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    assert [run["date"] for run in stored(tmp_path)] == ["2027-01-01", "2027-01-02"], "the goals' device"
    for name in ("old", "new"):
        (tmp_path / f"{name}.json").unlink()
    assert [run["date"] for run in stored(tmp_path)] == ["2027-01-04"], "the device that there is"


_IMPORTS = """
import importlib, pathlib, re, sys
importlib.import_module(f"tests.gpu.stages.{sys.argv[1]}")
files = [module.__file__ for name, module in sys.modules.items() if name.startswith(("batchgen.", "tests.gpu."))]
found = [re.findall(r"^(?:import|from) (\\w+)", pathlib.Path(file).read_text(), re.MULTILINE) for file in files]
print(*{name for names in found for name in names})
"""


@pytest.mark.parametrize(("stage", "more"), [("parity_ops", ""), ("engine", "transformers")])
def test_the_page_names_what_the_stages_import(stage: str, more: str) -> None:
    """Of the packages that the project requires, without those that come with the named ones."""
    page = (Path(__file__).parents[2] / "batchgen" / "docs" / "gpu-check.md").read_text(encoding="utf-8")
    kernels, others = page.split("`parity`, `flash`, `bench` and `tune` need ")[1].split(".")[:2]
    named = kernels + (others if more else "")
    done = subprocess.run([sys.executable, "-c", _IMPORTS, stage], capture_output=True, text=True, check=True)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {need.name for need in map(Requirement, project["dependencies"])}
    with_transformers = {"tokenizers", "safetensors"} if more else set()
    assert {name for name in set(done.stdout.split()) & required if name not in named} <= with_transformers
