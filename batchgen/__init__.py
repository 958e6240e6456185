"""batchgen: offline batch generation for large language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.data.out.distillation import load_kd
    from batchgen.data.out.result_table import read
    from batchgen.engine.engine import Engine
    from batchgen.errors import AdviceWarning
    from batchgen.request.completion import Completion
    from batchgen.request.fields.params import SamplingParams

__all__ = ["AdviceWarning", "Completion", "Engine", "SamplingParams", "__version__", "load_kd", "read"]

__version__ = "0.1.0"

_MODULES = {
    "AdviceWarning": "batchgen.errors",
    "Completion": "batchgen.request.completion",
    "Engine": "batchgen.engine.engine",
    "SamplingParams": "batchgen.request.fields.params",
    "load_kd": "batchgen.data.out.distillation",
    "read": "batchgen.data.out.result_table",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import batchgen` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from batchgen.library_settings import short_openmp_spins

    with short_openmp_spins():
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
