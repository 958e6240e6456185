"""How many threads may compute on the CPU: a container's share of the machine counts, not the machine's cores."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["cpu_quota"]

_UNLIMITED: Final = "max"


def cpu_quota(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Processors that this process's control groups leave it, rounded up; None where they set no limit.

    A scheduler that gives 2 of 64 processors as a share of time still shows all 64: as many threads would then wait
    for one another for most of each period.

    Args:
        own: says which group the process is in.
        root: where groups of version 2 are, or the `cpu` controller of version 1 below it.
    """
    limits = []
    for line in _read(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            limits += [_quota(*_read(folder / "cpu.max").split()[:2]) for folder in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            limits += [
                _quota(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))
                for folder in _upwards(root / "cpu", path)
            ]
    found = [limit for limit in limits if limit is not None]
    return min(found, default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """The group's folder and those above it. A container sees its own group as the root."""
    parts = [part for part in path.strip().split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:i]) for i in range(len(parts), -1, -1)]


def _quota(quota: str = "", period: str = "") -> int | None:
    quota, period = quota.strip(), period.strip()
    if quota == _UNLIMITED or not quota.isdigit() or not period.isdigit() or not int(quota) or not int(period):
        return None
    return -(-int(quota) // int(period))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
