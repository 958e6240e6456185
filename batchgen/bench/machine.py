"""Processor name, library versions and commit of a measurement. Does not import torch at module level."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import batchgen
from batchgen.kernels.cpu.build import CompilerMissing, find_compiler
from batchgen.library_settings import processors


def cpu_name() -> str:
    """The processor's model name as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def compiler_name() -> str | None:
    """Path and version of the C++ compiler; None if there is none."""
    try:
        command = find_compiler()
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except CompilerMissing:
        return None
    except (OSError, subprocess.SubprocessError):
        return command[0]
    return f"{command[0]} ({done.stdout.splitlines()[0].strip()})" if done.stdout else command[0]


def machine() -> dict[str, Any]:
    """The machine and commit of a measurement, as lines without engines name them."""
    return {"processors": processors(), "cpu": cpu_name(), "commit": commit_name()}


def versions() -> dict[str, str]:
    """Versions of Python, torch and the operating system."""
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform(terse=True)}


def commit_name() -> str | None:
    """Commit of the checkout that contains this package, with "+changes" if files differ; None if it is installed."""
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
