"""Runs an operation three times: by the kernel, by plain PyTorch, and exactly, on copies of the same arguments.

Compared are the results and the arguments that an operation may write to. What the plain operation copies or decides
must be equal; what it computes is compared with the exact values. Memory around an argument must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.lora import LoraPairs, LoraStep

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor of a call."""

    name: str
    """"result", with the index or field of a part, or the name of an argument."""
    got: Tensor
    plain: Tensor
    exact: Tensor | None
    """In float64; None: `got` must equal `plain`."""


def results(
    arguments: Mapping[str, Any],
    kernel: Call,
    plain: Call,
    exact: Call | None = None,
    equal: frozenset[str] = frozenset(),
    inside: AbstractContextManager[None] | None = None,
) -> Iterator[Result]:
    """Call an operation by both implementations.

    Args:
        arguments: name -> value, in the order of the operation's parameters.
        kernel: the implementation under test.
        plain: the plain PyTorch implementation.
        exact: gives the exact result from the arguments with floats in float64; None: the plain implementation.
        equal: names of results and arguments that must be equal to those of `plain`; "*": all.
        inside: entered while the kernel is called.
    """
    mine, theirs, wide = (_copied(arguments, widen) for widen in (False, False, True))
    with inside or nullcontext():
        got = kernel(*mine.values())
    want = plain(*theirs.values())
    truth = (exact or plain)(*wide.values())
    found = [*_tensors("result", got, want, truth)]
    for name, before in arguments.items():
        found += _changed(name, before, mine[name], theirs[name], wide[name])
    for one in found:
        compared = one.exact is None or "*" in equal or one.name in equal or not one.got.is_floating_point()
        yield from _split(replace(one, exact=None) if compared else one)


def _changed(name: str, before: Any, got: Any, plain: Any, exact: Any) -> Iterator[Result]:
    """What a call has written to an argument, or around it."""
    for old, one in zip(_tensors(name, before, before, before), _tensors(name, got, plain, exact), strict=True):
        if not (_same_bits(one.got, old.got) and _same_bits(one.plain, old.got)):
            yield one
        outside = torch.ones(_whole(old.got).numel(), dtype=torch.bool, device=old.got.device)
        outside.as_strided(old.got.shape, old.got.stride(), old.got.storage_offset()).fill_(False)
        around = [_whole(tensor)[outside] for tensor in (one.got, old.got)]
        if not _same_bits(*around):
            yield Result(f"around {one.name}", *around, None)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))


def _split(found: Result) -> Iterator[Result]:
    """Not-a-numbers, as in memory that was never written, are compared by their places."""
    if not found.plain.is_floating_point() or not bool(found.plain.isnan().any()):
        yield found
        return
    yield Result(f"{found.name}: not-a-numbers", found.got.isnan(), found.plain.isnan(), None)
    kept = ~found.plain.isnan() & ~found.got.isnan()
    exact = None if found.exact is None else found.exact[kept]
    yield Result(found.name, found.got[kept], found.plain[kept], exact)


def _copied(value: Any, widen: bool) -> Any:
    """A copy with the same strides and the same surroundings; `widen`: floats in float64."""
    if isinstance(value, Tensor):
        if widen and value.is_floating_point():
            return value.double()
        whole = _whole(value).clone()
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, Mapping):
        return {name: _copied(item, widen) for name, item in value.items()}
    if isinstance(value, list):
        return [_copied(item, widen) for item in value]
    if isinstance(value, LoraPairs):
        return LoraPairs([_copied(pair, widen) for pair in value])
    if isinstance(value, tuple):
        parts = [_copied(part, widen) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, LoraStep | type):
        return replace(value, **{field.name: _copied(getattr(value, field.name), widen) for field in fields(value)})
    return value


def _whole(tensor: Tensor) -> Tensor:
    """[n] all elements of the tensor's memory, without copying them."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _tensors(name: str, got: Any, plain: Any, exact: Any) -> Iterator[Result]:
    if isinstance(got, Tensor):
        yield Result(name, got, plain, exact)
    elif isinstance(got, tuple | list):
        for index, part in enumerate(zip(got, plain, exact, strict=True)):
            yield from _tensors(f"{name} {index}", *part)
    elif is_dataclass(got) and not isinstance(got, LoraStep | type):
        for field in fields(got):
            parts = (getattr(value, field.name) for value in (got, plain, exact))
            yield from _tensors(f"{name} {field.name}", *parts)
