"""What several peers' scripts need. They import it by its bare name, which the worker lends them."""

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
    "apart",
    "at_its_best",
    "common_length",
    "converted",
    "product_seconds",
    "shared_waves",
    "static_batches",
    "together",
]

_CLEARLY = 1.25
"""By so much faster that it is not the clock."""
_WATCHED_SECONDS = 0.3
"""How long a product is repeated: engines that have just been loaded may still be at work."""


def apart(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every sample as a row of its own, for engines that know no samples; `together` undoes it.

    Such a row still says of how many it is one, which says that it is drawn at temperature 1 and not greedy.
    """
    return [row for row in rows for _ in range(row.get("samples", 1))]


def together(rows: Sequence[dict[str, Any]], outputs: Sequence[list[int]]) -> list[list[int]]:
    """Outputs of `apart(rows)` by row, a row's samples one after the other."""
    parts = iter(outputs)
    return [[i for _ in range(row.get("samples", 1)) for i in next(parts)] for row in rows]


def static_batches(
    rows: Sequence[dict[str, Any]], size: int, *, prompt_first: bool = False
) -> list[tuple[bool, list[int]]]:
    """Rows that go together in batches that end with their longest row: (whether they are drawn, indices of rows).

    Rows of like lengths go together, and greedy ones apart from those that are drawn. Outputs are to be alike before
    prompts are, or prompts before outputs.
    """
    batches = []
    for drawn in (False, True):
        kept = [i for i, row in enumerate(rows) if (row.get("samples", 1) > 1) == drawn]
        lengths = {i: (-rows[i]["max_new"], -len(rows[i]["ids"])) for i in kept}
        kept.sort(key=lambda i: lengths[i][::-1] if prompt_first else lengths[i])
        batches += [(drawn, kept[begin : begin + size]) for begin in range(0, len(kept), size)]
    return batches


def shared_waves(prompts: Sequence[Sequence[int]], least: int) -> list[list[int]]:
    """Prompts to compute one wave after another, so that a prefix cache holds what the next wave's rows begin with.

    Caches that hold only what earlier steps have computed compute a prefix again for every row that comes in the same
    moment. A row leads, and comes in a wave before the others, where it has at least `least` tokens more in common with
    the next row, in the order of their ids, than with the one before; leaders of leaders come before them.

    Returns:
        Indices of prompts, wave by wave; the last wave, of all that lead nothing, is left out.
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
    """Length of the common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def converted(cache: str, model: str, kind: str, build: Callable[[Path], object]) -> Path:
    """The folder that holds `model` in a peer's own format, built if it is not there.

    Args:
        cache: where such folders are kept; it need not exist.
        model: the folder converted from; its files' names, sizes and times and its config are part of the key.
        kind: the format with all that its files depend on: converter, version, dtype.
        build: writes the files into the empty folder that it is given.
    """
    key = hashlib.sha256(kind.encode())
    for path in sorted(Path(model).iterdir()):
        told = path.stat()
        key.update(f"{path.name} {told.st_size} {told.st_mtime_ns}".encode())
    key.update((Path(model) / "config.json").read_bytes())
    folder = Path(cache) / f"{kind.split()[0]}-{key.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent))  # a folder under its own name is whole
    try:
        build(aside)
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another run was first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def at_its_best(request: dict[str, Any]) -> str:
    """The dtype that a request to load asks for, or float32 where PyTorch multiplies that clearly faster: bfloat16 on a
    CPU without its instructions, or with slow ones. Not where the asked one is to be kept.
    """
    asked: str = request["dtype"]
    if request["keep_dtype"] or request["device"] != "cpu" or asked == "float32":
        return asked
    return "float32" if product_seconds(asked) > _CLEARLY * product_seconds("float32") else asked


def product_seconds(dtype: str) -> float:
    """Seconds that PyTorch takes on one core, at best, for a product [64, 576] by [1152, 576].

    On several they would wait for each other where the machine does other things, too, as long in any format.
    """
    import torch  # which not every peer has

    x, weight = (torch.full(size, 0.5, dtype=getattr(torch, dtype)) for size in ((64, 576), (1152, 576)))
    taken: list[float] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        until = time.perf_counter() + _WATCHED_SECONDS
        while len(taken) < 6 or time.perf_counter() < until:
            begin = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            taken.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return min(taken)
