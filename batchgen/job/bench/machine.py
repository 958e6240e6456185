"""What this machine is: its name, the versions in use. No torch, which some workloads need not wait for."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import batchgen

__all__ = ["commit_name", "cpu_name", "versions"]


def cpu_name() -> str:
    """The processor's model name as the system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of what every engine of this Python stands on."""
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform(terse=True)}


def commit_name() -> str | None:
    """The commit of the checkout that this package stands in, marked where files differ; None for an installed one."""
    package = Path(batchgen.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    return f"{commit}+changes" if commit and git("status", "--porcelain", "-uno", ".") else commit
