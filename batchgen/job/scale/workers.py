"""Where replicas run: in processes of this machine, or on those of a cluster (`ray_workers`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Final

import psutil
import torch

from batchgen.config.run_config import RunConfig
from batchgen.data.store.work_folder import WorkFolder
from batchgen.engine.machine import visible_gpus
from batchgen.engine.memory.kv_budget import AUTO_SHARE
from batchgen.errors import UsageError
from batchgen.job.in_work import replica_record
from batchgen.job.scale.messages import Load
from batchgen.job.setup import Setup
from batchgen.library_settings import processors
from batchgen.text.helper_process import HelperProcess

_MODULE: Final = "batchgen.job.scale.replica_process"
ONE_OF_EACH: Final = 0
"""Value of `--replicas` that means one for each device: `auto`."""


@dataclass(frozen=True, slots=True)
class Died:
    """In the place of a message: the process has died."""

    how: str


class Worker(ABC):
    """A process with a replica."""

    leaves_record = False
    """Whether the work folder tells what it had in work when it died."""

    @abstractmethod
    def send(self, message: object) -> None:
        """Send a message; if the process has died it is lost."""

    @abstractmethod
    def close(self) -> None:
        """End the process."""


class Workers(ABC):
    """Starts processes and hears from them."""

    count: int
    """Number of processes at a time."""

    @abstractmethod
    def start(self, number: int) -> Worker:
        """Start a process, the `number`-th of `count`, which then loads the model."""

    @abstractmethod
    def receive(self, workers: Sequence[Worker], seconds: float) -> Iterator[tuple[Worker, object]]:
        """Messages of the workers, for which this waits at most `seconds`; `Died` is the last one of a process."""

    def close(self) -> None:  # noqa: B027  # nothing is left of processes of this machine
        """Free what the processes shared, when all are closed."""


def with_share(setup: Setup, threads: int, of: int) -> RunConfig:
    """The job's configuration for one of `of` processes of a machine: with some of its CPU threads and of its memory.

    On a GPU the process has all of its memory.
    """
    config = setup.config
    if setup.spec.device.type != "cpu":
        return replace(config, replicas=None, ray=None)
    budget, of = config.engine.kv_budget, of * setup.spec.ranks.count
    if budget is None and of > 1:
        free = psutil.virtual_memory().available - of * setup.weight_bytes
        budget = max(1, int(free * AUTO_SHARE))
    share = budget / of if isinstance(budget, float) else None if budget is None else budget // of
    if setup.spec.stream is not None:  # each has the memory of --device-memory
        share = config.engine.kv_memory
    engine = replace(config.engine, kv_memory=share, gpu_memory_utilization=None, cpu_threads=threads, device="cpu")
    return replace(config, engine=engine, replicas=None, ray=None)


class LocalWorker(Worker):
    """A process of this machine."""

    leaves_record = True

    def __init__(self, process: HelperProcess) -> None:
        self.process = process

    def send(self, message: object) -> None:
        """Through a pipe."""
        with suppress(OSError):
            self.process.requests.send(message)

    def close(self) -> None:
        """Kill it."""
        self.process.close()


class LocalWorkers(Workers):
    """Processes of this machine, each with a GPU, or on a CPU with some of the processors."""

    def __init__(self, setup: Setup, work: WorkFolder) -> None:
        """`setup`: of the job. `work`: its work folder.

        Raises:
            UsageError: there are fewer GPUs, or processors, than processes.
        """
        self._setup, self._work = setup, work
        self._gpus = visible_gpus() if setup.spec.device.type == "cuda" else None
        self._ranks = setup.spec.ranks.count
        most, what = processors(), "processors"
        if self._gpus is not None:
            most, what = len(self._gpus) // self._ranks, "GPUs" if self._ranks == 1 else f"times {self._ranks} GPUs"
        wanted = setup.config.replicas
        self.count = 1 if wanted is None else wanted or (1 if self._gpus is None else max(1, most))
        if self.count > max(1, most):
            raise UsageError(f"`--replicas` {self.count}: this machine has {most} {what}")
        self._threads = max(1, torch.get_num_threads() // self.count)

    def start(self, number: int) -> LocalWorker:
        """Start the process on its device or processors."""
        if self._gpus is None:
            each = processors() // self.count
            place, variables = (number * each, each), {"OMP_NUM_THREADS": str(self._threads)}
        else:
            place, variables = (
                (0, 0),
                {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus[number * self._ranks :][: self._ranks])},
            )
        worker = LocalWorker(HelperProcess(_MODULE, *place, variables=variables))
        record = replica_record(self._work.paths.work, number)
        worker.send(Load(with_share(self._setup, self._threads, self.count), record, self._work.identity.key))
        return worker

    def receive(self, workers: Sequence[Worker], seconds: float) -> Iterator[tuple[Worker, object]]:
        """From the pipes."""
        ends = {worker.process.results: worker for worker in workers if isinstance(worker, LocalWorker)}
        for end in wait([*ends], seconds):
            assert isinstance(end, Connection)
            try:
                message = end.recv()
            except (EOFError, OSError):
                code = ends[end].process.exit_code()
                message = Died(f"signal {-code}" if code < 0 else f"exit code {code}")
            yield ends[end], message


def workers_of(setup: Setup, work: WorkFolder) -> Workers | None:
    """What runs the replicas of a job; None: it runs in this process.

    Raises:
        UsageError: the devices, or Ray's cluster, are not there.
    """
    if setup.config.ray is not None:
        from batchgen.job.scale.ray_workers import RayWorkers  # imports Ray

        return RayWorkers(setup, work)
    workers = LocalWorkers(setup, work)
    return workers if workers.count > 1 else None
