"""`batchgen doctor`: what this machine has, how fast it is, whether a job runs on it, and what is missing."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from rich.text import Text

from batchgen import __version__
from batchgen.bench.floors import measure_bandwidth, measure_matmul
from batchgen.bench.machine import compiler_name, cpu_name, versions
from batchgen.demo import model_path
from batchgen.engine.engine import Engine
from batchgen.errors import BatchgenError
from batchgen.kernels.cpu.build import cache_folder
from batchgen.kernels.cpu.library import missing
from batchgen.kernels.device import cpu_quota
from batchgen.library_settings import processors
from batchgen.request.printable import format_size
from batchgen.user_cache import library_version

_LIBRARIES: Final = ("triton", "transformers", "tokenizers", "pyarrow", "numpy", "xgrammar", "llguidance")
_FEATURES: Final = (
    "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_bf16", "amx_int8",
    "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip
"""Sets of instructions that kernels or torch use, in Linux's words."""
_PURPOSES: Final = {
    "gpu": "the kernels of a GPU",
    "media": "rows with images and sounds",
    "remote": "files at s3://, gs://, az:// and https://",
    "gguf": "models in GGUF files",
    "sentencepiece": "models with tokenizer.model and no tokenizer.json",
    "report": "pictures of benchmark results",
    "ray": "jobs on a Ray cluster",
    "lm-eval": "the tasks of EleutherAI's harness",
}
"""Optional set of packages -> what needs it."""
_LITTLE_DISK: Final = 1 << 30
_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What was found; names are those of the JSON object."""

    ready: bool
    """Whether a job ran."""
    versions: dict[str, str | None]
    processor: dict[str, Any]
    """Name, number of processors, threads, instructions, and bytes of memory in all and free."""
    gpus: list[dict[str, Any]]
    driver: str | None
    compiler: str | None
    """Path and version of the C++ compiler."""
    device: str
    """Device that a job takes."""
    kernels: str | None
    """Kernels that a small job took."""
    job_seconds: float | None
    """Seconds of that job, with its start."""
    products_per_second: float
    """FLOP/s of matrix products, the best of what was tried."""
    products: str
    """How they were computed."""
    copy_bytes_per_second: float
    """Bytes read and written per second."""
    disks: dict[str, int]
    """Folder -> free bytes."""
    hub_cache: dict[str, Any]
    """Folder of the hub's models here, their names, and whether the hub may be asked."""
    missing: list[str]
    """What is missing, what for, and how to get it."""
    problems: list[str]
    """Why jobs cannot run, or may fail."""


def examine() -> DoctorReport:
    """Look at the machine, measure it, and run a small job. Compiles the CPU kernels if that is not done yet."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels, seconds, problem = _run_job()
    rate, products = measure_matmul(torch.bfloat16, device)
    disks = {str(folder): shutil.disk_usage(folder).free for folder in (Path.cwd(), Path(tempfile.gettempdir()))}
    problems = [] if problem is None else [problem]
    problems += [f"{folder} has only {format_size(free)} free" for folder, free in disks.items() if free < _LITTLE_DISK]
    if not os.access(Path.cwd(), os.W_OK):
        problems.append(f"{Path.cwd()} cannot be written: name outputs elsewhere with -o")
    compiler = compiler_name()
    return DoctorReport(
        ready=problem is None,
        versions={"batchgen": __version__, **versions(), **{name: library_version(name) for name in _LIBRARIES}},
        processor=_processor(),
        gpus=list(_gpus()),
        driver=_driver(),
        compiler=compiler,
        device=str(device),
        kernels=kernels,
        job_seconds=seconds,
        products_per_second=rate,
        products=products,
        copy_bytes_per_second=measure_bandwidth(device),
        disks=disks,
        hub_cache=_hub_cache(),
        missing=list(_missing(compiler, on_gpu=device.type == "cuda")),
        problems=problems,
    )


def figures(report: DoctorReport) -> list[tuple[str, Text]]:
    """The report as labelled figures for people."""
    cpu, hub = report.processor, report.hub_cache
    stated = ", ".join(f"{name} {number}" for name, number in report.versions.items() if number is not None)
    memory = f"{format_size(cpu['memory'])} of memory, {format_size(cpu['free'])} free"
    found = [
        ("versions", stated),
        ("processor", f"{cpu['name']}: {cpu['processors']} processors, {cpu['threads']} threads, {memory}"),
        ("instructions", " ".join(cpu["features"]) or "not known on this system"),
    ]
    for gpu in report.gpus:
        size = f"{format_size(gpu['memory'])} of memory, {format_size(gpu['free'])} free"
        found.append(("GPU", f"{gpu['name']}, compute capability {gpu['capability']}, {size}"))
    if not report.gpus:
        found.append(("GPU", "none that torch can use"))
    if report.driver is not None:
        found.append(("driver", report.driver))
    found += [
        ("compiler", report.compiler or "none"),
        ("kernels", report.kernels or "none: the job below failed"),
        ("products", f"{report.products_per_second / 1e9:,.0f} GFLOP/s ({report.products}) on {report.device}"),
        ("copies", f"{report.copy_bytes_per_second / 1e9:,.1f} GB/s read and written on {report.device}"),
        *(("disk", f"{format_size(free)} free in {folder}") for folder, free in report.disks.items()),
        ("hub cache", f"{len(hub['models'])} models in {hub['folder']}{'' if hub['online'] else ', offline'}"),
        *(("", name) for name in hub["models"][:5]),
    ]
    lines = [(label, Text(text)) for label, text in found]
    lines += [("missing" if not i else "", Text(line, style="yellow")) for i, line in enumerate(report.missing)]
    lines += [("problem", Text(line, style="red")) for line in report.problems]
    ran = f"yes: a job with the demonstration model ran in {report.job_seconds or 0:.1f} s"
    ready, style = (ran, "green") if report.ready else ("no: see the problem", "red")
    return [*lines, ("ready", Text(ready, style=style))]


def _run_job() -> tuple[str | None, float | None, str | None]:
    """(kernels, seconds, None) of a small job that ran, or what went wrong as the last one."""
    began = time.perf_counter()
    try:
        with warnings.catch_warnings(action="ignore"):
            engine = Engine(str(model_path()))
            rows = [{"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_new_tokens": _TOKENS}]
            (answer,) = engine.generate(rows)
    except BatchgenError as error:
        return None, None, str(error)
    except Exception as error:  # drivers and libraries raise many types
        return None, None, f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    if answer.error is not None:
        return None, None, answer.error.message
    return engine.kernels, time.perf_counter() - began, None


def _processor() -> dict[str, Any]:
    flags: set[str] = set()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        flags = {word for line in re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.M) for word in line.split()}
    memory = psutil.virtual_memory()
    return {
        "name": cpu_name(),
        "processors": min(processors(), cpu_quota() or processors()),
        "threads": torch.get_num_threads(),
        "features": [name for name in _FEATURES if name in flags],
        "memory": memory.total,
        "free": memory.available,
    }


def _gpus() -> Iterator[dict[str, Any]]:
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        with suppress(RuntimeError):  # another process may hold it
            free, total = torch.cuda.mem_get_info(number)
            yield {"name": about.name, "capability": f"{about.major}.{about.minor}", "memory": total, "free": free}


def _driver() -> str | None:
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        if match := re.search(r"\b\d+\.\d+(\.\d+)?\b", text):
            return f"{match[0]}, torch is built for CUDA {torch.version.cuda or '(none: a CPU build)'}"
    return None


def _hub_cache() -> dict[str, Any]:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    names = [path.name for path in folder.glob("models--*")] if folder.is_dir() else []
    models = sorted(name.removeprefix("models--").replace("--", "/") for name in names)
    return {"folder": str(folder), "models": models, "online": not constants.HF_HUB_OFFLINE}


def _missing(compiler: str | None, *, on_gpu: bool) -> Iterator[str]:
    """What is missing, each with what needs it and how to get it."""
    if not on_gpu and (reason := missing()) is not None:
        remedy = f"their folder is {cache_folder()}"
        if compiler is None:
            remedy = "install g++ or clang++ (or set CXX), for example apt install g++"
        yield f"the compiled kernels, which make a CPU fast: {reason}; {remedy}"
    if any(Path("/dev").glob("nvidia[0-9]*")) and not on_gpu:
        yield "a torch that can use the GPU of this machine: pip install torch, without a constraints file for CPUs"
    try:
        named = requires("batchgen") or []
    except PackageNotFoundError:  # a copy that is not installed
        return
    packages: dict[str, list[str]] = {}
    for requirement in named:
        if (extra := re.search(r"""extra == ["']([\w-]+)["']""", requirement)) is not None:
            packages.setdefault(extra[1], []).append(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
    for extra_name, purpose in _PURPOSES.items():
        absent = [name for name in packages.get(extra_name, ()) if library_version(name) is None]
        if absent and (extra_name != "gpu" or on_gpu):
            yield f"{', '.join(absent)}, for {purpose}: pip install 'batchgen[{extra_name}]'"
