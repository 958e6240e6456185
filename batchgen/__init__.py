"""batchgen: offline batch generation for large language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine
    from batchgen.params import SamplingParams
    from batchgen.request import Completion

__all__ = ["Completion", "Engine", "SamplingParams", "__version__"]

__version__ = "0.1.0"

_HOMES = {
    "Completion": "batchgen.request",
    "Engine": "batchgen.engine.engine",
    "SamplingParams": "batchgen.params",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import batchgen`, and every command that needs no model, starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from batchgen.openmp import brief_waits

    with brief_waits():
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
