"""The kernels that a run works with, chosen once at start.

`torch` runs anywhere. `compiled` is C++ for the CPU, built on the machine that runs it. `triton` runs on GPUs (and in
Triton's interpreter, on a CPU, for proofs). `flash` is vllm-flash-attn's library for attention and Triton for
everything else. `auto` takes compiled kernels on a CPU where they can be built, else plain PyTorch, and on a GPU
whichever of triton and flash is faster for the run at hand, measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels import invariant_ops, torch_ops
from batchgen.kernels.attention import TorchAttention
from batchgen.kernels.chips import (
    ChipTuning,
    candidate_tunings,
    chip_name,
    chip_tuning,
    fixed_tuning,
    known_chips,
    measured_tuning,
)
from batchgen.kernels.copies import copy_pages
from batchgen.kernels.cpu import copies as compiled_copies
from batchgen.kernels.cpu import invariant_ops as compiled_invariant_ops
from batchgen.kernels.cpu import ops as compiled_ops
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.background import Background, background
from batchgen.kernels.cpu.build import find_compiler
from batchgen.kernels.cpu.library import DTYPES, missing
from batchgen.kernels.cpu.packed_pages import packed_pages
from batchgen.kernels.cpu.thresholds import ROWS, measured_saving
from batchgen.kernels.device import Device
from batchgen.kernels.flash import flash_factory
from batchgen.kernels.flash_check import check_library, flash_refusal
from batchgen.kernels.flash_library import FlashLibrary, FlashUnavailable, find_flash, first_line, versions_for
from batchgen.kernels.invariant_attention import InvariantAttention
from batchgen.kernels.linear import Product
from batchgen.kernels.measure import Timer, TypicalStep, device_timer, layer_milliseconds
from batchgen.kernels.ops import Ops
from batchgen.kernels.types import AttentionBatch, BesidePool, DecodePlanner, KVPool, LayerKV, PagedAttention

__all__ = [
    "ATTENTION_BACKENDS",
    "GPU_BACKENDS",
    "INVARIANT",
    "AttentionFactory",
    "AttentionNeeds",
    "Backend",
    "BackendUnavailable",
    "capability_of",
    "choose_backend",
    "refuse_deterministic",
]

ATTENTION_BACKENDS = ("auto", "flash", "triton", "compiled", "torch")
"""Names that `choose_backend` knows; `auto` takes the fastest that is there."""

GPU_BACKENDS = ("flash", "triton")
"""Those that need a GPU."""

AttentionFactory = Callable[[KVPool, AttentionBatch], PagedAttention]
"""Makes one step's attention."""


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name that this build, machine or model does not have; the message says why."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy
        """What may be done about it, where that is known."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The kernels of a run."""

    name: str
    """"torch", "compiled", "triton" or "flash"."""
    describes: str
    """What a footer records: versions, and why `auto` took this one."""
    attention: AttentionFactory
    ops: Ops
    """All operations but attention."""
    product: Product | None = None
    """What multiplies in a model's linear layers; None: whatever is fastest there."""
    static: Callable[[KVPool, Device], DecodePlanner] | None = None
    """Attention of decode-only steps inside graphs; None: these kernels stand in none."""
    group_saving: Callable[[], int] | None = None
    """Measures how many reads of cached positions a prefix group must save to pay; None: nothing is measured."""
    group_rows: int | None = None
    """Rows of the group that is measured; see `plan.config`. None: a group of any number of rows must save as much."""
    copy_pages: Callable[[KVPool, Tensor], None] = copy_pages
    """See `kernels.copies`."""
    beside_pool: Callable[[list[LayerKV], torch.dtype, int, int, int], BesidePool | None] | None = None
    """Made of a pool's layers, dtype, page size and pages, and of the bytes that are left beside it, for the pool's
    `beside`; None: these kernels keep nothing."""
    background: Callable[[], Background] | None = None
    """What runs a step's kernels beside Python, where they can be recorded; None: these kernels cannot."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model and its pool ask of a backend."""

    device: torch.device
    capability: tuple[int, int] | None
    """The GPU's, of `capability_of`; None on a CPU."""
    layers: tuple[LayerKV, ...]
    heads: int
    """Query heads of a layer."""
    dtype: torch.dtype
    page_size: int
    flash_library: str | None = None
    """Path of a flash library that the user named."""
    deterministic: bool = False
    """Whether a row's results may not depend on what runs beside it, not in a single bit."""
    native: bool = False
    """Whether the model is one of `models.native`, whose layers the compiled kernels can run whole."""


TORCH = Backend("torch", "torch", TorchAttention, torch_ops)
"""Plain PyTorch: for CPUs without a compiler, and the oracle of the others."""

INVARIANT = Backend("torch", "torch, batch-invariant", InvariantAttention, invariant_ops)
"""Plain PyTorch whose results for a row depend on that row alone, for models run by tiles (`models.invariant`)."""


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of the GPU behind `device`; None where it is none of NVIDIA's."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


def choose_backend(
    name: str, needs: AttentionNeeds, step: TypicalStep | None = None, timer: Timer | None = None
) -> Backend:
    """The kernels for a run with the attention called `name`.

    Args:
        name: one of `ATTENTION_BACKENDS`.
        needs: what the model asks for.
        step: what is measured on: tile shapes on a chip that `chips.toml` does not know, and by `auto` the backends.
            Without it nothing is measured, and `auto` takes the first that is there, Triton before flash.
        timer: times what is measured; None is the device's own clock.

    Raises:
        BackendUnavailable: `name` is unknown, or cannot run here; the message says why.
    """
    if name not in ATTENTION_BACKENDS:
        raise BackendUnavailable(f"unknown attention backend {name!r}; take one of {', '.join(ATTENTION_BACKENDS)}")
    if needs.deterministic:
        return _deterministic(name, needs)
    if name == "torch":
        return TORCH
    if name == "compiled":
        return _compiled(needs)
    if name == "auto" and needs.capability is None:
        return _for_cpu(needs)
    timer = timer or device_timer(needs.device)
    if name != "auto":
        named = _BACKENDS[name](needs)
        _tune(needs.device, step, timer)
        return named
    found: list[Backend] = []
    missing: list[str] = []
    for other, make in _BACKENDS.items():
        try:
            found.append(make(needs))
        except BackendUnavailable as problem:
            missing.append(f"no {other}: {problem}")
    if found:
        _tune(needs.device, step, timer)
    if len(found) > 1 and step is not None:
        found, missing = _by_speed(found, step, timer)
    best = found[0] if found else TORCH
    return replace(best, describes=f"{best.describes} ({'; '.join(missing)})") if missing else best


def _for_cpu(needs: AttentionNeeds) -> Backend:
    """Compiled kernels where they can be had, else plain PyTorch and why."""
    if needs.device.type != "cpu":
        return TORCH
    try:
        return _compiled(needs)
    except BackendUnavailable as problem:
        return replace(TORCH, describes=f"{TORCH.describes} (no compiled: {problem})")


def _compiled(needs: AttentionNeeds) -> Backend:
    """C++ for the CPU at hand, built if it has not been yet."""
    if needs.device.type != "cpu" or needs.capability is not None:
        raise BackendUnavailable("it is for CPUs, and this run computes on a GPU")
    if needs.dtype not in DTYPES:
        dtype = str(needs.dtype).removeprefix("torch.")
        raise BackendUnavailable(f"it computes in bfloat16 and float32, not in {dtype} (see --dtype)")
    reason = missing()
    if reason is not None:
        raise BackendUnavailable(reason, "install g++ or clang++, name one with CXX, or leave the option out")
    compiler = Path(find_compiler()[0]).name
    saving = None
    if needs.layers:
        saving = partial(measured_saving, needs.layers[0], needs.heads, needs.dtype, needs.page_size, len(needs.layers))
    return Backend(
        "compiled",
        f"compiled by {compiler}",
        CompiledAttention,
        compiled_ops,
        group_saving=saving,
        group_rows=ROWS,
        copy_pages=compiled_copies.copy_pages,
        beside_pool=packed_pages,
        background=background,
    )


def _deterministic(name: str, needs: AttentionNeeds) -> Backend:
    """Kernels whose results for a row depend on that row alone. Nothing is measured: another run may not differ."""
    on_gpu = needs.capability is not None or needs.device.type != "cpu"
    refuse_deterministic(name, on_gpu)
    if on_gpu or name == "triton":
        return _invariant_triton(needs)
    if name == "torch" or (name == "auto" and not needs.native):
        return INVARIANT
    try:
        return _invariant_compiled(needs)
    except BackendUnavailable as problem:
        if name == "compiled":
            raise
        return replace(INVARIANT, describes=f"{INVARIANT.describes} (no compiled: {problem})")


def refuse_deterministic(name: str, on_gpu: bool) -> None:
    """Refuse what no machine runs with `--deterministic`.

    Raises:
        BackendUnavailable: the attention called `name` is none that computes a row as if it were alone.
    """
    remedy = "leave one of the two out"
    if name == "flash":
        raise BackendUnavailable("`--deterministic`: flash splits its work by the batch", remedy)
    if on_gpu and name in ("torch", "compiled"):
        raise BackendUnavailable("`--deterministic` computes by Triton on a GPU", remedy)


def _invariant_compiled(needs: AttentionNeeds) -> Backend:
    """The compiled kernels, whose products and norms are batch-invariant anyway, with attention that is so, too."""
    found = _compiled(needs)
    if not needs.native:
        raise BackendUnavailable(
            "`--deterministic` computes models of the transformers library by plain PyTorch on a CPU",
            "leave one of the two out",
        )
    return Backend(
        "compiled",
        f"{found.describes}, batch-invariant",
        partial(CompiledAttention, invariant=True),
        compiled_invariant_ops,
        copy_pages=compiled_copies.copy_pages,
        background=found.background,
    )


def _invariant_triton(needs: AttentionNeeds) -> Backend:
    """Triton's kernels with tiles that no batch chooses, and a product for the model's linear layers."""
    found = _triton(needs)
    from batchgen.kernels.gpu import invariant_ops as ops
    from batchgen.kernels.gpu.matmul import linear
    from batchgen.kernels.gpu.walk import WalkAttention

    tuning = fixed_tuning(needs.device)
    try:
        for layer in needs.layers:
            tuning.attention_tile("fixed", max(layer.key_dim, layer.value_dim), needs.dtype)
    except ValueError as problem:
        raise BackendUnavailable(str(problem)) from None
    return Backend(found.name, f"{found.describes}, batch-invariant", WalkAttention, ops, product=linear)


def _tune(device: torch.device, step: TypicalStep | None, timer: Timer) -> None:
    """Choose tile shapes by time for a chip that `chips.toml` does not know, from those of chips that it does."""
    if device.type != "cuda" or step is None or chip_name(device) in known_chips():
        return
    properties: Any = torch.cuda.get_device_properties(device)  # torch declares fewer than it has
    candidates = candidate_tunings(properties.shared_memory_per_block_optin)
    if len(candidates) == 1:
        return
    from batchgen.kernels.gpu.attention import TritonAttention

    def milliseconds(tuning: ChipTuning) -> float:
        found = layer_milliseconds({0: partial(TritonAttention, tuning=tuning)}, step, timer)[0]
        return found if isinstance(found, float) else math.inf

    measured_tuning(device, candidates, milliseconds)


def _by_speed(found: list[Backend], step: TypicalStep, timer: Timer) -> tuple[list[Backend], list[str]]:
    """Backends that ran the step, the fastest first, and what is to be said of the others."""
    by_name = {backend.name: backend for backend in found}
    results = layer_milliseconds({name: backend.attention for name, backend in by_name.items()}, step, timer)
    times = {name: result for name, result in results.items() if isinstance(result, float)}
    order = sorted(times, key=lambda name: times[name])
    remarks = [f"no {name}: {result}" for name, result in results.items() if isinstance(result, str)]
    for name in order[1:]:
        took = f"{times[order[0]]:.3g} ms against {times[name]:.3g} ms a layer"
        remarks.insert(0, f"faster than {by_name[name].describes}: {took}")
    return [by_name[name] for name in order], remarks


def _triton(needs: AttentionNeeds) -> Backend:
    """All kernels by Triton."""
    if find_spec("triton") is None:
        raise BackendUnavailable("Triton is not installed", "it comes with `pip install 'batchgen[gpu]'`")
    import triton

    if needs.capability is None and not triton.knobs.runtime.interpret:
        raise BackendUnavailable(
            "it needs an NVIDIA GPU, and this run computes on the CPU "
            "(TRITON_INTERPRET=1 in the environment runs its kernels there, very slowly, for proofs)"
        )
    if needs.capability is not None and needs.capability < (8, 0):
        major, minor = needs.capability
        raise BackendUnavailable(f"it needs a GPU of compute capability 8.0 or more, and this one has {major}.{minor}")
    tuning = chip_tuning(needs.device)
    try:
        for layer in needs.layers:
            for kind in ("decode", "prefill"):
                tuning.attention_tile(kind, max(layer.key_dim, layer.value_dim), needs.dtype)
    except ValueError as problem:
        raise BackendUnavailable(str(problem)) from None
    from batchgen.kernels.gpu import ops
    from batchgen.kernels.gpu.attention import TritonAttention
    from batchgen.kernels.gpu.static_attention import StaticPlanner

    if needs.capability is not None:
        _start(ops, needs.device)
    return Backend("triton", f"triton {triton.__version__}", TritonAttention, ops, static=StaticPlanner)


def _start(ops: Ops, device: torch.device) -> None:
    """Run one small kernel.

    Raises:
        BackendUnavailable: it does not build or start, as where Triton finds no C compiler for its launchers.
    """
    try:
        out = ops.rms_norm(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-6)
        right = bool(((out - 1).abs() < 1e-3).all())
    except Exception as problem:  # compilers and drivers fail in ways of their own
        reason = f"its kernels do not start here: {first_line(problem)}"
        raise BackendUnavailable(reason, "Triton wants a C compiler (gcc) and Python's headers") from None
    if not right:
        raise BackendUnavailable("its kernels give wrong numbers here")


@cache
def _flash(needs: AttentionNeeds) -> Backend:
    """Attention by vllm-flash-attn, shared prefixes and all else by Triton. Tried once per process."""
    if needs.capability is None:
        raise BackendUnavailable("it needs an NVIDIA GPU, and this run computes on the CPU")
    try:
        versions = versions_for(needs.capability)
    except FlashUnavailable as problem:
        raise BackendUnavailable(str(problem)) from None
    refusals = {v: flash_refusal(v, needs.layers, needs.heads, needs.dtype, needs.page_size) for v in versions}
    fitting = tuple(version for version in versions if refusals[version] is None)
    if not fitting:
        raise BackendUnavailable(str(refusals[versions[0]]))
    try:
        rest = _triton(needs)
    except BackendUnavailable as problem:
        reason = f"its shared prefixes are computed by Triton, which cannot run: {problem}"
        raise BackendUnavailable(reason, problem.remedy) from None
    try:
        library = find_flash(fitting, needs.flash_library, lambda found: _accepted(found, needs))
    except FlashUnavailable as problem:
        raise BackendUnavailable(str(problem), _FLASH_REMEDY) from None
    from batchgen.kernels.gpu.attention import TritonAttention
    from batchgen.kernels.gpu.merge import merge_parts

    return Backend("flash", str(library), flash_factory(library, TritonAttention, merge_parts), rest.ops)


_FLASH_REMEDY = "install vLLM, name its compiled library with --flash-library, or leave the option out"


def _accepted(library: FlashLibrary, needs: AttentionNeeds) -> FlashLibrary:
    """The library once it has computed a batch of each of the model's layer shapes."""
    for layer in dict.fromkeys(needs.layers):
        library = check_library(library, layer, needs.heads, needs.dtype, needs.page_size, needs.device)
    return library


_BACKENDS: dict[str, Callable[[AttentionNeeds], Backend]] = {"triton": _triton, "flash": _flash}
"""What `auto` chooses from on a GPU."""
