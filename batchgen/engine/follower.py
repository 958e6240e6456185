"""The process of a rank above 0, which runs the jobs of rank 0 and drops their results; its function is `serve`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from batchgen.engine.engine import Engine
from batchgen.engine.parallel.peers import Alone, Leader, Load, Peers, Start, Superseded, WarmUp, receive_from
from batchgen.engine.parallel.process_ranks import LostRank, ProcessRanks
from batchgen.engine.running import Running
from batchgen.engine.sampling import constraints
from batchgen.engine.settings import WorkRecord
from batchgen.errors import ErrorInfo, UsageError
from batchgen.models.base import ModelSpec
from batchgen.text.helper_process import begin
from batchgen.text.stops import search


class _Given(WorkRecord):
    """What rank 0 knows of rows that ended earlier runs."""

    def __init__(self, set_aside: Mapping[int, ErrorInfo], alone: Sequence[int]) -> None:
        self.set_aside, self.alone = set_aside, alone

    def run_alone(self, row: int) -> None:
        """Nothing is recorded."""


def serve(source: int, sink: int) -> None:
    """Do what rank 0 says, until it ends.

    Args:
        source: descriptor of the pipe from which messages are received.
        sink: descriptor of the pipe to which the reason of a failure is sent.
    """
    _follow(*begin(source, sink))
    os._exit(1)  # without waiting for threads


def _follow(messages: Connection, results: Connection) -> None:
    receive = receive_from(messages, lambda: os._exit(0))
    load = receive()
    assert isinstance(load, Load)
    running: Running | None = None
    try:
        ranks = ProcessRanks(load.rank, load.config.tensor_parallel)
        ranks.in_order = load.config.deterministic

        def connect(spec: ModelSpec) -> Peers:
            results.send("")
            ranks.connect(load.port, spec.device)
            constraints.MAX_SECONDS *= 3  # rank 0 decides which rows take too long
            search.SEARCH_SECONDS *= 3
            return Leader(receive)

        engine = Engine.of_rank(load.config, ranks, connect, load.numbers)
        message = receive()
        while True:
            try:
                match message:
                    case WarmUp():
                        engine.warm_up()
                    case Start() as start:
                        running = None  # its pool makes room
                        record = _Given(start.set_aside, start.alone)
                        emit = (lambda events: None) if start.streams else None
                        running = engine.start(
                            start.table, start.done, record, prompt_ids=False, emit=emit, scaled=start.scaled
                        )
                        _exhaust(running)
                    case Alone() as alone if running is not None:
                        _exhaust(running.alone(alone.row))
                message = receive()
            except Superseded as later:
                message = later.message
            except UsageError:  # rank 0 reports it
                message = receive()
    except LostRank:
        return
    except Exception as problem:
        with suppress(OSError):
            results.send(f"{type(problem).__name__}: {problem}")


def _exhaust(running: Running) -> None:
    for _ in running.loop.run():
        pass
