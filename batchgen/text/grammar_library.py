"""xgrammar without torch and transformers, for a process that only compiles."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["import_compiler"]

_UNUSED = ("torch", "transformers")
"""xgrammar imports them for masks on devices and for their tokenizers, of which a compiler has neither."""


def import_compiler() -> Any:
    """Import xgrammar in tenths of a second: what it imports beside takes seconds, and memory.

    Masks are to be arrays of numpy then. Where these modules are imported already, or this version of xgrammar cannot
    do without them, it is imported as it is.
    """
    if any(name in sys.modules for name in ("xgrammar", *_UNUSED)):
        return import_module("xgrammar")
    try:
        sys.modules["torch"] = None  # type: ignore[assignment]  # that is: not installed, which tvm_ffi allows for
        import_module("tvm_ffi")
        sys.modules.update((name, _Names(name)) for name in _UNUSED)
        return import_module("xgrammar")
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("xgrammar", *_UNUSED)]:
            del sys.modules[name]
        return import_module("xgrammar")
    finally:
        for name in _UNUSED:
            if isinstance(sys.modules.get(name), _Names | None):
                sys.modules.pop(name, None)


class _Names(ModuleType):
    """A module all of whose names are classes of which there are no instances elsewhere."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (_Nothing,), {})
        setattr(self, name, found)
        return found


class _Nothing:
    def __init__(self, *_: object, **__: object) -> None:
        pass
