"""Ahead-of-time compilation of kernels for chips that are not present, and the resources that they need.

Launchers are called with tensors on the meta device; their launches are compiled with the specialisation of a real
launch, by a driver that only names the chip. Needs Triton without its interpreter.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from batchgen.kernels.chips import compiling_for
from batchgen.kernels.gpu.launch import INTERPRETED, recording
from tests.kernels.gpu.ptx import widest_load

CHIPS = ("sm_80", "sm_89", "sm_90")
CASES = f"{__package__}.aot_cases"
"""The module of the cases that are compiled."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class NamedChip:
    """A driver that only names its chip. The device number is the capability, so that chips share no cache."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def chip(name: str) -> Iterator[None]:
    """Compile for `name`, with its tuning, until the block ends."""
    assert not INTERPRETED, "ahead-of-time compilation needs Triton without its interpreter"
    before = driver._active
    driver.set_active(NamedChip(int(name.removeprefix("sm_"))))
    try:
        with compiling_for(name):
            yield
    finally:
        driver._active = before


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel on a chip, as recorded from a launcher."""

    chip: str
    case: str
    site: str
    """file:line of the call of `launch`."""
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    key: str
    """The specialisation: equal for launches that run the same machine code."""

    @property
    def digest(self) -> str:
        """Hash that identifies the machine code: source with everything it calls, specialisation, chip, Triton."""
        # Triton's install path is in its options, but does not affect the code.
        key = self.key.replace(str(Path(triton.__file__).parent), "")
        parts = (triton.__version__, self.chip, self.kernel.cache_key, key)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """Name of the kernel, `<file>.<function>`."""
        return f"{self.kernel.__module__.rsplit('.', 1)[-1]}.{self.kernel.__name__}"

    @property
    def tile(self) -> str:
        """The constants that are tile sizes, with warps and stages."""
        words = ("BLOCK", "ROWS", "COLUMNS", "INNER", "STEP", "num_")
        return " ".join(
            f"{name.removeprefix('num_')}={n}" for name, n in self.constants.items() if name.startswith(words)
        )

    def specialised(self) -> list[str]:
        """Names of integer arguments whose value selects the machine code: 1, multiples of 16, others."""
        named = zip(self.kernel.params, self.args, strict=False)
        given = [(p, v) for p, v in named] + [
            (p, self.constants[p.name]) for p in self.kernel.params if p.name in self.constants
        ]
        return [p.name for p, v in given if type(v) is int and not p.is_constexpr and not p.do_not_specialize]


def launches(name: str, thunk: Callable[[], None], case: str) -> list[Launch]:
    """The launches of `thunk` on chip `name`. Nothing is compiled."""
    found: list[Launch] = []
    keys: list[str] = []

    def skip(*, key: str, **_: Any) -> bool:
        keys.append(key)
        return True

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        triton.knobs.runtime.jit_cache_hook = skip
        try:
            kernel.warmup(*args, grid=grid, **constants)
        finally:
            triton.knobs.runtime.jit_cache_hook = None
        caller = sys._getframe(2)
        site = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
        found.append(Launch(name, case, site, kernel, grid, args, constants, keys[-1]))

    with chip(name), recording(record):
        thunk()
    return found


def variants(
    chips: tuple[str, ...], modules: list[str], only: str = "", cases: str = "launches"
) -> tuple[list[Launch], set[str]]:
    """Every distinct specialisation of the modules' cases, and every call site of `launch` that was reached.

    Args:
        chips: chips to compile for.
        modules: modules with a function that yields (name, thunk); a thunk calls a launcher with meta tensors.
        only: substring of the names of kernels or cases; "" for all.
        cases: name of the function.
    """
    distinct: dict[tuple[str, str, str], Launch] = {}
    sites: set[str] = set()
    for name in chips:
        with chip(name):
            for case, thunk in (pair for module in modules for pair in getattr(import_module(module), cases)()):
                for launch in launches(name, thunk, case):
                    sites.add(launch.site)
                    if only in case or only in launch.name:
                        distinct.setdefault((name, launch.name, launch.key), launch)
    return list(distinct.values()), sites


def beyond(chips: tuple[str, ...], compiled: list[Launch]) -> list[str]:
    """Launches of steps of many sizes whose machine code is not among the compiled launches."""
    there = {(x.chip, x.name, x.key) for x in compiled}
    steps, _ = variants(chips, [CASES], cases="steps")
    return [f"{x.name} ({x.case}) on {x.chip}" for x in steps if (x.chip, x.name, x.key) not in there]


@dataclass(frozen=True)
class Resources:
    """Resources that one compiled kernel needs."""

    kernel: str
    case: str
    chip: str
    tile: str
    """Its constants that are tile sizes, warps and stages."""
    registers: int
    stack: int
    """Bytes of stack per thread, for spilled registers."""
    shared: int
    """Bytes of shared memory per block."""
    products: str
    """Tensor-core instructions: "wgmma" (Hopper), "mma" or ""."""
    load: int
    """Most bytes that a thread loads from global memory by one instruction."""
    float64: int
    """Number of float64 instructions."""
    digest: str
    """Hash of the machine code (`Launch.digest`)."""
    error: str = ""
    """Why it did not compile."""
    seconds: float = 0.0
    """Compile time; 0 for a row reused from the table."""


def compile_launch(launch: Launch) -> Resources:
    """Compile for the launch's chip and read the resources of the machine code."""
    began = time.perf_counter()
    try:
        with chip(launch.chip):
            compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.constants)
    except Exception as error:  # compiler errors of any type are entries of the table
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
        return Resources(launch.name, launch.case, launch.chip, launch.tile, 0, 0, 0, "", 0, 0, launch.digest, why)
    assert compiled.metadata.target.arch == int(launch.chip.removeprefix("sm_"))
    registers, stack = machine_code_needs(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    products = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else ""
    return Resources(
        kernel=launch.name,
        case=launch.case,
        chip=launch.chip,
        tile=launch.tile,
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        products=products,
        load=widest_load(ptx),
        float64=len(re.findall(r"^\s+(?:@%p\d+ )?[a-z][\w.]*\.f64\b", ptx, re.MULTILINE)),
        digest=launch.digest,
        seconds=round(time.perf_counter() - began, 2),
    )


def machine_code_needs(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack of the one kernel in `cubin`."""

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert used, text
    return int(used[1]), int(used[2])
