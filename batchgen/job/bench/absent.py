"""Peers that a run has to do without: each with its reason, said at once and again under the closing table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

from batchgen.job.bench.gate import GateRed
from batchgen.job.bench.peers import OF_BATCHGEN, OURS
from batchgen.job.bench.process import EngineFailed, EngineGone
from batchgen.job.bench.stored import LeftOut

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
            self.leave_out(engine, None if isinstance(error, EngineGone) else workload, " ".join(str(error).split()))

    def leave_out(self, engine: str, workload: str | None, reason: str) -> None:
        """Go on without a peer on a workload (None: on all), and say why; once."""
        if (engine, workload) not in self._reasons:
            self._reasons[engine, workload] = reason
            line = LeftOut("", engine, workload, reason).line()
            self.console.print(line, style="yellow", soft_wrap=True, markup=False)

    def left_out(self, model: str, workloads: Sequence[str], measured: Collection[tuple[str, str]]) -> list[LeftOut]:
        """Each peer left out of a run with this model; of single workloads where others were `measured` (pairs of
        engine and workload) before it failed.
        """
        found = []
        for (engine, place), reason in self._reasons.items():
            some = place is None and any((engine, name) in measured for name in workloads)
            places = [name for name in workloads if (engine, name) not in measured] if some else [place]
            found += [LeftOut(model, engine, name, reason) for name in places]
        return found

    def lines(self) -> list[str]:
        """One for each peer left out."""
        return [LeftOut("", *place, reason).line() for place, reason in self._reasons.items()]

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
