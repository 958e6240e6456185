"""The process that checks inputs: `python -m tests.fuzz.worker` with a `Task` as JSON. It is started by `__main__`.

Inputs are changed from a pool: the committed ones, and those whose outcome was new. With atheris, libFuzzer selects
them by the coverage of the package's code, and ours are its mutations.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import psutil

from tests.fuzz.fuzzer import MAX_BYTES, Fuzzer, fuzzer
from tests.fuzz.record import Record

_INSTRUMENTED = [f"batchgen.{part}" for part in ("config", "data", "gguf", "models", "request", "tables", "text")]
"""What reads foreign data; instrumented code takes longer to import and to run."""
_FEW = 100
"""A check of every so many inputs, or fewer, is one of few inputs."""
_MAX_POOL = 4000
_MINIMISE_SECONDS = 5.0
_MEMORY = 8 << 30
"""Address space beyond that of the start, so that a runaway allocation fails here and not in another process."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker does."""

    name: str
    folder: str
    """Receives the record, failures and found inputs."""
    seed: int
    seconds: float
    inputs: int
    """Most inputs; 0 for no limit."""
    guided: bool
    """Whether atheris guides it."""
    run: int = 0
    """Number of the run, by which its records differ from those of other runs in the folder."""
    shallow: bool = False
    """Whether the checks of few inputs, which run an engine, are left out."""

    @property
    def record(self) -> Path:
        """The file of its record."""
        return Path(self.folder) / f"record-{self.run}-{self.seed}"

    def as_json(self) -> str:
        """The task as the worker's argument."""
        return json.dumps(asdict(self))


class Session:
    """Checks inputs one by one, and keeps what is found."""

    def __init__(self, task: Task, target: Fuzzer) -> None:
        self.task = task
        self.target = target
        self.record = Record(task.record)
        self._found = Path(task.folder) / "found"
        self._failures = Path(task.folder) / "failures"
        for folder in (self._found, self._failures):
            folder.mkdir(parents=True, exist_ok=True)
        self._outcomes: set[Hashable] = set()
        self._kinds: set[str] = set()

    def check(self, data: bytes) -> bool:
        """Check an input; whether its outcome is new."""
        self.record.begin(data)
        try:
            outcome = self.target.run(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._keep_failure(data, error)
            self.record.end(failed=True)
            return False
        self.record.end(failed=False)
        if outcome in self._outcomes or len(self._outcomes) >= _MAX_POOL:
            return False
        self._outcomes.add(outcome)
        return True

    def keep(self, data: bytes) -> None:
        """Store an input whose outcome is new."""
        (self._found / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)

    def _keep_failure(self, data: bytes, error: BaseException) -> None:
        kind = kind_of(error)
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        name = self._failures / hashlib.sha256(kind.encode()).hexdigest()[:12]
        name.with_suffix(".txt").write_text(f"{kind}\n{''.join(traceback.format_exception(error))}", "utf-8", "replace")
        name.with_suffix(".bin").write_bytes(data)
        name.with_suffix(".bin").write_bytes(minimised(data, lambda piece: self._kind(piece) == kind))

    def _kind(self, data: bytes) -> str | None:
        self.record.begin(data)
        try:
            self.target.run(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return kind_of(error)
        return None

    def finished(self, began: float) -> bool:
        """Whether the task is done."""
        task = self.task
        return time.monotonic() - began > task.seconds or bool(task.inputs and self.record.inputs >= task.inputs)


def kind_of(error: BaseException) -> str:
    """What failures of one kind have in common: type, promise, and the last place in our code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    ours = [frame for frame in frames if "/batchgen/" in frame.filename] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else ""
    promise = str(error).partition(":")[0][:60] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} {place} {promise}"


def minimised(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """`data` with pieces removed that the failure does not need, found in bounded time."""
    end = time.monotonic() + _MINIMISE_SECONDS
    size = max(1, len(data) // 2)
    while size and time.monotonic() < end:
        at = 0
        while at < len(data) and time.monotonic() < end:
            shorter = data[:at] + data[at + size :]
            if fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


def _fuzz(session: Session) -> None:
    target, rng = session.target, Random(session.task.seed)
    pool = [*target.inputs(), *(target.make(rng) for _ in range(20))]
    began = time.monotonic()
    for data in target.inputs():
        session.check(data)
    while not session.finished(began):
        data = target.make(rng) if rng.random() < 0.05 else target.mutate(rng.choice(pool), rng)
        if session.check(data):
            session.keep(data)
            pool.append(data)


def _fuzz_guided(session: Session) -> None:
    import atheris

    target, task, began = session.target, session.task, time.monotonic()

    def one(data: bytes) -> None:
        session.check(data)
        if session.finished(began):
            session.record.close()
            os._exit(0)

    def mutate(data: bytes, size: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.2:
            return bytes(atheris.Mutate(data, size))
        return target.mutate(data, rng)[:size]

    found = Path(task.folder) / "guided"
    seeds = Path(task.folder) / f"seeds-{task.seed}"
    for folder in (found, seeds):
        folder.mkdir(exist_ok=True)
    rng = Random(task.seed)
    for number, data in enumerate([*target.inputs(), *(target.make(rng) for _ in range(50))]):
        (seeds / str(number)).write_bytes(data)
    options = [
        f"-seed={task.seed}",
        f"-max_len={MAX_BYTES}",
        "-timeout=3600",
        "-rss_limit_mb=0",
        f"-artifact_prefix={task.folder}/",
    ]
    atheris.Setup(["fuzz", *options, str(found), str(seeds)], one, custom_mutator=mutate)
    atheris.Fuzz()


def _prepare(record: Record, target: Fuzzer) -> None:
    """Import what inputs need, note the memory of that, and limit what may be added."""
    data = (target.inputs() or [target.make(Random(0))])[0]
    try:
        target.run(data, everything=True)
    except Exception:  # it is checked, and reported, again
        traceback.print_exc()
    gc.collect()
    gc.freeze()
    process = psutil.Process()
    record.base_bytes = process.memory_info().rss
    space = process.memory_info().vms + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (space, space))


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # what the record holds stays
    random.seed(task.seed)
    if task.guided:
        import atheris

        with atheris.instrument_imports(include=_INSTRUMENTED):
            target = fuzzer(task.name)
    else:
        target = fuzzer(task.name)
    if task.shallow:
        target = replace(target, deeper=tuple(one for one in target.deeper if one[0] < _FEW))
    session = Session(task, target)
    try:
        _prepare(session.record, target)
        run: Any = _fuzz_guided if task.guided else _fuzz
        run(session)
    finally:
        session.record.close()


if __name__ == "__main__":
    main()
