"""What was measured on this machine, kept beside the compiled library so that the next process need not measure again.

Whatever the library is named by (its sources, the compiler, the processor) names the figures, too, and PyTorch's
version; they go when it goes.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from batchgen.kernels.cpu.library import library_file, loaded

__all__ = ["keep_figures", "kept_figures"]


def kept_figures(subject: str, names: Collection[str]) -> dict[str, float] | None:
    """What is kept about `subject`: a positive number for each of `names`, in their order; None where that is not so.

    Args:
        subject: what was measured, in letters and digits.
        names: what it was measured of.
    """
    if not loaded():
        return None
    try:
        found = json.loads(_file(subject).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.keys() != set(names):
        return None
    if not all(isinstance(number, float) and 0 < number < math.inf for number in found.values()):
        return None
    return {name: found[name] for name in names}


def keep_figures(subject: str, figures: Mapping[str, float]) -> None:
    """Keep `figures` for `kept_figures`, where there is a library and its folder can be written."""
    if not loaded():
        return
    file = _file(subject)
    with suppress(OSError), tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        made.write_text(json.dumps(dict(figures)))
        made.replace(file)  # whole, or not at all: another process may be reading


def _file(subject: str) -> Path:
    library = library_file()
    return library.with_name(f"{library.stem}-{subject}-torch-{torch.__version__}.json")
