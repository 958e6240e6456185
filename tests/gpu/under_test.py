"""Where the operations under test come from, and their oracles."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from batchgen.kernels.attention import TorchAttention
from batchgen.kernels.chips import ChipTuning
from batchgen.kernels.types import LayerKV, PagedAttention
from tests.gpu.outcomes import Absent, Missing
from tests.kernels.steps import Step

__all__ = ["flash_attention", "flash_library", "kernel", "torch_attention", "triton_attention", "twin"]


_FILES = {
    "add_rms_norm": "norm",
    "argmax_lse": "logprobs",
    "drew_masked": "shaping",
    "gated": "activation",
    "largest": "top",
    "merge_lists": "merge",
    "merge_parts": "merge",
    "moe_experts": "moe",
    "read_out": "logprobs",
    "rope_tables": "rope",
    "rotate_and_store": "heads",
    "route": "moe",
}
"""Launchers that are not in `Ops`, or need not be: the file of each and of its twin."""


def kernel(name: str) -> Callable[..., Any]:
    """An operation's launcher, from `Ops` as the engine takes it where it is there.

    Raises:
        Missing: there is no kernel; a plain version in its place is none.
    """
    found = _found("gpu", "batchgen.kernels.gpu.ops", name)
    if found is None or found is twin(name):
        raise Missing(f"no kernel {name!r}")
    return found


def twin(name: str) -> Callable[..., Any]:
    """The same operation in plain PyTorch.

    Raises:
        Missing: there is none.
    """
    found = _found("", "batchgen.kernels.torch_ops", name)
    if found is None:
        raise Missing(f"no plain version of {name!r}")
    return found


def _found(folder: str, ops: str, name: str) -> Callable[..., Any] | None:
    found: Callable[..., Any] | None = getattr(import_module(ops), name, None)
    if found is not None or name not in _FILES:
        return found
    module = ".".join(filter(None, ("batchgen.kernels", folder, _FILES[name])))
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    return found


def triton_attention(step: Step, tuning: ChipTuning | None = None) -> PagedAttention:
    """Our kernels, with the tuning of the step's device unless one is given."""
    try:
        from batchgen.kernels.gpu.attention import TritonAttention
    except ImportError as error:
        raise Missing(str(error)) from None
    return TritonAttention(step.pool, step.batch, tuning)


def torch_attention(step: Step) -> PagedAttention:
    """The plain backend, which runs on any device."""
    return TorchAttention(step.pool, step.batch)


def flash_attention(step: Step, path: str, toy: bool) -> PagedAttention:
    """vllm-flash-attn's, with our kernels for shared prefixes.

    Raises:
        Absent: there is no library here, or it does not take such heads.
    """
    library = flash_library(path, toy)
    from batchgen.kernels.flash import FlashAttention
    from batchgen.kernels.flash_check import flash_refusal
    from batchgen.kernels.gpu.attention import TritonAttention
    from batchgen.kernels.gpu.merge import merge_parts

    keys, values = step.pool.keys[0], step.pool.values[0]
    layer = LayerKV(keys.shape[2], keys.shape[3], values.shape[3])
    refusal = flash_refusal(library.version, [layer], step.query.shape[1], keys.dtype, step.pool.page_size)
    if refusal is not None:
        raise Absent(f"flash-attn {library.version}: {refusal}")
    return FlashAttention(library, step.pool, step.batch, TritonAttention, merge_parts)


@cache
def flash_library(path: str, toy: bool) -> Any:
    """The library, loaded once and not tried: what it computes is what is checked here. In a toy run, a stand-in.

    Raises:
        Absent: there is none.
    """
    try:
        from batchgen.kernels.flash_library import FlashUnavailable, find_flash, versions_for
    except ImportError as error:  # of a package that unpacks libraries
        raise Absent(str(error)) from None
    if toy:
        return _stand_in(find_flash)
    try:
        return find_flash(versions_for(torch.cuda.get_device_capability()), path or None, lambda found: found)
    except FlashUnavailable as error:
        raise Absent(str(error)) from None


def _stand_in(find_flash: Any) -> Any:
    try:
        from tests.kernels.fake_flash import Fakes
    except ImportError as error:
        raise Absent(str(error)) from None
    fakes = Fakes()
    torch.ops.load_library = fakes.load
    with tempfile.TemporaryDirectory() as folder:
        file = fakes.write(Path(folder) / "_vllm_fa3_C.abi3.so", 3)
        library = find_flash((3,), str(file), lambda found: found)
    _kept.append(fakes)
    return replace(library, source="a stand-in")


_kept: list[Any] = []
"""A stand-in's operations are gone with it."""
