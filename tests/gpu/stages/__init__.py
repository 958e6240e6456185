"""The cases, a file per kind; importing a file registers its cases."""

from __future__ import annotations

from importlib import import_module

__all__ = ["load"]

_MODULES = ("parity_attention", "parity_ops", "parity_sampling", "bench_attention", "bench_ops")


def load() -> None:
    """Register all kernel cases; whole-job stages are imported when they run."""
    for name in _MODULES:
        import_module(f"tests.gpu.stages.{name}")
