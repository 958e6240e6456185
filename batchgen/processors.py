"""Custom logit processors: Python functions that a run names at its start, and that rows ask for by name.

```
def calm(logits, rows):  # logits: [R, V] float32, one row for each of `rows`
    for i, row in enumerate(rows):
        logits[i, row.params["token"]] -= 5.0 * len(row.output_ids)
    return logits
```

A processor is code of the person who starts the run, never of the data: a row can only name one. It must be a pure
function of what it is given: rows that are equal are computed once, and a step may call it again row by row.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from batchgen.errors import UsageError

__all__ = ["LoadedProcessor", "LogitProcessor", "ProcessorRow", "load_processors"]


class ProcessorRow(Protocol):
    """What a processor may know of a row."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """[P]; empty where the prompt is given as embeddings."""
        ...

    @property
    def output_ids(self) -> Sequence[int]:
        """[C] tokens generated so far."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """The row's `custom_params`."""
        ...


LogitProcessor = Callable[[Any, Sequence[ProcessorRow]], Any]
"""f(logits [R, V] float32, rows) -> logits of the same shape and type, changed in place or new."""


@dataclass(frozen=True, slots=True)
class LoadedProcessor:
    """A processor ready to be called."""

    function: LogitProcessor
    source: str
    """`module:function` as it was named; the function's qualified name where Python gave it directly."""
    digest: str | None
    """sha256 of the module's file; None where it has none."""


def load_processors(named: Iterable[tuple[str, str | LogitProcessor]]) -> dict[str, LoadedProcessor]:
    """Import what `--logit-processor` names; a module that is imported already is not imported again.

    The folder that the run was started in is searched last.

    Raises:
        UsageError: a module cannot be imported, or has no such function.
    """
    return {name: _load(name, target) for name, target in named}


def _load(name: str, target: str | LogitProcessor) -> LoadedProcessor:
    if not isinstance(target, str):
        module_name = getattr(target, "__module__", None) or type(target).__module__
        source = f"{module_name}:{getattr(target, '__qualname__', type(target).__qualname__)}"
        return LoadedProcessor(target, source, _digest(module_name))
    label = f"`--logit-processor` {name}={target}"
    module_name, _, path = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as problem:  # whatever a module does when it is imported
        raise UsageError(f"{label}: cannot import `{module_name}`: {type(problem).__name__}: {problem}") from None
    try:
        function = attrgetter(path)(module)
    except AttributeError:
        raise UsageError(f"{label}: `{module_name}` has no `{path}`; correct the function's name") from None
    if not callable(function):
        raise UsageError(f"{label}: `{path}` of `{module_name}` is not a function (it is {type(function).__name__})")
    return LoadedProcessor(function, target, _digest(module_name))


def _digest(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else None
