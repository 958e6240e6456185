"""Helpers of the peers' scripts, which import this module as `peer_tools`; the worker makes it importable."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "cached_conversion",
    "common_length",
    "expand_samples",
    "fastest_dtype",
    "join_samples",
    "matmul_seconds",
    "prefix_waves",
    "static_batches",
]

_MIN_SPEEDUP = 1.25
"""Speedup above which a difference is not noise."""
_MEASURE_SECONDS = 0.3
"""Duration of a measurement; background work of an engine that has just been loaded must not distort it."""


def expand_samples(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each sample, for engines without a number of samples per row; see `join_samples`.

    Rows keep their `samples`: a value above 1 means temperature 1 instead of greedy.
    """
    return [row for row in rows for _ in range(row.get("samples", 1))]


def join_samples(rows: Sequence[dict[str, Any]], outputs: Sequence[list[int]]) -> list[list[int]]:
    """Outputs of `rows`, with those of a row's samples concatenated, from the outputs of `expand_samples(rows)`."""
    parts = iter(outputs)
    return [[i for _ in range(row.get("samples", 1)) for i in next(parts)] for row in rows]


def static_batches(
    rows: Sequence[dict[str, Any]], size: int, *, prompt_first: bool = False
) -> list[tuple[bool, list[int]]]:
    """Static batches of rows of similar lengths: (whether the rows are sampled, indices of rows).

    Greedy and sampled rows are in separate batches. Rows are sorted by output length, then prompt length, or the other
    way round with `prompt_first`; the longest come first.
    """
    batches = []
    for sampled in (False, True):
        kept = [i for i, row in enumerate(rows) if (row.get("samples", 1) > 1) == sampled]
        lengths = {i: (-rows[i]["max_new"], -len(rows[i]["ids"])) for i in kept}
        kept.sort(key=lambda i: lengths[i][::-1] if prompt_first else lengths[i])
        batches += [(sampled, kept[begin : begin + size]) for begin in range(0, len(kept), size)]
    return batches


def prefix_waves(prompts: Sequence[Sequence[int]], least: int) -> list[list[int]]:
    """Waves of prompts that fill a prefix cache: each wave computes prefixes of the next one's prompts.

    A prefix cache that only contains finished steps computes a prefix repeatedly for rows that arrive together. In the
    order of their ids, a row is a leader if it shares at least `least` more tokens with the next row than with the
    previous one. Leaders run before the other rows, and leaders of leaders before them.

    Returns:
        Indices of the prompts of each wave, without the last wave of all rows that are not leaders.
    """
    order = sorted(range(len(prompts)), key=lambda i: list(prompts[i]))
    waves: list[list[int]] = []
    while len(order) > 1:
        common = [0, *(common_length(prompts[a], prompts[b]) for a, b in itertools.pairwise(order)), 0]
        leaders = [row for at, row in enumerate(order) if common[at + 1] >= common[at] + least]
        waves = [leaders, *([row for row in wave if row not in leaders] for wave in waves)]
        order = leaders
    return [wave for wave in waves if wave]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def cached_conversion(cache: str, model: str, kind: str, build: Callable[[Path], object]) -> Path:
    """The folder with `model` converted to a peer's format; converts it if the cache lacks it.

    Args:
        cache: cache folder; created if missing.
        model: model folder. Names, sizes and times of its files and its config are part of the cache key.
        kind: everything else that the files depend on: format, converter version, dtype.
        build: writes the converted files to the given empty folder.
    """
    key = hashlib.sha256(kind.encode())
    for path in sorted(Path(model).iterdir()):
        stat = path.stat()
        key.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    key.update((Path(model) / "config.json").read_bytes())
    folder = Path(cache) / f"{kind.split()[0]}-{key.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))  # a folder under its final name is complete
    try:
        build(temporary)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another run has built it meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def fastest_dtype(request: dict[str, Any]) -> str:
    """The dtype of a load request, or float32 if it is clearly faster on this CPU and the dtype need not be kept.

    float32 is faster than bfloat16 on CPUs without (fast) bfloat16 instructions.
    """
    dtype: str = request["dtype"]
    if request["keep_dtype"] or request["device"] != "cpu" or dtype == "float32":
        return dtype
    return "float32" if matmul_seconds(dtype) > _MIN_SPEEDUP * matmul_seconds("float32") else dtype


def matmul_seconds(dtype: str) -> float:
    """Least seconds that PyTorch takes on one core for the matrix multiplication [64, 576] by [1152, 576] transposed.

    With several threads, waiting for each other on a busy machine would hide the difference between dtypes.
    """
    import torch  # not every peer's environment has it

    x, weight = (torch.full(size, 0.5, dtype=getattr(torch, dtype)) for size in ((64, 576), (1152, 576)))
    seconds: list[float] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        until = time.perf_counter() + _MEASURE_SECONDS
        while len(seconds) < 6 or time.perf_counter() < until:
            begin = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            seconds.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return min(seconds)
