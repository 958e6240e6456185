"""An engine in a separate process, driven over pipes, so that engines do not share memory or threads."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event, Timer
from types import TracebackType
from typing import Any, Protocol, Self

import batchgen
from batchgen.bench.engines.peer_tools import fastest_dtype
from batchgen.bench.peers import OURS, VARIANTS, EngineSource
from batchgen.bench.workloads import BenchRow
from batchgen.errors import BatchgenError

_WORKER = Path(__file__).parent / "engines" / "peer_tools.py"
_MALLOC_ENV = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment that makes glibc's allocator keep freed memory (blocks below 32 MiB) for the next pass. Some engines
allocate their KV cache once, others for every pass, and fresh memory from the system is slow on virtual machines. A job
pays for it once; short benchmark passes would pay every time."""
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
"""Environment variables from which libraries read their number of threads; the same value for every engine."""
_WITHOUT_TORCH = ("llama.cpp", "openvino")
"""Peers without torch, for which the parent process chooses the fastest dtype."""
_CLOSE_SECONDS = 20.0
_STDERR_LINES = 8
"""Number of lines of stderr shown in an error message."""


class EngineFailed(BatchgenError):
    """An engine failed to load or generate."""


class EngineExited(EngineFailed):
    """An engine's process has ended, or was killed at its timeout."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Load request, the same for every engine."""

    model: str
    dtype: str
    device: str
    threads: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `EngineConfig`; only batchgen's engines use them."""
    cache: str = ""
    """Folder for models converted to an engine's format."""
    keep_dtype: bool = False
    """Whether peers must compute in `dtype` even if float32 is faster."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Outputs and times of one pass over some rows."""

    outputs: list[list[int]]
    """New ids of each row; those of a row's samples are concatenated."""
    seconds: float
    cpu_seconds: float
    """Processor time of all threads."""
    counted: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(map(len, self.outputs))


class BenchEngine(Protocol):
    """An engine with a model in memory."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def threads(self) -> int: ...  # noqa: D102
    @property
    def settings(self) -> Sequence[Mapping[str, int]]:
        """Settings to try; `[{}]` if there is nothing to choose."""
        ...

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        """Generate every row to its full length, greedily if it has one sample."""
        ...


class EngineProcess:
    """A `BenchEngine` behind pipes. Use as a context manager, or call `close`.

    Args:
        source: the engine to run.
        spec: what it loads.
        lifetime: seconds after which the process is killed; a pending request raises `EngineFailed`.
        timeout: seconds for one request, to load or to generate, after which the process is killed.

    Raises:
        EngineFailed: the process does not start, or the engine does not load; with its error message.
    """

    def __init__(
        self, source: EngineSource, spec: LoadSpec, lifetime: float | None = None, timeout: float | None = None
    ) -> None:
        self.name = source.name
        self._timeout = timeout
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed by close
        env = {**os.environ, **_MALLOC_ENV, **dict.fromkeys(_THREAD_VARIABLES, str(spec.threads)), "PYTHONSAFEPATH": ""}
        root = str(Path(batchgen.__file__).parents[1]) if source.name in (OURS, *VARIANTS) else source.root
        if root is not None:
            env["PYTHONPATH"] = os.pathsep.join(p for p in (root, env.get("PYTHONPATH")) if p)
        try:
            self._process = subprocess.Popen(
                [source.python, str(_WORKER), source.script],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8", env=env,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise EngineFailed(f"cannot start {source.name} with {source.python}: {error.strerror}") from None
        self._timer = Timer(threading.TIMEOUT_MAX if lifetime is None else lifetime, self._process.kill)
        self._timer.daemon = True
        self._timer.start()
        try:
            if source.name in VARIANTS:
                spec = replace(spec, options={**spec.options, **VARIANTS[source.name]})
            request = {"op": "load", "engine": source.name, **asdict(spec)}
            if source.name in _WITHOUT_TORCH:
                request["dtype"] = fastest_dtype(request)
            loaded = self._request(request)
        except BaseException:
            self.close()
            raise
        self.version: str = loaded["version"]
        self.dtype: str = loaded["dtype"]
        self.device: str = loaded["device"]
        self.threads: int = loaded["threads"]
        self.settings: list[dict[str, int]] = loaded["settings"]

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        """See `BenchEngine.generate`."""
        sent_rows = [asdict(row) for row in rows]
        reply = self._request({"op": "generate", "rows": sent_rows, "setting": dict(setting)})
        return Generated(reply["outputs"], reply["seconds"], reply["cpu_seconds"], reply["counted"])

    def close(self) -> None:
        """Close the process's input and wait for its end; kill it if it does not end."""
        self._timer.cancel()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timed_out = Event()
        seconds = threading.TIMEOUT_MAX if self._timeout is None else self._timeout
        timer = Timer(seconds, self._kill_on_timeout, [timed_out])
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):  # ValueError: the pipe is closed
            line = ""
        finally:
            timer.cancel()
        if timed_out.is_set():
            raise EngineExited(
                f"{self.name} did not answer {request['op']} within {self._timeout:g} seconds and was killed"
            )
        if not line:
            raise EngineExited(f"{self.name} ended without an answer{self._stderr_tail()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"{self.name} failed at {request['op']}: {reply['error']}")
        return reply

    def _kill_on_timeout(self, timed_out: Event) -> None:
        timed_out.set()
        self._process.kill()

    def _stderr_tail(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()[-_STDERR_LINES:]
        return ":\n" + "\n".join(lines) if lines else f" (exit status {self._process.poll()})"
