"""Replicas as actors of a Ray cluster, whose scheduler places them."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import urlsplit

from batchgen.data.files import files_in, open_new, open_own
from batchgen.data.store.work_folder import WorkFolder
from batchgen.errors import BatchgenError, UsageError
from batchgen.job.scale.messages import Failed, Load, Read
from batchgen.job.scale.workers import Died, Worker, Workers, with_share
from batchgen.job.setup import Setup

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that a run starts sends none to Ray's makers

try:
    import ray
    from ray.exceptions import RayError
except ImportError as _missing:
    raise UsageError("`--ray` needs Ray: pip install 'batchgen[ray]'") from _missing

_POLL_SECONDS: Final = 0.5
_CONNECT_SECONDS: Final = 5.0
_AUTO: Final = "auto"
_SHOWN: Final = 300
"""Most characters of Ray's words on a death."""


def connect(address: str) -> None:
    """Connect to a cluster, unless this process is connected already.

    Args:
        address: of the cluster, HOST:PORT; `auto` is that of RAY_ADDRESS, the one of this machine, or a new one.

    Raises:
        UsageError: there is none at the address.
    """
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    named = (os.environ.get("RAY_ADDRESS") or _AUTO) if address == _AUTO else address
    try:
        if named != _AUTO:  # Ray itself would wait for long, and write about it
            place = urlsplit(f"//{named}")
            socket.create_connection((place.hostname or "", place.port or 0), _CONNECT_SECONDS).close()
        try:
            ray.init(address=named, **quiet)
        except ConnectionError:
            if named != _AUTO:
                raise
            ray.init(address="local", include_dashboard=False, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        remedy = "start one with `ray start --head`, or name HOST:PORT of its head node"
        raise UsageError(f"`--ray` {named}: there is no Ray cluster ({error}); {remedy}") from None
    finally:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts another handler, and one in C++, in its place


class _Actor:
    """The process of a replica in the cluster."""

    def __init__(self, folder: str) -> None:
        """`folder`: the current one of the job, to which paths may be relative."""
        with suppress(OSError):  # on another machine
            os.chdir(folder)
        self._requests, messages = Pipe()
        results, self._results = Pipe()
        self._folder = TemporaryDirectory(prefix="batchgen-")

        def serve() -> None:
            from batchgen.job.scale.replica import Replica

            Replica(messages, results).run()

        threading.Thread(target=serve, daemon=True).start()

    @ray.method(concurrency_group="send")  # type: ignore[untyped-decorator]
    def send(self, message: object, files: Mapping[str, bytes]) -> None:
        """Pass on a message; `files`: what the folder of tokenized rows holds, for `Read`."""
        if isinstance(message, Read):
            for name, data in files.items():
                with open_new(Path(self._folder.name, name)) as stream:
                    stream.write(data)
            message = replace(message, folder=Path(self._folder.name))
        self._requests.send(message)

    @ray.method(concurrency_group="receive")  # type: ignore[untyped-decorator]
    def receive(self) -> list[object]:
        """The messages that have come, for which this waits a little."""
        found: list[object] = []
        while self._results.poll(0 if found else _POLL_SECONDS):
            message = self._results.recv()
            if isinstance(message, Failed) and isinstance(message.error, BatchgenError):
                message.error.args = (f"on the Ray node {socket.gethostname()}: {message.error}",)
            found.append(message)
        return found


class RayWorker(Worker):
    """An actor."""

    def __init__(self, actor: Any, files_of: Callable[[Path], Any]) -> None:
        """`files_of`: the reference of the files of a folder."""
        self._actor, self._files_of = actor, files_of
        self.answer = actor.receive.remote()
        """What the actor is about to answer."""

    def send(self, message: object) -> None:
        """By a call of the actor."""
        with suppress(RayError):
            self._actor.send.remote(message, self._files_of(message.folder) if isinstance(message, Read) else {})

    def receive(self) -> Iterator[object]:
        """The messages of the answer, which has come."""
        try:
            messages = ray.get(self.answer)
            self.answer = self._actor.receive.remote()
            yield from messages
        except RayError as error:
            yield Died(str(error).strip().rpartition("\n")[2][:_SHOWN] or type(error).__name__)

    def close(self) -> None:
        """Kill the actor."""
        with suppress(RayError, ValueError):
            ray.kill(self._actor)


class RayWorkers(Workers):
    """Actors of a cluster, each with a GPU, or with the processors of a node."""

    def __init__(self, setup: Setup, work: WorkFolder) -> None:
        """`setup`: of the job. `work`: its work folder.

        Raises:
            UsageError: there is no cluster, or it has no device for the job.
        """
        address = setup.config.ray
        assert address is not None
        self._is_own = not ray.is_initialized()
        connect(address)
        self._setup, self._key = setup, work.identity.key
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        resource = "GPU" if setup.spec.device.type == "cuda" else "CPU"
        each = setup.spec.ranks.count if resource == "GPU" else 1
        what = resource if each == 1 else f"{each} {resource}s"
        sizes = [size for node in nodes if (size := int(node.get(resource, 0)) // each)]
        if not sizes:
            raise UsageError(f"`--ray` {address}: no node of the cluster has a {what}; see ray status")
        self.count = setup.config.replicas or (sum(sizes) if resource == "GPU" else len(sizes))
        if self.count > sum(sizes):
            has = f"{sum(sizes)} {resource}s" if each == 1 else f"{sum(sizes)} times {what}"
            raise UsageError(f"`--replicas` {self.count}: the cluster has {has}")
        on_a_node = -(-self.count // len(sizes))
        self._threads = 1 if resource == "GPU" else max(1, min(sizes) // on_a_node)
        self._of = 1 if resource == "GPU" else on_a_node
        self._options = {"num_gpus": each} if resource == "GPU" else {"num_cpus": self._threads}

        @cache
        def files_of(folder: Path) -> Any:
            contents = {}
            for path in files_in(folder):
                with open_own(path) as stream:
                    contents[path.name] = stream.read()
            return ray.put(contents)

        self._files_of = files_of

    def start(self, number: int) -> RayWorker:
        """Start an actor where the cluster has room."""
        groups = {"send": 1, "receive": 1}  # it hears while it answers, each in order
        actor = ray.remote(concurrency_groups=groups, **self._options)(_Actor)
        worker = RayWorker(actor.remote(str(Path.cwd())), self._files_of)
        config = replace(with_share(self._setup, self._threads, self._of), report=None)
        worker.send(Load(config, None, self._key))
        return worker

    def receive(self, workers: Sequence[Worker], seconds: float) -> Iterator[tuple[Worker, object]]:
        """From the actors that have answered."""
        asked = {worker.answer: worker for worker in workers if isinstance(worker, RayWorker)}
        answered, _ = ray.wait([*asked], num_returns=1, timeout=seconds)
        for answer in answered:
            for message in asked[answer].receive():
                yield asked[answer], message

    def close(self) -> None:
        """Leave the cluster; one that was started for the job ends."""
        if self._is_own:
            ray.shutdown()
