"""The known engines, the Python interpreter that runs each, and an engine in a separate process, driven over pipes, so
that engines do not share memory or threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Timer
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

import batchgen
from batchgen.bench.engines.peer_tools import fastest_dtype
from batchgen.config.definitions import did_you_mean
from batchgen.errors import BatchgenError, UsageError

if TYPE_CHECKING:  # reads definitions with a tokenizer, which drawing stored figures does not need
    from batchgen.bench.workloads import BenchRow

OURS = "batchgen"
REFERENCE = "transformers"
"""The engine whose greedy ids are the correct ones: it runs in float32, one row at a time."""
BASELINE = "baseline"
"""Another checkout of batchgen, in a folder."""
VARIANTS: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True},
    "first-come": {"order": "first-come", "admission": "free"},
}
"""batchgen with other options. `deterministic` shows the cost of `--deterministic`; `first-come` starts rows in input
order, as soon as there are pages for their prompts, and shows the gain of batchgen's scheduling."""
OWN_ENGINES = (OURS, BASELINE, *VARIANTS)
"""Engines that are batchgen: all of their ids must equal the reference's, and a failure ends the run. Only they run
rows with fields; a peer would do less work on them."""


class Peer(NamedTuple):
    """An engine to compare with."""

    script: str
    """`engines/engine_SCRIPT.py` runs it."""
    modules: tuple[str, ...]
    """Modules that must be importable."""
    has_torch: bool = True
    """False: its environment has no torch, so this process chooses the fastest dtype."""


PEERS: Final = {
    "transformers": Peer("transformers", ("transformers",)),
    "transformers-continuous": Peer("transformers", ("transformers",)),
    "vllm": Peer("vllm", ("vllm",)),
    "vllm-zentorch": Peer("vllm", ("vllm", "zentorch")),
    "sglang": Peer("sglang", ("sglang",)),
    "openvino": Peer("openvino", ("openvino_genai",), has_torch=False),
    "llama.cpp": Peer("llama_cpp", ("llama_cpp",), has_torch=False),
}
_AUTO: Final = ("transformers",)
"""Peers of `--peers auto`; the others usually need a separate environment."""
_WORKER: Final = Path(__file__).parent / "engines" / "peer_tools.py"
_THREADS: Final = ("OMP_NUM", "MKL_NUM", "OPENBLAS_NUM", "NUMEXPR_NUM", "VECLIB_MAXIMUM", "RAYON_NUM")
"""Environment variables, without _THREADS, from which libraries read their number of threads, the same for all engines.
"""
_MALLOC_ENV: Final = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment that makes glibc's allocator keep freed memory (blocks below 32 MiB) for the next pass. Some engines
allocate their KV cache once, others for every pass, and fresh memory from the system is slow on virtual machines. A job
pays for it once; short benchmark passes would pay every time."""
_CLOSE_SECONDS: Final = 20.0
_STDERR_LINES: Final = 8
"""Number of lines of stderr shown in an error message."""


class EngineFailed(BatchgenError):
    """An engine failed to load or generate."""


class EngineExited(EngineFailed):
    """An engine's process has ended, or was killed at its timeout."""


@dataclass(frozen=True, slots=True)
class EngineSource:
    """An engine and the interpreter that runs it."""

    name: str
    python: str = sys.executable
    root: str | None = None
    """Folder from which `batchgen` is imported; None for installed engines."""

    @property
    def script(self) -> str:
        """Name of its script in `engines/`, without the suffix."""
        return f"engine_{PEERS[self.name].script if self.name in PEERS else OURS}"


def parse_peers(text: str) -> list[EngineSource]:
    """The peers of `--peers auto|none|NAME[=PYTHON],...`.

    `baseline=FOLDER` is another checkout of batchgen; `deterministic` and `first-come` are `VARIANTS`.

    Raises:
        UsageError: a name is unknown or repeated, or the interpreter cannot import the engine.
    """
    if text == "none":
        return []
    if text == "auto":
        return [source for source in map(EngineSource, _AUTO) if not _missing_modules(source)]
    peers: list[EngineSource] = []
    for item in text.split(","):
        name, equals, value = item.strip().partition("=")
        if name not in (known := (*PEERS, BASELINE, *VARIANTS)):
            problem = f"unknown peer {name!r}{did_you_mean(name, known)}" if name else "a name is missing"
            raise UsageError(f"--peers: {problem}; known: {', '.join(known)} (or auto, none)")
        if any(peer.name == name for peer in peers):
            raise UsageError(f"--peers: {name} is given more than once")
        peers.append(_source(name, value if equals else None))
    return peers


def _source(name: str, value: str | None) -> EngineSource:
    """The source of a peer, with the interpreter or folder that is given."""
    path = Path(value or "").expanduser()
    if name == BASELINE:
        if not value or not (path.resolve() / OURS / "__init__.py").is_file():
            problem = f"{BASELINE} must name a checkout of batchgen, {BASELINE}=FOLDER, got {value or ''!r}"
            raise UsageError(f"--peers: {problem}")
        return EngineSource(BASELINE, root=str(path.resolve()))
    if name in VARIANTS and value is not None:
        raise UsageError(f"--peers: {name} is this batchgen with other options and has no Python; leave =... out")
    if value is not None and (not value or path.is_dir()):
        problem = f"got the folder {value}" if value else "got nothing"
        example = f"{name}={value or 'ENVIRONMENT'}/bin/python"
        raise UsageError(f"--peers: {name}= must name a Python interpreter, {problem}; for example {example}")
    source = EngineSource(name) if value is None else EngineSource(name, str(path))
    if name in PEERS and (missing := _missing_modules(source)):
        raise UsageError(
            f"--peers: {source.python} cannot import {missing}; install it there, or give "
            f"--peers {name}=PYTHON with a Python that has it"
        )
    return source


def _missing_modules(source: EngineSource) -> str:
    """Modules of the engine that the interpreter does not find (without importing them); empty if there are none."""
    modules = PEERS[source.name].modules
    code = "import sys, importlib.util as u; sys.exit(' '.join(m for m in sys.argv[1:] if not u.find_spec(m)) or 0)"
    done = run_code(source.name, source.python, code, *modules)
    if done.returncode == 0:
        return ""
    return " and ".join([name for name in done.stderr.split() if name in modules] or modules)


def run_code(
    name: str, python: str, code: str, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code to its end by the interpreter of a peer of this name.

    Raises:
        UsageError: the interpreter does not start.
    """
    try:
        return subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, check=False, env=env)
    except OSError as error:
        raise UsageError(f"--peers: cannot run {python}: {error.strerror}; give --peers {name}=PYTHON") from None


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

    name: str
    version: str
    dtype: str
    device: str
    threads: int
    settings: Sequence[Mapping[str, int]]
    """Settings to try; `[{}]` if there is nothing to choose."""

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        """Generate every row to its full length, greedily if it has one sample."""
        ...


class EngineProcess(BenchEngine):
    """An engine behind pipes. Use as a context manager, or call `close`.

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
        self.name, self._timeout = source.name, timeout
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed by close
        threads = {f"{name}_THREADS": str(spec.threads) for name in _THREADS}
        env = {**os.environ, **_MALLOC_ENV, **threads, "PYTHONSAFEPATH": ""}
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self._lifetime = _timer(lifetime, self._process.kill)
        try:
            options = {**spec.options, **VARIANTS.get(source.name, {})}
            request = {"op": "load", "engine": source.name, **asdict(spec), "options": options}
            if source.name in PEERS and not PEERS[source.name].has_torch:
                request["dtype"] = fastest_dtype(request)
            loaded = self._request(request)
        except BaseException:
            self.close()
            raise
        self.version, self.dtype, self.device = loaded["version"], loaded["dtype"], loaded["device"]
        self.threads, self.settings = loaded["threads"], loaded["settings"]

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        """See `BenchEngine.generate`."""
        sent = [asdict(row) for row in rows]
        return Generated(**self._request({"op": "generate", "rows": sent, "setting": dict(setting)}))

    def close(self) -> None:
        """Close the process's input and wait for its end; kill it if it does not end."""
        self._lifetime.cancel()
        with suppress(OSError):
            self._requests.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        timed_out = Event()

        def stop() -> None:
            timed_out.set()
            self._process.kill()

        timer = _timer(self._timeout, stop)
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            line = self._replies.readline()
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

    def _stderr_tail(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()[-_STDERR_LINES:]
        return ":\n" + "\n".join(lines) if lines else f" (exit status {self._process.poll()})"


def _timer(seconds: float | None, call: Callable[[], object]) -> Timer:
    """A timer that has begun; None: it never ends."""
    timer = Timer(threading.TIMEOUT_MAX if seconds is None else seconds, call)
    timer.daemon = True
    timer.start()
    return timer
