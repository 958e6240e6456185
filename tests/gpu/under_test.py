"""The operations under test, and their plain PyTorch versions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.chips import ChipTuning
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.kernels.types import LayerKV, PagedAttention
from tests.gpu.outcomes import Absent, Missing
from tests.kernels import references
from tests.kernels.steps import Step

_FILES = {
    "argmax_lse": "logprobs",
    "largest": "top",
    "linear": "matmul",
    "merge_lists": "merge",
    "merge_parts": "merge",
}
"""Launchers outside `Ops`: name -> module of the kernel in `kernels/gpu/`, and of its plain version in `kernels/`; the
one of `linear` is a reference of the tests."""


def kernel(name: str) -> Callable[..., Any]:
    """An operation's kernel launcher, from the GPU ops that the engine uses if they have it.

    Raises:
        Missing: there is no kernel, or it is the plain version.
    """
    found = _found("gpu", _triton_ops(), name)
    if found is None or found is reference(name):
        raise Missing(f"no kernel {name!r}")
    return found


def _triton_ops() -> Ops:
    from batchgen.kernels.gpu.ops import TRITON_OPS

    return TRITON_OPS


def reference(name: str) -> Callable[..., Any]:
    """The plain PyTorch version of an operation.

    Raises:
        Missing: there is no plain version.
    """
    found = references.linear if name == "linear" else _found("", TORCH_OPS, name)
    if found is None:
        raise Missing(f"no plain version of {name!r}")
    return found


def _found(folder: str, ops: Ops, name: str) -> Callable[..., Any] | None:
    found: Callable[..., Any] | None = getattr(ops, name, None)
    if name not in _FILES:
        return found
    module = ".".join(filter(None, ("batchgen.kernels", folder, _FILES[name])))
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    return found


def triton_attention(step: Step, tuning: ChipTuning | None = None) -> PagedAttention:
    """The Triton attention backend, with the tuning of the step's device unless one is given."""
    try:
        from batchgen.kernels.gpu.attention import TritonAttention
    except ImportError as error:
        raise Missing(str(error)) from None
    return TritonAttention(step.pool, step.batch, tuning)


def torch_attention(step: Step) -> PagedAttention:
    """The plain PyTorch attention backend, which runs on any device."""
    return TorchAttention(step.pool, step.batch)


def flash_attention(step: Step, path: str, toy: bool) -> PagedAttention:
    """The vllm-flash-attn backend, with the Triton kernels for shared prefixes.

    Raises:
        Absent: there is no library, or it does not support these heads.
    """
    library = flash_library(path, toy)
    from batchgen.kernels.flash.attention import FlashAttention
    from batchgen.kernels.flash.check import flash_refusal
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
    """The flash library, loaded once and without its self-test; a fake in a toy run.

    Raises:
        Absent: there is no library.
    """
    try:
        from batchgen.kernels.flash.library import FlashUnavailable, find_flash, versions_for
    except ImportError as error:  # a package that unpacks libraries is not installed
        raise Absent(str(error)) from None
    if toy:
        return _fake_library(find_flash)
    try:
        return find_flash(versions_for(torch.cuda.get_device_capability()), path or None, lambda found: found)
    except FlashUnavailable as error:
        raise Absent(str(error)) from None


def _fake_library(find_flash: Any) -> Any:
    try:
        from tests.kernels.flash.fake_flash import Fakes
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
"""The fake libraries, kept so that their operations stay registered."""
