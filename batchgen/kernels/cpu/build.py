"""Builds `src/` as shared libraries: for this processor in the user's cache folder, or for a wheel in `ready/`.

A library's name holds a digest of its inputs. The sources need no headers of torch or Python, so any C++17 compiler
with OpenMP builds them in seconds. The library is not linked against an OpenMP runtime: it uses the one that torch has
loaded, so that a process has one thread pool and not two that compete for the cores.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SOURCES: Final = Path(__file__).with_name("src")
_FLAGS: Final = (
    "-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_NATIVE: Final = ("-march=native",)
_SECONDS: Final = 300
"""Timeout of the compiler in seconds."""
_KEPT: Final = 8
"""Libraries kept in a folder, for different machines, compilers and versions."""

READY: Final = Path(__file__).with_name("ready")
"""Folder of the libraries that a wheel brings."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of x86-64 processors that a wheel brings a library for."""

    flags: tuple[str, ...]
    """Flags of the compiler."""
    needs: frozenset[str]
    """Instruction sets of the processor, by Linux's names."""


_AVX2: Final = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_AVX512: Final = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI: Final = _AVX512 | {"avx512_vnni"}
VARIANTS: Final[dict[str, Variant]] = {
    "x86-64": Variant(("-march=x86-64",), frozenset({"sse2"})),
    "x86-64-v3": Variant(("-march=x86-64-v3",), _AVX2),
    "x86-64-v4": Variant(("-march=x86-64-v4",), _AVX512),
    "x86-64-v4-vnni": Variant(("-march=x86-64-v4", "-mavx512vnni"), _VNNI),
    "x86-64-v4-bf16": Variant(("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _VNNI | {"avx512_bf16"}),
}
"""Variants by name, the narrowest first."""


class CompilerMissing(RuntimeError):
    """The library cannot be built here; the message says why."""


def find_compiler() -> list[str]:
    """Command of the C++ compiler: the value of `CXX`, else the first of the usual names on the path.

    Raises:
        CompilerMissing: no compiler was found.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        program = shutil.which(command[0])
        if program:
            return [program, *command[1:]]
    if named:
        raise CompilerMissing(f"CXX names {named[0]}, but there is no such program; install it or unset CXX")
    raise CompilerMissing("no C++ compiler was found (c++, g++ or clang++); install one or set CXX")


def cache_folder() -> Path:
    """Folder of the built libraries."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "batchgen" / "kernels"


def built_library(building: Callable[[], AbstractContextManager[None]] = nullcontext, *, again: bool = False) -> Path:
    """Path of the library, which is compiled if it does not exist yet.

    Args:
        building: gives the context in which the compiler runs.
        again: compile even if the library exists, and replace it.

    Raises:
        CompilerMissing: there is no compiler, it fails, or no folder can be written.
    """
    if not hasattr(os, "getuid"):
        raise CompilerMissing("compiled kernels need Linux or macOS")
    compiler = find_compiler()
    name = f"batchgen-{_digest((*_NATIVE, *compiler, _version(compiler[0]), _processor()))}.so"
    if not again:
        for folder in _folders():
            library = folder / name
            if _is_ours(folder) and library.is_file() and library.stat().st_uid == os.getuid():
                with suppress(OSError):
                    library.touch()  # mark as recently used, so that `_prune` keeps it
                return library
    for folder in _folders():
        work = _work_folder(folder)
        if work is None:
            continue
        with building(), work as made_in:
            made = _compile(compiler, _NATIVE, Path(made_in))
            made.replace(folder / name)  # if another process was first, the file is the same
        _prune(folder, folder / name)
        return folder / name
    raise CompilerMissing("no folder for the compiled kernels can be written; set XDG_CACHE_HOME to one that can")


def variants(*, narrower: bool = False) -> list[str]:
    """Names of the variants that use all that the sources know of this processor's instructions; best first.

    Args:
        narrower: name also those that leave some unused.
    """
    features = _features()
    known = {"avx", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni"}  # what the sources distinguish
    if "avx512_vnni" in features:
        known.remove("avx_vnni")
    runs = [name for name, each in reversed(VARIANTS.items()) if each.needs <= features]
    return [name for name in runs if narrower or (features & known) <= VARIANTS[name].needs]


def ready_library(*, narrower: bool = False) -> Path | None:
    """The library of the package for this processor; None if it has none for these sources, or `CXX` is set.

    Args:
        narrower: accept one that leaves instructions of the processor unused.
    """
    if os.environ.get("CXX"):
        return None
    files = (READY / _ready_name(name) for name in variants(narrower=narrower))
    return next((file for file in files if file.is_file()), None)


def build_ready(names: Iterable[str]) -> None:
    """Compile the libraries of these variants that the package does not have, and remove those of other sources.

    Raises:
        CompilerMissing: there is no compiler, or it fails.
        OSError: the package's folder cannot be written.
    """
    compiler, kept = find_compiler(), {_ready_name(name) for name in VARIANTS}
    READY.mkdir(exist_ok=True)
    for old in READY.glob("*.so"):
        if old.name not in kept:
            old.unlink()
    for name in names:
        file = READY / _ready_name(name)
        if not file.is_file():
            with tempfile.TemporaryDirectory(dir=READY) as work:
                _compile(compiler, VARIANTS[name].flags, Path(work)).replace(file)


def _ready_name(variant: str) -> str:
    return f"{variant}-{_digest(VARIANTS[variant].flags)}.so"


def about(library: Path) -> str:
    """What a library was compiled by, or for."""
    if library.parent == READY:
        return f"for {library.stem.rpartition('-')[0]}"
    return f"by {Path(find_compiler()[0]).name}"


def measurements(library: Path) -> Path:
    """Path, less its end, of files with measurements of a library on this processor.

    They are next to it. Those of the package's are in the cache folder, as a package serves several machines and users.
    """
    if library.parent == READY:
        name = f"{library.stem}-{hashlib.sha256(_processor().encode()).hexdigest()[:12]}"
        for folder in _folders():
            if _is_made(folder):
                return folder / name
    return library.with_suffix("")


def _folders() -> Iterator[Path]:
    """Folders that may hold the library, the preferred one first."""
    with suppress(RuntimeError):  # the user has no home directory
        yield cache_folder()
    yield Path(tempfile.gettempdir()) / f"batchgen-kernels-{os.getuid()}"


def _work_folder(folder: Path) -> tempfile.TemporaryDirectory[str] | None:
    """A new temporary folder inside `folder`; None if it cannot be created or other users could write to `folder`."""
    try:
        return tempfile.TemporaryDirectory(dir=folder) if _is_made(folder) else None
    except OSError:
        return None


def _is_made(folder: Path) -> bool:
    """Whether the folder exists, or could be created, and is this user's alone."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _is_ours(folder)


def _is_ours(folder: Path) -> bool:
    """Whether it is a real folder, not a link, that only this user can write to: code is loaded from it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _prune(folder: Path, made: Path) -> None:
    """Remove the least recently used libraries and their measurements. Processes that have one loaded keep it.

    `made` is kept, whatever its time: a clock that was set back makes it the oldest.
    """
    with suppress(OSError):
        others = (path for path in folder.glob("batchgen-*.so") if path != made)
        by_use = sorted(others, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for old in by_use[_KEPT - 1 :]:
            for each in (*folder.glob(f"{old.stem}-*.json"), old):
                each.unlink()


def _digest(words: Iterable[str]) -> str:
    """Digest of the sources and of everything else that the machine code depends on."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (*_FLAGS, *words):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    """Identity of a compiler without running it: path, size and modification time of the real file."""
    real = Path(compiler).resolve()
    status = real.stat()
    return f"{real}:{status.st_size}:{status.st_mtime_ns}"


def _processor() -> str:
    """Architecture and instruction sets, as a cache on a shared disk may serve different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()}:{platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part", "CPU implementer")
    return platform.machine() + ":" + ":".join(sorted({line for line in lines if line.startswith(wanted)}))


def _features() -> frozenset[str]:
    """Instruction sets of this x86-64 processor by Linux's names; none elsewhere."""
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
    return frozenset()


def _compile(compiler: Sequence[str], flags: Sequence[str], work: Path) -> Path:
    """Compile all sources in parallel, then link. OpenMP's symbols stay undefined, to be found in the process."""
    sources = sorted(_SOURCES.glob("*.cpp"))
    objects = [work / f"{source.stem}.o" for source in sources]
    _run_all(
        [
            [*compiler, *_FLAGS, *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
    )
    library = work / "batchgen.so"
    _run_all([[*compiler, "-shared", *map(str, objects), "-o", str(library)]])
    return library


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run commands in parallel.

    Raises:
        CompilerMissing: a command cannot be run, fails or takes too long.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        errors = [process.communicate(timeout=_SECONDS)[1] for process in running]
    except OSError as problem:
        raise CompilerMissing(f"{commands[0][0]} cannot be run: {problem.strerror}") from None
    except subprocess.TimeoutExpired:
        raise CompilerMissing(f"{commands[0][0]} did not finish within {_SECONDS} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for process, output in zip(running, errors, strict=True):
        if process.returncode:
            raise CompilerMissing(f"{commands[0][0]} failed: {_first_error(output)}")


def _first_error(output: bytes) -> str:
    lines = output.decode(errors="replace").splitlines()
    first = lines[0] if lines else "it printed no message"
    return next((line for line in lines if "error" in line), first).strip()
