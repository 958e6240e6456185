"""The interface of engine scripts, the process that serves one, and helpers that several scripts share.

A script of this folder defines a class `Engine` that derives from `PeerEngine`. It runs under the engine's interpreter,
which need not have batchgen, by `python peer_tools.py engine_NAME`: that process puts this module in place of the
package's, so that scripts can import it, reads JSON requests from stdin and writes one JSON reply for each to stdout.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import resource
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

_MIN_SPEEDUP = 1.25
"""Speedup above which a difference is not noise."""
_MEASURE_SECONDS = 0.3
"""Duration of a measurement; background work of an engine that has just been loaded must not distort it."""
Row = dict[str, Any]
"""{"ids": [...], "max_new": n, "samples": n, "fields": {...}, "image": ""}; only batchgen's engines get `fields`."""
Setting = dict[str, Any]
Outputs = tuple[list[list[int]], dict[str, int]]
"""New ids of each row, those of its samples concatenated, and counted quantities."""
_DEVICES = {"cpu": "CPUs", "cuda": "GPUs"}


class PeerEngine:
    """One model in the memory of one engine. Its constructor loads the model of a request, a `LoadSpec` as a dict.

    Args:
        request: the request.
        only: the device that the engine supports, if it is one.
    """

    version: str
    dtype: str
    """Data type in use, which need not be the requested one."""
    settings: Sequence[Setting] = ({},)
    """Settings worth trying."""

    def __init__(self, request: dict[str, Any], only: str = "") -> None:
        self.dtype, self.device, self.threads = request["dtype"], request["device"], request["threads"]
        if only and self.device != only:
            raise RuntimeError(f"supported on {_DEVICES[only]} only; give --device {only}")

    def prepare(self, rows: list[Row], setting: Setting) -> None:
        """Called before each `generate`, outside the measured time.

        Builds what the setting needs, clears prompts of earlier passes from caches, and may compute anything that
        `rows`, the rows of the pass, cannot reuse.
        """

    def generate(self, rows: list[Row], setting: Setting) -> Outputs:
        """Generate every row to its full length: greedily, or at temperature 1 for rows of several samples."""
        samples = [row | {"sampled": row["samples"] > 1} for row in rows for _ in range(row["samples"])]
        outputs, counted = self.run(samples, setting)
        parts = iter(outputs)
        return [[i for _ in range(row["samples"]) for i in next(parts)] for row in rows], counted

    def run(self, samples: list[Row], setting: Setting) -> Outputs:
        """Generate rows of one sample each, at temperature 1 if `sampled`. Unused where `generate` is overridden."""
        raise NotImplementedError


def serve(name: str, requests: TextIO, replies: TextIO) -> None:
    """Answer requests with the engine of a script until stdin ends. An exception becomes the reply."""
    engine: Any = None
    for line in requests:
        request = json.loads(line)
        try:
            if request["op"] == "load":
                engine = runpy.run_path(str(Path(__file__).with_name(f"{name}.py")))["Engine"](request)
                names = ("version", "dtype", "device", "threads")
                reply = {name: getattr(engine, name) for name in names} | {"settings": list(engine.settings)}
            else:
                rows, setting = request["rows"], request["setting"]
                engine.prepare(rows, setting)
                cpu, begin = _cpu_seconds(), time.perf_counter()
                outputs, counted = engine.generate(rows, setting)
                reply = {"seconds": time.perf_counter() - begin, "cpu_seconds": _cpu_seconds() - cpu}
                reply |= {"outputs": outputs, "counted": counted}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _cpu_seconds() -> float:
    """Processor time (user and system) of all threads of this process and its child processes."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return _child_cpu_seconds(os.getpid()) + sum(one.ru_utime + one.ru_stime for one in usage)


def _child_cpu_seconds(parent: int) -> float:
    """Processor time of all running descendants of a process; 0 if the system does not list them."""
    seconds = 0.0
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # the process has ended meanwhile
            for child in map(int, path.read_text().split()):
                user, system = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
                seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + _child_cpu_seconds(child)
    return seconds


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
    build_folder(folder, build)
    return folder


def build_folder(folder: Path, build: Callable[[Path], object]) -> None:
    """Build a folder, if it is missing or empty, under a temporary name: what is under its final name is complete."""
    if folder.is_dir() and any(folder.iterdir()):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        build(temporary)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another run has built it meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def main() -> None:
    """Serve requests. Output of libraries to stdout goes to stderr, so that stdout contains replies only."""
    del sys.path[0]  # no other module of this folder may shadow the engine's imports
    sys.modules["batchgen.bench.engines.peer_tools"] = sys.modules["__main__"]  # does not import batchgen
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, replies)


if __name__ == "__main__":
    main()
