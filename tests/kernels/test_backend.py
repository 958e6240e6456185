from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from batchgen.kernels import backend as module
from batchgen.kernels import chips, measure
from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.backend import AttentionNeeds, BackendUnavailable, choose_backend
from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.cpu.ops import COMPILED_INVARIANT_OPS, COMPILED_OPS, TILED_OPS
from batchgen.kernels.flash.attention import FlashAttention
from batchgen.kernels.gpu import ops as gpu_ops
from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.gpu.deterministic_attention import DeterministicTritonAttention
from batchgen.kernels.gpu.matmul import linear
from batchgen.kernels.gpu.ops import TRITON_INVARIANT_OPS, TRITON_OPS
from batchgen.kernels.measure import TypicalStep
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.kernels.types import Graphs, LayerKV
from tests.kernels.flash.fake_flash import Fakes, fakes

CPU = torch.device("cpu")
LAYER = LayerKV(2, 16, 16)
ON_CPU = AttentionNeeds(CPU, None, (LAYER,) * 2, 4, torch.float16, 16)
# Fakes run on the CPU: only the capability says that there is a GPU.
ON_HOPPER = replace(ON_CPU, capability=(9, 0))
STEP = TypicalStep(LAYER, 4, torch.float16, 16, CPU, rows=3, context=40, shared=32, chunk=5)
TRITON = f"triton {triton.__version__}"
NO_HALF = "it supports bfloat16 and float32, not float16 (see --dtype)"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    with fakes(monkeypatch) as made:
        yield made


@pytest.fixture
def library(fake: Fakes, tmp_path: Path) -> str:
    return str(fake.write(tmp_path / "_vllm_fa3_C.abi3.so", 3))


class Clock:
    """A timer that runs the call and then returns a given time, by the class of the attention."""

    def __init__(self, **milliseconds: float) -> None:
        self.milliseconds = milliseconds
        self.timed: list[str] = []

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        name = type(call.func.__self__).__name__  # type: ignore[attr-defined]
        self.timed.append(name)
        return self.milliseconds[name]


# By name


def reason(name: str, needs: AttentionNeeds, remedy: str | None = None) -> str:
    with pytest.raises(BackendUnavailable) as refused:
        choose_backend(name, needs)
    assert remedy is None or refused.value.remedy == remedy
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "needs", "found", "attention", "ops"),
    [
        ("torch", ON_CPU, "torch", TorchAttention, TORCH_OPS),
        ("torch", ON_HOPPER, "torch", TorchAttention, TORCH_OPS),
        ("triton", ON_CPU, TRITON, TritonAttention, TRITON_OPS),
        ("auto", ON_CPU, f"torch (no compiled: {NO_HALF})", TorchAttention, TORCH_OPS),
    ],
)
def test_named_backends(name: str, needs: AttentionNeeds, found: str, attention: object, ops: Ops) -> None:
    chosen = choose_backend(name, needs)
    assert (chosen.name, chosen.description, chosen.attention) == (found.split()[0], found, attention)
    assert chosen.ops is ops


@pytest.mark.skipif(not loaded(), reason=str(missing()))
@pytest.mark.parametrize(("name", "dtype"), [("auto", torch.float32), ("compiled", torch.bfloat16)])
def test_compiled_kernels_are_used_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    chosen = choose_backend(name, replace(ON_CPU, dtype=dtype))
    assert chosen.name == "compiled"
    assert chosen.description.startswith("compiled ")
    assert chosen.ops is COMPILED_OPS


def test_torch_is_used_on_a_cpu_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing", lambda: "no C++ compiler was found")
    needs = replace(ON_CPU, dtype=torch.float32)
    chosen = choose_backend("auto", needs)
    assert chosen.ops is TORCH_OPS
    assert chosen.description == "torch (no compiled: no C++ compiler was found)"
    remedy = "install g++ or clang++, set CXX to a compiler, or leave the option out"
    assert reason("compiled", needs, remedy) == "no C++ compiler was found"


def test_flash_with_a_library(library: str, fake: Fakes) -> None:
    needs = replace(ON_HOPPER, flash_library=library)
    chosen = choose_backend("flash", needs)
    assert (chosen.name, chosen.description) == ("flash", f"flash-attn 3 of {library}")
    assert chosen.ops is TRITON_OPS
    assert chosen.executors == choose_backend("triton", needs).executors != (), "decode steps replay Triton's graphs"
    pool, batch, _ = STEP.sample(grouped=True)
    assert isinstance(chosen.attention(pool, batch), FlashAttention)
    assert choose_backend("flash", replace(needs, page_size=8)).description == f"flash-attn 3 of {library}"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match="'fast'; use one of auto, flash, triton, compiled, torch"):
        choose_backend("fast", ON_CPU)


# Reasons

OLD_GPU = "it needs a GPU of compute capability 8.0 or more, and this one has 7.5"
NO_LIBRARY = "vLLM is not installed; the package vllm_flash_attn is not installed"
NO_TILE = "no attention tile for heads of 512; the largest takes 256"


@pytest.mark.parametrize(
    ("name", "changes", "message", "remedy"),
    [
        ("compiled", {"capability": None}, NO_HALF, None),
        ("compiled", {}, "it runs on CPUs only, and this run computes on a GPU", None),
        ("triton", {"capability": (7, 5)}, OLD_GPU, None),
        ("flash", {"capability": (7, 5)}, OLD_GPU, None),
        ("triton", {"layers": (LAYER, LayerKV(1, 512, 512))}, NO_TILE, None),
        ("flash", {"capability": None}, "it needs an NVIDIA GPU, and this run computes on the CPU", None),
        (
            "flash",
            {"flash_library": None},
            NO_LIBRARY,
            "install vLLM, give the path of its compiled library with --flash-library, or leave the option out",
        ),
        ("flash", {"dtype": torch.float32}, "it supports bfloat16 and float16, not float32 (see --dtype)", ""),
        (
            "flash",
            {"layers": (LAYER, LayerKV(2, 20, 20))},
            "it needs a head size that is a multiple of 8, and this model's is 20",
            None,
        ),
        (
            "flash",
            {"capability": (8, 0), "page_size": 8},  # a page size that only version 3 supports
            "it needs a page size that is a multiple of 16, not 8 (see --page-size)",
            None,
        ),
    ],
)
def test_reasons(name: str, changes: dict[str, Any], message: str, remedy: str | None, library: str) -> None:
    assert reason(name, replace(ON_HOPPER, **{"flash_library": library, **changes}), remedy) == message


def test_triton_without_a_gpu_and_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert reason("triton", ON_CPU).startswith("it needs an NVIDIA GPU, and this run computes on the CPU (TRITON_")


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    missing = "Triton is not installed"
    remedy = "it comes with `pip install 'batchgen[gpu]'`"
    assert reason("triton", ON_HOPPER, remedy) == missing
    assert reason("flash", replace(ON_HOPPER, flash_library=library), remedy) == (
        f"its shared prefixes are computed by Triton, which cannot run: {missing}"
    )


class NoCompiler(Exception):
    """An error that derives from none of Python's usual types."""


@pytest.mark.parametrize("name", ["triton", "flash"])
def test_a_gpu_on_which_no_kernel_starts(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise NoCompiler("gcc: not found\nand more")

    monkeypatch.setattr(gpu_ops, "TRITON_OPS", replace(TRITON_OPS, rms_norm=fails))
    needs = replace(ON_HOPPER, flash_library=library)
    message = reason(name, needs, "Triton needs a C compiler (gcc) and Python's headers")
    assert message.endswith("its kernels do not start here: gcc: not found")
    chosen = choose_backend("auto", needs, STEP, Clock())
    assert chosen.name == "torch"
    assert "no triton: its kernels do not start here: gcc: not found" in chosen.description


def test_a_gpu_on_which_kernels_compute_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(TRITON_OPS, rms_norm=lambda *given: torch.full((1, 16), math.nan))
    monkeypatch.setattr(gpu_ops, "TRITON_OPS", wrong)
    assert reason("triton", ON_HOPPER) == "its kernels compute wrong results here"


# auto


def test_the_faster_backend_is_used_and_described(library: str) -> None:
    needs = replace(ON_HOPPER, flash_library=library)
    clock = Clock(TritonAttention=0.21, FlashAttention=0.27)
    chosen = choose_backend("auto", needs, STEP, clock)
    assert chosen.name == "triton"
    assert chosen.description == (f"{TRITON} (faster than flash-attn 3 of {library}: 0.21 ms against 0.27 ms a layer)")
    assert clock.timed == ["TritonAttention", "FlashAttention"] * 2  # without the group, and with it
    chosen = choose_backend("auto", needs, STEP, Clock(TritonAttention=0.21, FlashAttention=0.1234))
    assert chosen.name == "flash"
    assert chosen.description == f"flash-attn 3 of {library} (faster than {TRITON}: 0.123 ms against 0.21 ms a layer)"


def test_nothing_is_measured_without_a_library_or_a_step(library: str) -> None:
    assert choose_backend("auto", ON_HOPPER, STEP, Clock()).description == f"{TRITON} (no flash: {NO_LIBRARY})"
    assert choose_backend("auto", replace(ON_HOPPER, flash_library=library)).description == TRITON


def test_a_backend_that_fails_in_the_measurement_is_not_used(library: str, fake: Fakes) -> None:
    def timer(call: Callable[[], object]) -> float:
        if "Triton" in str(call):
            raise RuntimeError("out of shared memory\nand more")
        return 1.0

    chosen = choose_backend("auto", replace(ON_HOPPER, flash_library=library), STEP, timer)
    assert chosen.description == f"flash-attn 3 of {library} (no triton: out of shared memory)"


def test_torch_is_used_where_nothing_else_runs() -> None:
    chosen = choose_backend("auto", replace(ON_HOPPER, layers=(LayerKV(1, 512, 512),)), STEP, Clock())
    assert chosen.name == "torch"
    assert chosen.description.startswith(f"torch (no triton: {NO_TILE};")


# Chips that are not in the table


@pytest.fixture
def unknown_chip(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that the table does not list, with three candidate tunings; steps still run on the CPU."""
    device = torch.device("cuda", 0)
    default = chips.tuning_of("default")
    tunings = [default, replace(default, chip="sm_1"), replace(default, chip="sm_2")]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 9))
    properties = SimpleNamespace(shared_memory_per_block_optin=1 << 18)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(measure, "candidate_tunings", lambda shared: tunings if shared == 1 << 18 else [])
    monkeypatch.setattr(chips, "_measured", {})
    monkeypatch.setattr(module, "_check_launch", lambda ops, device: None)
    return device


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_tiles_of_an_unknown_chip_are_measured_once(name: str, unknown_chip: torch.device) -> None:
    answers = {"default": 3.0, "sm_1": math.inf, "sm_2": 2.0}
    timed = []

    def timer(call: Callable[[], object]) -> float:
        chip = call.func.__self__._tuning.chip  # type: ignore[attr-defined]
        timed.append(chip)
        if answers[chip] == math.inf:
            raise RuntimeError("out of resource: shared memory")
        return answers[chip]

    needs = replace(ON_HOPPER, device=unknown_chip)
    choose_backend(name, needs, STEP, timer)
    assert chips.chip_tuning(unknown_chip).chip == "sm_2"
    assert timed == ["default", "default", "sm_1", "sm_1", "sm_2", "sm_2"]
    choose_backend(name, needs, STEP, timer)
    assert len(timed) == 6


def test_latents_are_for_triton_on_a_gpu(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_check_launch", lambda *_: None)
    needs = replace(ON_HOPPER, layers=(LayerKV(1, 64, 48, latent=True),), flash_library=library)
    chosen = choose_backend("auto", needs)
    assert chosen.name == "triton"
    assert "no flash: it does not support values that are part of the keys" in chosen.description
    wide = replace(needs, layers=(LayerKV(1, 1088, 1024, latent=True),))
    assert reason("triton", wide) == "no attention tile for heads of 1024; the largest takes 512"


def test_tiles_are_not_measured_without_a_step(unknown_chip: torch.device) -> None:
    choose_backend("triton", replace(ON_HOPPER, device=unknown_chip))
    assert chips.chip_tuning(unknown_chip).chip == "default"


def test_a_deterministic_run_on_a_gpu_uses_triton_with_a_product_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_check_launch", lambda *_: None)
    needs, clock = replace(ON_HOPPER, deterministic=True), Clock()
    for name in ("auto", "triton"):
        chosen = choose_backend(name, needs, STEP, clock)
        assert chosen.name == "triton"
        assert chosen.description.endswith(", batch-invariant")
        assert chosen.attention is DeterministicTritonAttention
        assert chosen.ops is TRITON_INVARIANT_OPS
        assert [type(support) for support in chosen.executors] == [Graphs]
        assert chosen.ops.linear is linear
    assert not clock.timed
    remedy = "leave one of the two out"
    assert reason("flash", needs, remedy) == "`--deterministic`: flash splits its work according to the batch"
    for name in ("torch", "compiled"):
        assert reason(name, needs, remedy) == "`--deterministic` needs the triton attention on a GPU"
    wide = replace(needs, layers=(LayerKV(1, 512, 512),))
    assert reason("auto", wide) == NO_TILE
    latent = replace(needs, layers=(LayerKV(1, 24, 16, latent=True),))
    assert "no batch-invariant kernel for multi-head latent attention" in reason("auto", latent)


def test_a_deterministic_run_on_a_cpu() -> None:
    needs = replace(ON_CPU, deterministic=True, dtype=torch.float32)
    plain = choose_backend("torch", needs)
    assert choose_backend("auto", needs) is plain
    assert plain.ops.linear is None
    assert choose_backend("triton", needs).ops.linear is linear


@pytest.mark.skipif(not loaded(), reason="no C++ compiler here")
def test_a_deterministic_run_of_a_native_model_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = replace(ON_CPU, deterministic=True, dtype=torch.float32, native=True)
    chosen = choose_backend("auto", needs)
    assert chosen.name == choose_backend("compiled", needs).name == "compiled"
    assert chosen.description.endswith(", batch-invariant")
    assert chosen.ops is COMPILED_INVARIANT_OPS
    assert chosen.group_saving is None, "a measurement may differ between runs"
    assert choose_backend("torch", needs).name == "torch"
    expected = "`--deterministic` runs models of the transformers library with plain PyTorch on a CPU"
    assert reason("compiled", replace(needs, native=False), "leave one of the two out") == expected
    half = choose_backend("auto", replace(needs, dtype=torch.float16))
    assert half.description.startswith("torch, batch-invariant (no compiled: it supports bfloat16 and float32")

    monkeypatch.setattr(module, "missing", lambda: "there is no compiler")
    alone = choose_backend("auto", needs)
    assert alone.description == "torch, batch-invariant (no compiled: there is no compiler)"
    assert alone.ops is TILED_OPS
