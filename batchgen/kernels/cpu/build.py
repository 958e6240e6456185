"""Compiles `src/` for this processor, once: a shared library in the user's cache folder, named by what it was made of.

No headers of torch or Python are needed, so that any C++17 compiler with OpenMP will do and it takes seconds. The
library is linked against no OpenMP runtime: it takes the one that torch has loaded, so that a process has one pool of
threads and not two that fight for the cores.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["CompilerMissing", "built_library", "cache_folder", "find_compiler"]

_SOURCES: Final = Path(__file__).with_name("src")
_FLAGS: Final = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_SECONDS: Final = 300
"""Longest wait for the compiler."""


class CompilerMissing(RuntimeError):
    """No library can be made here; the message says why."""


def find_compiler() -> str | None:
    """The C++ compiler: `CXX`, else the first of the usual names on the path."""
    named = os.environ.get("CXX")
    names = [named] if named else ["c++", "g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def cache_folder() -> Path:
    """Where libraries are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "batchgen" / "kernels"


def built_library(on_build: Callable[[], None] = lambda: None) -> Path:
    """The library, compiled if it is not there yet; `on_build` is called before that is done.

    Raises:
        CompilerMissing: there is no compiler, it fails, or nothing can be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilerMissing("no C++ compiler was found (c++, g++, clang++, or the one that CXX names)")
    sources = sorted(_SOURCES.glob("*.cpp"))
    name = f"batchgen-{_digest(compiler)}.so"
    for folder in (cache_folder(), Path(tempfile.gettempdir()) / f"batchgen-kernels-{os.getuid()}"):
        library = folder / name
        if library.is_file() and library.stat().st_uid == os.getuid():
            return library
    on_build()
    for folder in (cache_folder(), Path(tempfile.gettempdir()) / f"batchgen-kernels-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():
                continue
            with tempfile.TemporaryDirectory(dir=folder) as work:
                made = _compile(compiler, sources, Path(work))
                made.rename(folder / name)  # another process may have been first: the same file
            return folder / name
        except OSError:
            continue
    raise CompilerMissing("no folder can be written to keep the compiled kernels in; set XDG_CACHE_HOME")


def _digest(compiler: str) -> str:
    """Of everything that the machine code depends on."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (*_FLAGS, compiler, _version(compiler), _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    """What tells one compiler from another without running it: the real file's size and time."""
    real = Path(compiler).resolve()
    stat = real.stat()
    return f"{real}:{stat.st_size}:{stat.st_mtime_ns}"


def _processor() -> str:
    """Architecture and instruction sets: a cache on a shared disk may serve machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()}:{platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part", "CPU implementer")
    return platform.machine() + ":" + ":".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, sources: list[Path], work: Path) -> Path:
    """All sources side by side, then one link. OpenMP's functions are left to be found in the process."""
    objects = [work / f"{source.stem}.o" for source in sources]
    running = [
        subprocess.Popen(
            [compiler, *_FLAGS, "-c", str(source), "-o", str(target)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for source, target in zip(sources, objects, strict=True)
    ]
    problems = [process.communicate(timeout=_SECONDS)[1] for process in running]
    for process, problem in zip(running, problems, strict=True):
        if process.returncode:
            raise CompilerMissing(f"{compiler} failed: {_first_line(problem)}")
    library = work / "batchgen.so"
    linked = subprocess.run(
        [compiler, "-shared", *map(str, objects), "-o", str(library)],
        capture_output=True,
        check=False,
        timeout=_SECONDS,
    )
    if linked.returncode:
        raise CompilerMissing(f"{compiler} failed to link: {_first_line(linked.stderr)}")
    return library


def _first_line(output: bytes) -> str:
    lines = output.decode(errors="replace").splitlines()
    return next((line.strip() for line in lines if "error" in line), lines[0].strip() if lines else "it said nothing")
