"""Kernel backends, and the choice of one at the start of a run.

- `torch`: plain PyTorch, on any device.
- `compiled`: C++ for the CPU, from the wheel or built on the machine that runs it.
- `triton`: Triton on a GPU, or in Triton's interpreter on a CPU for tests.
- `flash`: vllm-flash-attn for attention outside of CUDA graphs, Triton for everything else.
- `auto`: on a CPU compiled kernels where there are any, else PyTorch; on a GPU the faster of triton and flash for this
  run, by measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec

import torch

from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.chips import ChipTuning, chip_tuning, fixed_tuning
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.build import about
from batchgen.kernels.cpu.command_buffer import CommandBuffers
from batchgen.kernels.cpu.decoder import compiled_decoder
from batchgen.kernels.cpu.library import DTYPES, library_file, missing
from batchgen.kernels.cpu.ops import COMPILED_INVARIANT_OPS, COMPILED_OPS, TILED_OPS
from batchgen.kernels.cpu.packed_pages import packed_pool
from batchgen.kernels.cpu.prefix_group_cost import ROWS, measured_saving
from batchgen.kernels.decoder import DecoderWeights, FusedDecoder
from batchgen.kernels.flash.attention import flash_factory
from batchgen.kernels.flash.check import check_library, flash_refusal
from batchgen.kernels.flash.library import FlashLibrary, FlashUnavailable, find_flash, first_line, versions_for
from batchgen.kernels.measure import Timer, TypicalStep, device_timer, layer_milliseconds, tune_chip
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.kernels.types import AttentionBatch, Graphs, KVPool, LayerKV, PagedAttention

GPU_BACKENDS = ("flash", "triton")
"""Backends that need a GPU."""

AttentionFactory = Callable[[KVPool, AttentionBatch], PagedAttention]
"""Makes the attention of one step."""


class BackendUnavailable(RuntimeError):
    """The backend that was asked for is missing in this build, machine or model; the message says why."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy
        """What the user can do about it, where that is known."""


@dataclass(frozen=True, slots=True)
class GroupSaving:
    """The measured saving from which a prefix group pays off."""

    rows: int
    """Rows of the group that is measured; see `plan.config`."""
    measure: Callable[[], int]
    """Number of reads of cached positions that the group must save."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A set of kernels for a run."""

    name: str
    """"torch", "compiled", "triton" or "flash"."""
    description: str
    """Text for footers and reports: versions, and why `auto` chose this backend."""
    attention: AttentionFactory
    ops: Ops
    """All operations except attention."""
    executors: tuple[CommandBuffers | Graphs, ...] = ()
    """Ways to run a step other than launching its kernels one by one, each with what its executor needs, in order of
    preference."""
    group_saving: GroupSaving | None = None
    """When a prefix group pays off; None: not measured."""
    extend_pool: Callable[[KVPool, int], KVPool] = lambda pool, room: pool
    """The pool with what the backend keeps next to it, in as many bytes of memory as are left."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Requirements of a model and its pool on a backend."""

    device: torch.device
    capability: tuple[int, int] | None
    """Compute capability of the GPU (see `capability_of`); None on a CPU."""
    layers: tuple[LayerKV, ...]
    heads: int
    """Query heads per layer."""
    dtype: torch.dtype
    page_size: int
    flash_library: str | None = None
    """Path of a flash library that the user gave."""
    deterministic: bool = False
    """Whether each row's results must be bitwise independent of the other rows of its batch."""
    cache_dtype: torch.dtype | None = None
    """Dtype of keys and values; None: `dtype`."""
    native: bool = False
    """Whether the model is one of `models.native.decoder`, whose layers the compiled kernels can run as a whole."""


TORCH = Backend("torch", "torch", TorchAttention, TORCH_OPS)
"""Plain PyTorch: for CPUs without a compiler, and the reference of the other backends."""

DETERMINISTIC = Backend("torch", "torch, batch-invariant", TorchAttention, TILED_OPS)
"""Batch-invariant plain PyTorch, for models that run in tiles (`models.deterministic`)."""


def fused_decoder(weights: DecoderWeights) -> FusedDecoder | None:
    """A decoder that runs all layers in one call, for the steps that it `takes`; None if no backend has one."""
    return compiled_decoder(weights)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of the GPU behind `device`; None if it is not an NVIDIA GPU."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


def choose_backend(
    name: str, needs: AttentionNeeds, step: TypicalStep | None = None, timer: Timer | None = None
) -> Backend:
    """The backend for a run with the attention backend `name`.

    Args:
        name: one of `ATTENTION_BACKENDS`.
        needs: the model's requirements.
        step: the step to measure on: tile shapes of a chip that `chips.toml` does not list, and for `auto` the
            backends. Without it nothing is measured, and `auto` takes the first available, Triton before flash.
        timer: times calls; None: the device's clock.

    Raises:
        BackendUnavailable: `name` is unknown or cannot run here; the message says why.
    """
    if name not in ATTENTION_BACKENDS:
        raise BackendUnavailable(f"unknown attention backend {name!r}; use one of {', '.join(ATTENTION_BACKENDS)}")
    if needs.deterministic:
        return _deterministic(name, needs)
    if name == "auto" and needs.capability is None:
        return _or_torch(_compiled, needs, TORCH) if needs.device.type == "cpu" else TORCH
    timer = timer or device_timer(needs.device)
    if name != "auto":
        named = _BACKENDS[name](needs)
        if name in GPU_BACKENDS:
            tune_chip(needs.device, step, timer)
        return named
    backends: list[Backend] = []
    missing: list[str] = []
    for other in reversed(GPU_BACKENDS):
        try:
            backends.append(_BACKENDS[other](needs))
        except BackendUnavailable as problem:
            missing.append(f"no {other}: {problem}")
    if backends:
        tune_chip(needs.device, step, timer)
    if len(backends) > 1 and step is not None:
        backends, missing = _by_speed(backends, step, timer)
    best = backends[0] if backends else TORCH
    return replace(best, description=f"{best.description} ({'; '.join(missing)})") if missing else best


def _or_torch(compiled: Callable[[AttentionNeeds], Backend], needs: AttentionNeeds, plain: Backend) -> Backend:
    """The compiled backend where it can be built, else plain PyTorch with the reason."""
    try:
        return compiled(needs)
    except BackendUnavailable as problem:
        return replace(plain, description=f"{plain.description} (no compiled: {problem})")


def _compiled(needs: AttentionNeeds) -> Backend:
    """The C++ backend of this CPU, built on first use."""
    if needs.device.type != "cpu" or needs.capability is not None:
        raise BackendUnavailable("it runs on CPUs only, and this run computes on a GPU")
    if needs.cache_dtype is not None:
        raise BackendUnavailable("it reads keys and values in the dtype of the run (--kv-dtype)")
    if needs.dtype not in DTYPES:
        dtype = str(needs.dtype).removeprefix("torch.")
        raise BackendUnavailable(f"it supports bfloat16 and float32, not {dtype} (see --dtype)")
    reason = missing()
    if reason is not None:
        raise BackendUnavailable(reason, "install g++ or clang++, set CXX to a compiler, or leave the option out")
    saving = None
    if needs.layers:
        sizes = (needs.layers[0], needs.heads, needs.dtype, needs.page_size, len(needs.layers))
        saving = GroupSaving(ROWS, partial(measured_saving, *sizes))
    return Backend(
        "compiled",
        f"compiled {about(library_file())}",
        CompiledAttention,
        COMPILED_OPS,
        group_saving=saving,
        extend_pool=packed_pool,
        executors=(CommandBuffers(),),
    )


def _deterministic(name: str, needs: AttentionNeeds) -> Backend:
    """The batch-invariant backend. Nothing is measured, so that two runs choose the same kernels."""
    on_gpu = needs.capability is not None or needs.device.type != "cpu"
    refuse_deterministic(name, on_gpu)
    if on_gpu or name == "triton":
        return _deterministic_triton(needs)
    if name == "torch" or (name == "auto" and not needs.native):
        return DETERMINISTIC
    if name == "compiled":
        return _deterministic_compiled(needs)
    return _or_torch(_deterministic_compiled, needs, DETERMINISTIC)


def refuse_deterministic(name: str, on_gpu: bool) -> None:
    """Reject attention backends that cannot run with `--deterministic` on any machine.

    Raises:
        BackendUnavailable: the backend `name` has no batch-invariant attention.
    """
    remedy = "leave one of the two out"
    if name == "flash":
        raise BackendUnavailable("`--deterministic`: flash splits its work according to the batch", remedy)
    if on_gpu and name in ("torch", "compiled"):
        raise BackendUnavailable("`--deterministic` needs the triton attention on a GPU", remedy)


def _deterministic_compiled(needs: AttentionNeeds) -> Backend:
    """The compiled backend with batch-invariant attention; its products and norms are batch-invariant anyway."""
    compiled = _compiled(needs)
    if not needs.native:
        raise BackendUnavailable(
            "`--deterministic` runs models of the transformers library with plain PyTorch on a CPU",
            "leave one of the two out",
        )
    return Backend(
        "compiled",
        f"{compiled.description}, batch-invariant",
        partial(CompiledAttention, deterministic=True),
        COMPILED_INVARIANT_OPS,
        executors=compiled.executors,
    )


def _deterministic_triton(needs: AttentionNeeds) -> Backend:
    """The Triton backend with tiles that do not depend on the batch, and its own product for linear layers."""
    triton = _triton(needs)
    if any(layer.latent for layer in needs.layers):
        raise BackendUnavailable("`--deterministic`: it has no batch-invariant kernel for multi-head latent attention")
    from batchgen.kernels.gpu.deterministic_attention import DeterministicTritonAttention
    from batchgen.kernels.gpu.ops import TRITON_INVARIANT_OPS
    from batchgen.kernels.gpu.static_attention import StaticPlanner

    _check_tiles(fixed_tuning(needs.device), ("fixed",), needs)
    description = f"{triton.description}, batch-invariant"
    graphs = Graphs(partial(StaticPlanner, make=DeterministicTritonAttention))
    return Backend(triton.name, description, DeterministicTritonAttention, TRITON_INVARIANT_OPS, executors=(graphs,))


def _by_speed(backends: list[Backend], step: TypicalStep, timer: Timer) -> tuple[list[Backend], list[str]]:
    """Backends that ran the step, the fastest first, and remarks on the others."""
    by_name = {backend.name: backend for backend in backends}
    results = layer_milliseconds({name: backend.attention for name, backend in by_name.items()}, step, timer)
    times = {name: result for name, result in results.items() if isinstance(result, float)}
    order = sorted(times, key=lambda name: times[name])
    remarks = [f"no {name}: {result}" for name, result in results.items() if isinstance(result, str)]
    for name in order[1:]:
        took = f"{times[order[0]]:.3g} ms against {times[name]:.3g} ms a layer"
        remarks.insert(0, f"faster than {by_name[name].description}: {took}")
    return [by_name[name] for name in order], remarks


def _triton(needs: AttentionNeeds) -> Backend:
    """The Triton backend."""
    if find_spec("triton") is None:
        raise BackendUnavailable("Triton is not installed", "it comes with `pip install 'batchgen[gpu]'`")
    import triton

    if needs.capability is None and not triton.knobs.runtime.interpret:
        raise BackendUnavailable(
            "it needs an NVIDIA GPU, and this run computes on the CPU "
            "(TRITON_INTERPRET=1 in the environment runs its kernels on a CPU, very slowly, for tests)"
        )
    if needs.capability is not None and needs.capability < (8, 0):
        major, minor = needs.capability
        raise BackendUnavailable(f"it needs a GPU of compute capability 8.0 or more, and this one has {major}.{minor}")
    _check_tiles(chip_tuning(needs.device), ("decode", "prefill"), needs)
    from batchgen.kernels.gpu.attention import TritonAttention
    from batchgen.kernels.gpu.ops import TRITON_OPS
    from batchgen.kernels.gpu.static_attention import StaticPlanner

    if needs.capability is not None:
        _check_launch(TRITON_OPS, needs.device)
    return Backend(
        "triton", f"triton {triton.__version__}", TritonAttention, TRITON_OPS, executors=(Graphs(StaticPlanner),)
    )


def _check_tiles(tuning: ChipTuning, kinds: tuple[str, ...], needs: AttentionNeeds) -> None:
    """Check that every layer has attention tiles of these kinds.

    Raises:
        BackendUnavailable: a layer's heads are too large for every tile.
    """
    from batchgen.kernels.gpu.attention import Heads

    try:
        for layer in needs.layers:
            heads = Heads(needs.heads, layer.kv_heads, layer.key_dim, layer.value_dim, layer.latent)
            for kind in kinds:
                heads.tile(tuning, kind, needs.dtype)
    except ValueError as problem:
        raise BackendUnavailable(str(problem)) from None


def _check_launch(ops: Ops, device: torch.device) -> None:
    """Run one small kernel and check its result.

    Raises:
        BackendUnavailable: the kernel does not build, start or compute correctly; Triton needs a C compiler, for one.
    """
    try:
        out = ops.rms_norm(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-6)
        right = bool(((out - 1).abs() < 1e-3).all())
    except Exception as problem:  # compilers and drivers raise many types
        reason = f"its kernels do not start here: {first_line(problem)}"
        raise BackendUnavailable(reason, "Triton needs a C compiler (gcc) and Python's headers") from None
    if not right:
        raise BackendUnavailable("its kernels compute wrong results here")


@cache
def _flash(needs: AttentionNeeds) -> Backend:
    """The flash backend: vllm-flash-attn, with Triton for shared prefixes, CUDA graphs and other operations."""
    if needs.capability is None:
        raise BackendUnavailable("it needs an NVIDIA GPU, and this run computes on the CPU")
    if needs.cache_dtype is not None:
        raise BackendUnavailable("it reads keys and values in the dtype of the run (--kv-dtype)")
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
        library = find_flash(fitting, needs.flash_library, lambda flash: _accepted(flash, needs))
    except FlashUnavailable as problem:
        raise BackendUnavailable(str(problem), _FLASH_REMEDY) from None
    from batchgen.kernels.gpu.attention import TritonAttention
    from batchgen.kernels.gpu.merge import merge_parts

    factory = flash_factory(library, TritonAttention, merge_parts)
    return Backend("flash", str(library), factory, rest.ops, executors=rest.executors)


_FLASH_REMEDY = "install vLLM, give the path of its compiled library with --flash-library, or leave the option out"


def _accepted(library: FlashLibrary, needs: AttentionNeeds) -> FlashLibrary:
    """The library after it passed the self-test for each of the model's layer shapes."""
    for layer in dict.fromkeys(needs.layers):
        library = check_library(library, layer, needs.heads, needs.dtype, needs.page_size, needs.device)
    return library


_BACKENDS: dict[str, Callable[[AttentionNeeds], Backend]] = {
    "flash": _flash,
    "triton": _triton,
    "compiled": _compiled,
    "torch": lambda needs: TORCH,
}
"""By name: makes the backend for a model, or raises `BackendUnavailable`."""

ATTENTION_BACKENDS = ("auto", *_BACKENDS)
"""Names that `choose_backend` accepts; `auto` takes the fastest available."""
