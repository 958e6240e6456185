"""Compiles `src/` for this processor, once: a shared library in the user's cache folder, named by what it was made of.

No headers of torch or Python are needed, so that any C++17 compiler with OpenMP will do and it takes seconds. The
library is linked against no OpenMP runtime: it takes the one that torch has loaded, so that a process has one pool of
threads and not two that fight for the cores.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["CompilerMissing", "built_library", "cache_folder", "find_compiler"]

_SOURCES: Final = Path(__file__).with_name("src")
_FLAGS: Final = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_SECONDS: Final = 300
"""Longest wait for the compiler."""
_KEPT: Final = 8
"""Libraries that stay in a folder: of several kinds of machines, compilers and versions."""


class CompilerMissing(RuntimeError):
    """No library can be made here; the message says why."""


def find_compiler() -> list[str]:
    """The C++ compiler's command: what `CXX` says, else the first of the usual names on the path.

    Raises:
        CompilerMissing: there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    if named:
        raise CompilerMissing(f"CXX names {named[0]}, and there is no such program")
    raise CompilerMissing("no C++ compiler was found (c++, g++, clang++, or the one that CXX names)")


def cache_folder() -> Path:
    """Where libraries are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "batchgen" / "kernels"


def built_library(on_build: Callable[[], None] = lambda: None, *, again: bool = False) -> Path:
    """The library, compiled if it is not there yet; `on_build` is called before that is done.

    Args:
        on_build: called before the compiler is.
        again: compile even if it is there, in its place.

    Raises:
        CompilerMissing: there is no compiler, it fails, or nothing can be written.
    """
    if not hasattr(os, "getuid"):
        raise CompilerMissing("compiled kernels are for Linux and macOS")
    compiler = find_compiler()
    name = f"batchgen-{_digest(compiler)}.so"
    if not again:
        for folder in _folders():
            library = folder / name
            if _is_ours(folder) and library.is_file() and library.stat().st_uid == os.getuid():
                with suppress(OSError):
                    library.touch()  # used of late, so that tidying up leaves it
                return library
    on_build()
    for folder in _folders():
        work = _work_folder(folder)
        if work is None:
            continue
        with work as made_in:
            made = _compile(compiler, sorted(_SOURCES.glob("*.cpp")), Path(made_in))
            made.replace(folder / name)  # another process may have been first: it is the same file
        _tidy(folder)
        return folder / name
    raise CompilerMissing("no folder can be written to keep the compiled kernels in; set XDG_CACHE_HOME")


def _folders() -> Iterator[Path]:
    """Where a library may stand, the best place first."""
    with suppress(RuntimeError):  # nobody's home
        yield cache_folder()
    yield Path(tempfile.gettempdir()) / f"batchgen-kernels-{os.getuid()}"


def _work_folder(folder: Path) -> tempfile.TemporaryDirectory[str] | None:
    """A new folder inside `folder`; None where none can be made or somebody else's could be meant."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return tempfile.TemporaryDirectory(dir=folder) if _is_ours(folder) else None
    except OSError:
        return None


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder, and no link, that nobody else can put anything into: code is loaded from there."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _tidy(folder: Path) -> None:
    """Remove the libraries that were not used for longest, with their figures. Who has one loaded keeps it."""
    with suppress(OSError):
        by_use = sorted(folder.glob("batchgen-*.so"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for old in by_use[_KEPT:]:
            for each in (*folder.glob(f"{old.stem}-*.json"), old):
                each.unlink()


def _digest(compiler: Sequence[str]) -> str:
    """Of everything that the machine code depends on."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (*_FLAGS, *compiler, _version(compiler[0]), _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    """What tells one compiler from another without running it: the real file's size and time."""
    real = Path(compiler).resolve()
    found = real.stat()
    return f"{real}:{found.st_size}:{found.st_mtime_ns}"


def _processor() -> str:
    """Architecture and instruction sets: a cache on a shared disk may serve machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()}:{platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part", "CPU implementer")
    return platform.machine() + ":" + ":".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: Sequence[str], sources: Sequence[Path], work: Path) -> Path:
    """All sources side by side, then one link. OpenMP's functions are left to be found in the process."""
    objects = [work / f"{source.stem}.o" for source in sources]
    _run_all(
        [
            [*compiler, *_FLAGS, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
    )
    library = work / "batchgen.so"
    _run_all([[*compiler, "-shared", *map(str, objects), "-o", str(library)]])
    return library


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run commands side by side.

    Raises:
        CompilerMissing: one cannot be run, fails or takes too long.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        said = [process.communicate(timeout=_SECONDS)[1] for process in running]
    except OSError as problem:
        raise CompilerMissing(f"{commands[0][0]} cannot be run: {problem.strerror}") from None
    except subprocess.TimeoutExpired:
        raise CompilerMissing(f"{commands[0][0]} was not done after {_SECONDS} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for process, problems in zip(running, said, strict=True):
        if process.returncode:
            raise CompilerMissing(f"{commands[0][0]} failed: {_first_error(problems)}")


def _first_error(output: bytes) -> str:
    lines = output.decode(errors="replace").splitlines()
    return next((line.strip() for line in lines if "error" in line), lines[0].strip() if lines else "it said nothing")
