"""PyTorch operations that make the host wait for a GPU, as in `torch.cuda.set_sync_debug_mode`, and host copies."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

COPIES = (aten.copy_, aten._to_copy)
INDEXING = (aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_)

_READS = "reads a number"
_COUNTS = "counts what it finds"

_ALWAYS = {
    **dict.fromkeys((aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose), _READS),
    **dict.fromkeys((aten.nonzero, aten.nonzero_numpy, aten.argwhere, aten.masked_select, aten.bincount), _COUNTS),
    **dict.fromkeys((aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive), _COUNTS),
    aten.lift_fresh: "copies from the host",
}


@cache
def is_composite(func: Any) -> bool:
    """Whether an operation is composed of others, which `func.decompose` calls."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def why_it_waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why an operation on device tensors makes the host wait; None if it does not."""
    packet = func.overloadpacket
    why = _ALWAYS.get(packet)
    if why is not None:
        return why
    if packet is aten.repeat_interleave:
        return _COUNTS if argument(func, args, kwargs, "output_size") is None and _takes_tensor(func) else None
    if packet in COPIES:
        return _why_a_copy(func, args, kwargs)
    if packet in INDEXING:
        if any(isinstance(x, Tensor) and x.device.type != args[0].device.type for x in args[1]):
            return "copies its indices from the host"
        masks = [x for x in args[1] if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
        return _COUNTS if masks and not _is_masked_fill(func, args, kwargs) else None
    if packet in (aten.masked_fill, aten.masked_fill_, aten.index_fill, aten.index_fill_):
        value = argument(func, args, kwargs, "value")
        return _READS if isinstance(value, Tensor) and value.device.type != "cpu" else None
    return None


def _why_a_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    here = args[0].device.type
    if func.overloadpacket is aten.copy_:
        source, target = args[1].device.type, here
    else:
        source, target = here, here if kwargs.get("device") is None else kwargs["device"].type
    if source == target:
        return None
    return "copies to the host" if target == "cpu" else "copies from the host"


def _is_masked_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an indexing operation is `x[mask] = number`, which does not wait."""
    if func.overloadpacket in (aten.index, aten._unsafe_index):
        return False
    value = argument(func, args, kwargs, "values")
    indices = [x for x in args[1] if isinstance(x, Tensor)]
    is_number = value.numel() == 1 and value.device.type == "cpu"
    return len(indices) == 1 and is_number and not argument(func, args, kwargs, "accumulate")


def argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The argument of a call by parameter name; None if it is not given."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name)
    return None


def _takes_tensor(func: Any) -> bool:
    return any(a.name == "repeats" and str(a.type) == "Tensor" for a in func._schema.arguments)
