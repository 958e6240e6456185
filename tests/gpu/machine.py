"""Hardware and software of a run: device, driver, clocks, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

_SMI_FIELDS = [
    *("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem"),
    *("power.limit", "temperature.gpu"),
]


def hardware(device: torch.device) -> dict[str, Any]:
    """Name, memory and multiprocessors, and driver and clocks from `nvidia-smi`."""
    if device.type != "cuda":
        return {"name": f"cpu {platform.machine()}", "threads": torch.get_num_threads()}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"sm_{found.major}{found.minor}",
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "l2_bytes": getattr(found, "L2_cache_size", 0),
        "smi": _smi(device.index or 0),
    }


def _smi(index: int) -> dict[str, str]:
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    answer = _output(command)
    values = [value.strip() for value in answer.split(",")]
    return dict(zip(_SMI_FIELDS, values, strict=True)) if len(values) == len(_SMI_FIELDS) else {}


def versions() -> dict[str, str]:
    """Versions of Python, torch, Triton and CUDA."""
    import triton

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "none",
    }


def commit() -> str:
    """The checkout's commit, with "-dirty" if files differ; "unknown" outside a checkout."""
    root = Path(__file__).parent
    name = _output(["git", "-C", str(root), "rev-parse", "--short", "HEAD"])
    dirty = name and _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return (name + ("-dirty" if dirty else "")) or "unknown"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
