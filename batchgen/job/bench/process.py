"""An engine in a process of its own, driven over pipes: what one engine does to memory or threads stays with it."""

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
from batchgen.errors import BatchgenError
from batchgen.job.bench.engines.peer_tools import at_its_best
from batchgen.job.bench.peers import OURS, VARIANTS, EngineSource
from batchgen.job.bench.workloads import BenchRow

__all__ = ["BenchEngine", "EngineFailed", "EngineGone", "EngineProcess", "Generated", "LoadSpec"]

_WORKER = Path(__file__).parent / "engines" / "worker.py"
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc's allocator keeps what a pass gave back for the next one, in every engine's process; pieces of 32 MiB and more,
its limit, still go back to the system. Some engines hold their
caches of keys and values throughout, others take them for a job, and memory from the system costs up to a second for
300 MB on a virtual machine: a job pays that once, and short passes are to tell how engines compute."""
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
"""What libraries take their number of threads from: every engine gets the same."""
_NO_TORCH = ("llama.cpp", "openvino")
"""Peers whose scripts do not time products themselves: they are asked for the dtype that is best here."""
_CLOSE_SECONDS = 20.0
_SHOWN_LINES = 8


class EngineFailed(BatchgenError):
    """An engine could not load or generate."""


class EngineGone(EngineFailed):
    """An engine's process ended, or was ended because it gave no answer: it answers no more."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What every engine of a benchmark is to load."""

    model: str
    dtype: str
    device: str
    threads: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `EngineConfig`, for batchgen's own engine; peers are not given them."""
    cache: str = ""
    """Folder where an engine with a format of its own keeps the converted model."""
    keep_dtype: bool = False
    """Whether peers must compute in `dtype` even where float32 is faster for them."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One pass over some rows."""

    outputs: list[list[int]]
    """New ids by row, of a row's samples one after the other."""
    seconds: float
    cpu_seconds: float
    """Of all threads."""
    counted: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Generated tokens."""
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
        """Settings worth trying, `{}` where there is nothing to choose."""
        ...

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        """Greedy, each row to its full length."""
        ...


class EngineProcess:
    """A `BenchEngine` behind pipes. Use as a context manager, or call `close`.

    Args:
        source: what runs.
        spec: what it loads.
        lifetime: seconds after which the process is ended wherever it is; whoever waits for it gets `EngineFailed`.
        patience: seconds for one answer, to load or to generate, after which the process is ended.

    Raises:
        EngineFailed: it does not start or load, with its own words.
    """

    def __init__(
        self, source: EngineSource, spec: LoadSpec, lifetime: float | None = None, patience: float | None = None
    ) -> None:
        self.name = source.name
        self._patience = patience
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed by close
        env = {**os.environ, **_KEEP_MEMORY, **dict.fromkeys(_THREADS, str(spec.threads)), "PYTHONSAFEPATH": ""}
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
            request = {"op": "load", **asdict(spec)}
            if source.name in _NO_TORCH:
                request["dtype"] = at_its_best(request)
            loaded = self._ask(request)
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
        asked = [asdict(row) for row in rows]
        reply = self._ask({"op": "generate", "rows": asked, "setting": dict(setting)})
        return Generated(reply["outputs"], reply["seconds"], reply["cpu_seconds"], reply["counted"])

    def close(self) -> None:
        """End the process: at the end of its input, or else at once."""
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

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = Event()
        timer = Timer(threading.TIMEOUT_MAX if self._patience is None else self._patience, self._give_up, [late])
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):  # a ValueError: closed already
            line = ""
        finally:
            timer.cancel()
        if late.is_set():
            raise EngineGone(
                f"{self.name} gave no answer to {request['op']} in {self._patience:g} seconds, and was ended"
            )
        if not line:
            raise EngineGone(f"{self.name} ended without an answer{self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"{self.name} failed at {request['op']}: {reply['error']}")
        return reply

    def _give_up(self, late: Event) -> None:
        late.set()
        self._process.kill()

    def _last_words(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()[-_SHOWN_LINES:]
        return ":\n" + "\n".join(lines) if lines else f" (exit status {self._process.poll()})"
