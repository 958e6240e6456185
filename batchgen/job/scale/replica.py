"""`Replica`: one engine of a job, in a process with its own device or processors."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import numpy.typing as npt

from batchgen.data.read.input_set import open_inputs
from batchgen.engine.engine import Engine
from batchgen.engine.running import Running
from batchgen.errors import BatchgenError
from batchgen.job.display.eta import EtaTracker
from batchgen.job.in_work import Record
from batchgen.job.preflight import CheckedJob, preflight
from batchgen.job.rows.ingest import Ingested, ingest
from batchgen.job.rows.tokenized_cache import load_tokenized
from batchgen.job.scale.messages import Ended, Failed, GiveBack, Given, Load, Loaded, Read, Share, Step
from batchgen.job.setup import Setup, prepare
from batchgen.job.summary import RunCounts
from batchgen.request.completion import Completion, StreamEvent

_SEND_SECONDS: Final = 0.1
"""Longest time for which results are collected before they are sent."""


class Replica:
    """Does what the job says, until it closes the pipe."""

    def __init__(self, messages: Connection, results: Connection) -> None:
        """`messages`: from the job. `results`: to it."""
        self._messages, self._results = messages, results
        self._scratch = TemporaryDirectory(prefix="batchgen-")
        self._job: CheckedJob
        self._setup: Setup
        self._engine: Engine
        self._record: Record
        self._rows: Ingested
        self._read: Read
        self._remains: npt.NDArray[np.bool_]
        """[N] requests of the current share that are not given back."""
        self._running: Running
        self._eta: EtaTracker | None = None
        self._groups: list[list[Completion]] = []
        self._events: list[StreamEvent] = []
        self._sent = 0.0

    def run(self) -> None:
        """Serve the job. An error is sent to it."""
        try:
            while True:
                match self._messages.recv():
                    case Load() as load:
                        self._load(load)
                    case Read() as read:
                        self._read_rows(read)
                    case Share() as share:
                        self._generate(share)
                    case GiveBack():  # it came when the share had just ended
                        self._results.send(Given(np.zeros(0, np.int64)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._scratch.cleanup()
            return  # the job ended
        except BatchgenError as error:
            self._results.send(Failed(error, ""))
        except Exception as error:
            self._results.send(Failed(BatchgenError(f"{type(error).__name__}: {error}"), traceback.format_exc()))

    def _load(self, load: Load) -> None:
        self._job = preflight(load.config)
        self._setup = prepare(self._job, lambda note: None)
        self._record = Record(load.record or Path(self._scratch.name, "in-work"), load.key, {})
        self._engine = self._setup.load_engine()
        self._results.send(Loaded())

    def _read_rows(self, read: Read) -> None:
        rows = load_tokenized(read.folder, read.key)
        if rows is None:  # they have images, sounds or embeddings
            self._record.refused = read.refused
            self._setup.front_end.tokenizer.clock = datetime.fromisoformat(read.clock)
            inputs = open_inputs(self._job.inputs, include_source=self._setup.config.include_source)
            folder = Path(self._scratch.name)
            rows = ingest(self._setup, inputs, folder, folder, record=self._record)
        self._rows, self._read = rows, read

    def _generate(self, share: Share) -> None:
        table, setup, read = self._rows.table, self._setup, self._read
        remains = self._remains = np.zeros(len(table), np.bool_)
        remains[share.requests] = True
        self._record.set_aside = share.set_aside
        if share.alone is not None:
            self._record.run_alone(share.alone)
        running = self._running = self._engine.start(
            table,
            ~remains,
            self._record,
            prompt_ids=setup.config.include_prompt_ids,
            emit=self._emit if read.events else None,
            scaled=read.scaled,
        )
        self._eta = EtaTracker.of_job(running, setup.spec) if read.times else None
        for group in running.loop.run(self._tick):
            self._groups.append(group)
        self._send()
        slowest, self._record.slowest = self._record.slowest, []
        self._results.send(Ended(RunCounts.of(running), self._engine.facts, running.loop.notes, slowest))

    def _emit(self, events: Sequence[StreamEvent]) -> None:
        self._events += events

    def _tick(self) -> bool:
        """Between two steps: send what there is, and give back what is asked for."""
        if time.monotonic() - self._sent >= _SEND_SECONDS:
            self._send()
        while self._messages.poll():
            message = self._messages.recv()
            assert isinstance(message, GiveBack)
            self._send()
            self._results.send(Given(self._give_back(message.share)))
        return False

    def _give_back(self, share: float) -> npt.NDArray[np.int64]:
        """Withdraw requests that have not begun, with those that copy them."""
        workload = self._running.workload
        first = workload.first_text
        shared = np.bincount(first, minlength=len(first))[first] > 1
        withdrawn = np.zeros(len(first), np.bool_)
        withdrawn[self._running.scheduler.withdraw(share, shared)] = True
        given: npt.NDArray[np.int64] = np.flatnonzero(withdrawn[workload.leader] & self._remains)
        self._remains[given] = False
        return given

    def _send(self) -> None:
        loop = self._running.loop
        left = None if self._eta is None else self._eta.tick(loop.state.in_flight)
        unbegun = self._running.scheduler.unbegun
        self._results.send(Step(self._groups, self._events, replace(loop.state), left, unbegun))
        self._groups, self._events, self._sent = [], [], time.monotonic()
