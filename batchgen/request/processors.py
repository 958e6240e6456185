"""Custom logit processors: Python functions that the run defines and that rows select by name.

```
def calm(logits, rows):  # logits: [R, V] float32, one row for each of `rows`
    for i, row in enumerate(rows):
        logits[i, row.params["token"]] -= 5.0 * len(row.output_ids)
    return logits
```

The code comes from the command that starts the run, never from the data: a row can only name a processor. It must be a
pure function of its arguments: identical rows are computed once, and a step may call it again for single rows.
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


class ProcessorRow(Protocol):
    """View of a row that a processor receives."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """[P] prompt tokens; empty for a prompt given as embeddings."""
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
"""f(logits [R, V] float32, rows) -> logits of the same shape and dtype, changed in place or new."""


@dataclass(frozen=True, slots=True)
class LoadedProcessor:
    """An imported processor."""

    function: LogitProcessor
    source: str
    """`module:function` as given; the qualified name of a function object passed from Python."""
    digest: str | None
    """sha256 of the module's file; None if it has no file."""


def load_processors(named: Iterable[tuple[str, str | LogitProcessor]]) -> dict[str, LoadedProcessor]:
    """Import the processors of `--logit-processor`; modules that are already imported are reused.

    The current folder is searched last.

    Raises:
        UsageError: a module cannot be imported or does not have the function.
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
    except (Exception, SystemExit) as problem:  # a module can raise anything when imported
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
