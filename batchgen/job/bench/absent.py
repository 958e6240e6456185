"""Peers that a run has to do without: each with its reason, said at once and again under the closing table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

from batchgen.job.bench.gate import GateRed
from batchgen.job.bench.peers import OF_BATCHGEN, OURS
from batchgen.job.bench.process import EngineFailed, EngineGone

__all__ = ["Absent"]


@dataclass(slots=True)
class Absent:
    """What is left out of one run."""

    console: Console
    _reasons: dict[tuple[str, str | None], str] = field(default_factory=dict)
    """(engine, workload or None for all of them) -> why."""

    def has(self, engine: str, workload: str | None = None) -> bool:
        """Whether a peer is left out of a workload, or, without one, of the whole run."""
        return (engine, None) in self._reasons or (engine, workload) in self._reasons

    @contextmanager
    def on_failure(self, engine: str, workload: str | None = None) -> Iterator[None]:
        """Leave a peer out of a workload (None: of all) for what it fails at in this block, which ends there.

        Raises:
            BatchgenError: the engine is batchgen's own.
        """
        try:
            yield
        except (EngineFailed, GateRed) as error:
            if engine in OF_BATCHGEN:
                raise
            place = None if isinstance(error, EngineGone) else workload
            self._reasons[engine, place] = " ".join(str(error).split())
            self.console.print(self._line(engine, place), style="yellow", soft_wrap=True, markup=False)

    def lines(self) -> list[str]:
        """One for each peer left out."""
        return [self._line(*key) for key in self._reasons]

    def check(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Refuse to go on when there is nothing left to measure against.

        Args:
            pairs: every engine with every workload that it was to run.

        Raises:
            EngineFailed: there are peers, and each is left out of every workload.
        """
        peers = [pair for pair in pairs if pair[0] != OURS]
        if peers and all(self.has(*pair) for pair in peers):
            raise EngineFailed("no peer could be measured:\n" + "\n".join(self.lines()))

    def _line(self, engine: str, workload: str | None) -> str:
        return f"left out: {engine}{f' of {workload}' if workload else ''}: {self._reasons[engine, workload]}"
