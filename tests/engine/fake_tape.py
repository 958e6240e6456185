"""Simulated CUDA graphs for CPU tensors: a tape of the operations and kernels that a function launched.

A replay calls the same operations on the tensors of the capture and writes their results to the tensors of the
capture, as a CUDA graph does: Python numbers are fixed, each replay overwrites the last results, and nothing is
computed before the first replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from batchgen.kernels.gpu.launch import recording
from tests.engine.fake_syncs import is_composite, why_it_waits


def poison(tensor: Tensor) -> Tensor:
    """Fill a tensor with improbable values: NaN, or a very large or very negative integer."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    lowest = torch.iinfo(tensor.dtype).min
    return tensor.fill_(torch.iinfo(tensor.dtype).max if lowest == 0 else lowest // 2)


def start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Run a kernel in Triton's interpreter, without recording the interpreter's own operations."""
    if all(grid):
        args = tuple(_memory(arg) if isinstance(arg, Tensor) else arg for arg in args)
        with _disable_current_modes():
            kernel[grid](*args, **constants)


class Tape(TorchDispatchMode):
    """Records the operations inside the block. They also run, so that shapes and tensors exist."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self._made: dict[int, Tensor] = {}
        """Storage -> tensor that was allocated in the capture."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """Storage -> existing tensor that the capture wrote to, and its original values."""

    def record(self, body: Callable[[], None]) -> None:
        """Record the launches of `body` and undo them: existing tensors are restored, new ones are poisoned."""
        with recording(self._launch), self:
            body()
        with torch.inference_mode():
            for tensor, held in self._before.values():
                tensor.copy_(held)
            for tensor in self._made.values():
                poison(_whole(tensor))
        self._before.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        why = why_it_waits(func, args, kwargs)
        if why is not None:
            raise RuntimeError(f"`{func}` inside a capture: it {why}, which waits for the device")
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        given = _tensors((args, kwargs))
        for tensor in _written(func, args, kwargs):
            self._keep(tensor)
        result = func(*args, **kwargs)
        known = {_storage(tensor) for tensor in given}
        fresh = [tensor for tensor in _tensors(result) if _storage(tensor) not in known]
        for tensor in fresh:
            self._made.setdefault(_storage(tensor), tensor)
        if fresh:
            places = [i for i, x in enumerate(_tensors(result)) if _storage(x) not in known]
            self.calls.append(lambda: _run_into(func, args, kwargs, places, fresh))
        elif _written(func, args, kwargs):
            self.calls.append(lambda: func(*args, **kwargs))
        return result

    def _launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        if not all(grid):
            return
        for tensor in _tensors((args, constants)):
            self._keep(tensor)
        start(kernel, grid, args, constants)
        self.calls.append(lambda: start(kernel, grid, args, constants))

    def _keep(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key not in self._made and key not in self._before:
            with _disable_current_modes():
                whole = _whole(tensor)
                self._before[key] = whole, whole.clone()


class TapeGraph:
    """Replays a tape."""

    def __init__(self, tape: Tape) -> None:
        self._calls = tape.calls

    def replay(self) -> None:
        """Run all operations again, on the same tensors."""
        with torch.inference_mode():
            for call in self._calls:
                call()


def _run_into(func: Any, args: Any, kwargs: Any, places: list[int], targets: list[Tensor]) -> None:
    results = _tensors(func(*args, **kwargs))
    for place, target in zip(places, targets, strict=True):
        _memory(target).copy_(_memory(results[place]))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to, by its schema."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += _tensors(given)
    return found


def _memory(tensor: Tensor) -> Tensor:
    """The CPU tensor of a simulated GPU tensor."""
    behind: Tensor = getattr(tensor, "behind", tensor)
    return behind


def _storage(tensor: Tensor) -> int:
    try:
        return _memory(tensor).untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a library's packed weights
        return id(tensor)


def _whole(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as a flat tensor of its dtype."""
    tensor = _memory(tensor)
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor, (count,), (1,), 0)
