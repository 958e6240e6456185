"""The CPU quota of control groups, versions 1 and 2, and the number of threads that follows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchgen.config.engine_config import EngineConfig
from batchgen.engine import machine
from batchgen.kernels.device import cpu_quota


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("200000 100000\n", 2), ("150000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", None), ("", None)],
)
def test_version_2(tmp_path: Path, limit: str, expected: int | None) -> None:
    write(tmp_path / "own", "0::/\n")
    write(tmp_path / "root" / "cpu.max", limit)
    assert cpu_quota(tmp_path / "own", tmp_path / "root") == expected


def test_the_lowest_limit_of_the_parents_applies(tmp_path: Path) -> None:
    write(tmp_path / "own", "0::/jobs/one\n")
    write(tmp_path / "root" / "jobs" / "one" / "cpu.max", "max 100000\n")
    write(tmp_path / "root" / "jobs" / "cpu.max", "300000 100000\n")
    assert cpu_quota(tmp_path / "own", tmp_path / "root") == 3
    write(tmp_path / "own", "0::/../../gone\n")
    assert cpu_quota(tmp_path / "own", tmp_path / "root") is None


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path / "own", "4:memory:/a\n3:cpu,cpuacct:/a\nodd\n")
    folder = tmp_path / "root" / "cpu" / "a"
    write(folder / "cpu.cfs_period_us", "100000\n")
    write(folder / "cpu.cfs_quota_us", "-1\n")
    assert cpu_quota(tmp_path / "own", tmp_path / "root") is None
    write(folder / "cpu.cfs_quota_us", "400000\n")
    assert cpu_quota(tmp_path / "own", tmp_path / "root") == 4


def test_no_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path) is None


def test_threads_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's number applies, to one engine; else PyTorch's number, never raised, and at most the quota."""
    torch.set_num_threads(2)
    monkeypatch.setattr(machine, "_THREADS_BEFORE", {})
    taken = []
    for asked, quota in [(1, None), (1, 64), (None, 64), (3, 1), (None, 1), (None, None), (3, None)]:
        monkeypatch.setattr(machine, "cpu_quota", lambda quota=quota: quota)
        machine.prepare_device(EngineConfig("model", cpu_threads=asked))
        taken.append(torch.get_num_threads())
    torch.set_num_threads(1)  # by the caller between two engines
    machine.prepare_device(EngineConfig("model"))
    assert [*taken, torch.get_num_threads()] == [1, 1, 2, 3, 1, 2, 3, 1]
