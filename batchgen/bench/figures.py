"""Figures: medians with ranges, ratios of interleaved repeats, shares of the floors; and the peers that a run skipped.

Each is one JSON object; those of `batchgen bench` are read back from its JSON lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from batchgen.bench.gate import GateFailed
from batchgen.bench.process import OURS, OWN_ENGINES, EngineExited, EngineFailed, Generated
from batchgen.errors import UsageError

if TYPE_CHECKING:  # imports torch, which drawing stored figures does not need
    from batchgen.bench.floors import FloorWork

RATE: Final = "output_tokens_per_second"
CPU_RATE: Final = "output_tokens_per_cpu_second"
SLOWDOWN: Final = "slowdown"
"""Slowdown of special rows against the same rows without fields and adapters, repeat by repeat, in wall-clock time."""
CPU_SLOWDOWN: Final = "slowdown_by_cpu_time"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of one or more values."""
        return Spread(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value with its context. Defaults are for lines of older versions, which lack some fields."""

    workload: str
    engine: str
    version: str = ""
    dtype: str = ""
    device: str = ""
    model: str = ""
    metric: str
    value: float
    """Median of the repeats."""
    unit: str = ""
    min: float
    max: float
    repeat: int = 0
    setting: Mapping[str, int] = field(default_factory=dict)
    """The engine's fastest setting; empty if it has none."""
    ratio: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Other engine -> median, min and max of this engine's value divided by its value, repeat by repeat."""
    floor_share: float | None = None
    """Time of the arithmetic floor divided by the measured time, by the clock of `metric`; None if the metric is not
    a rate."""
    floor_tokens_per_second: float | None = None
    """Rate at the arithmetic floor."""
    floors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """"overlap" and "serial", the floors with memory and attention (`floors.py`) -> tokens_per_second, share."""
    counted: Mapping[str, int] = field(default_factory=dict)
    agreement: float = 0.0
    """Share of checked rows whose first id equals the reference's, in this dtype."""
    rows_equal: float = 1.0
    """Share of checked rows whose ids all equal the reference's, in float32."""
    threads: int = 0
    gemm_gflops: float = 0.0
    gemm_form: str = ""
    """Implementation, dtype and size that reached `gemm_gflops`."""
    bandwidth_gbytes: float = 0.0
    cpu: str = ""
    commit: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    def to_json(self) -> str:
        """One JSON line."""
        return json.dumps(asdict(self), ensure_ascii=False)


_CLOCKS: Final = (
    ("seconds", RATE, SLOWDOWN, "tokens/s"),
    # Processor time is meaningful even on a machine that runs other programs.
    ("cpu_seconds", CPU_RATE, CPU_SLOWDOWN, "tokens/CPU-s"),
)
"""Clock of a pass, the metrics by it, and the unit of the rate."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All repeats of one engine on one workload."""

    about: Mapping[str, Any]
    """Fields of its figures: engine, version, dtype, device, threads, setting, agreement and rows_equal."""
    passes: list[Generated] = field(default_factory=list)
    plain_passes: list[Generated] = field(default_factory=list)
    """Passes of the same rows without fields and adapters, one before each pass; empty if the rows are not special."""

    @property
    def name(self) -> str:
        """Name of the engine."""
        return str(self.about["engine"])


def rates(passes: Sequence[Generated], clock: str) -> list[float]:
    """Generated tokens per second of each pass by `clock` ("seconds" or "cpu_seconds")."""
    return [one.tokens / getattr(one, clock) for one in passes]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Spread of the quotients of paired measurements."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def ours_over(rate: Figure, figures: Sequence[Figure]) -> Spread | None:
    """Batchgen's value divided by a peer's, repeat by repeat in the run that measured both.

    Args:
        rate: the peer's figure.
        figures: figures of one or several runs. If batchgen's figure is of another run, the inverse of the peer's ratio
            is taken.

    Returns:
        None for batchgen itself, and for a peer measured without it.
    """
    if rate.engine == OURS:
        return None
    measured = rate.model, rate.workload, rate.metric, rate.date
    for ours in figures:
        here = ours.model, ours.workload, ours.metric, ours.date
        if ours.engine == OURS and here == measured and rate.engine in ours.ratio:
            return Spread(**ours.ratio[rate.engine])
    inverse = rate.ratio.get(OURS)
    return None if inverse is None else Spread(1 / inverse["median"], 1 / inverse["max"], 1 / inverse["min"])


def workload_figures(
    about: Mapping[str, Any], measured: Sequence[Measured], work: FloorWork, flops: float, bandwidth: float
) -> list[Figure]:
    """Figures of every engine on one workload: its rates, and the slowdown of its special rows.

    Args:
        about: fields that all figures have in common: workload, model, repeat, machine, versions, commit and date.
        measured: the engines.
        work: necessary work of the workload.
        flops: highest rate of matrix multiplication in FLOP/s.
        bandwidth: memory bandwidth in bytes/s.
    """
    floors, figures = work.seconds(flops, bandwidth), []
    for one in measured:
        for clock, metric, slowdown, unit in _CLOCKS:
            # Processor time sums over threads, so its floor is the wall-clock floor times their number.
            threads, mine = one.about["threads"] if clock == "cpu_seconds" else 1, rates(one.passes, clock)
            spread = Spread.of(mine)
            least = {name: seconds * threads / work.output_tokens for name, seconds in floors.items()}
            shares = {name: {"tokens_per_second": 1 / s, "share": spread.median * s} for name, s in least.items()}
            arithmetic = shares.pop("arithmetic")
            counted = {
                "prompt_tokens": work.prompt_tokens,
                "distinct_prompt_tokens": work.distinct_prompt_tokens,
                "output_tokens": work.output_tokens,
                **one.passes[-1].counted,
            }
            figure = Figure(
                **about, **one.about, metric=metric, unit=unit, counted=counted,
                value=spread.median, min=spread.min, max=spread.max,
                ratio={o.name: asdict(ratios(mine, rates(o.passes, clock))) for o in measured if o is not one},
                floor_share=arithmetic["share"], floor_tokens_per_second=arithmetic["tokens_per_second"], floors=shares,
            )  # fmt: skip
            figures.append(figure)
            if one.plain_passes:
                bare = rates(one.plain_passes, clock)
                spread = Spread.of([100.0 * (1.0 - a / b) for a, b in zip(mine, bare, strict=True)])
                slower = replace(figure, metric=slowdown, unit="%", value=spread.median, min=spread.min, max=spread.max)
                figures.append(replace(slower, ratio={}, floors={}, floor_share=None, floor_tokens_per_second=None))
    return figures


_REQUIRED: Final = ("workload", "engine", "metric", "value")
"""Keys that make a JSON line a figure."""
_LEFT_OUT: Final = "left_out"
"""Metric of the JSON line of a skipped peer, which has a reason instead of a value."""
_SPREAD: Final = ("min", "max")
_TYPES: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "str": ((str,), "a text"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "Mapping": ((dict,), "an object"),
}
"""Start of a field's type annotation -> types of its value, and their name in error messages."""


@dataclass(frozen=True, slots=True)
class SkippedPeer:
    """A peer without figures, and the reason."""

    model: str
    engine: str
    workload: str | None
    """None: all workloads."""
    reason: str

    def line(self) -> str:
        """The line shown to the user."""
        return f"left out: {self.engine}{f' of {self.workload}' if self.workload else ''}: {self.reason}"

    def to_json(self) -> str:
        """The JSON line, printed among those of the figures."""
        values = {"workload": self.workload, "engine": self.engine, "model": self.model}
        return json.dumps({**values, "metric": _LEFT_OUT, "value": None, "reason": self.reason}, ensure_ascii=False)


@dataclass(slots=True)
class SkippedPeers:
    """The peers that a run skips; each is reported on the console once, when it is skipped."""

    console: Console
    model: str = ""
    _peers: dict[tuple[str, str | None], SkippedPeer] = field(default_factory=dict)
    """(engine, workload, or None for all of them) -> its record."""

    def has(self, engine: str, workload: str | None = None) -> bool:
        """Whether a peer is skipped on a workload, or, without one, in the whole run."""
        return (engine, None) in self._peers or (engine, workload) in self._peers

    @contextmanager
    def on_failure(self, engine: str, workload: str | None = None) -> Iterator[None]:
        """Skip a peer on a workload (None: on all) if it fails in this block; the failure ends the block.

        Raises:
            BatchgenError: the engine that failed is batchgen itself.
        """
        try:
            yield
        except (EngineFailed, GateFailed) as error:
            if engine in OWN_ENGINES:
                raise
            self.skip(engine, None if isinstance(error, EngineExited) else workload, " ".join(str(error).split()))

    def skip(self, engine: str, workload: str | None, reason: str) -> None:
        """Skip a peer on a workload (None: on all) and report the reason; only the first reason is kept."""
        if (engine, workload) not in self._peers:
            peer = self._peers[engine, workload] = SkippedPeer(self.model, engine, workload, reason)
            print_notice(peer.line(), self.console)

    def records(self, workloads: Sequence[str], measured: Collection[tuple[str, str]]) -> Iterator[SkippedPeer]:
        """A record of each skipped peer; `measured` is (engine, workload) of every figure.

        A peer that is skipped on all workloads but has figures of some gets a record of each other workload.
        """
        for (engine, place), peer in self._peers.items():
            if place is None and any((engine, name) in measured for name in workloads):
                yield from (replace(peer, workload=name) for name in workloads if (engine, name) not in measured)
            else:
                yield peer

    def lines(self) -> list[str]:
        """One line for each skipped peer."""
        return [peer.line() for peer in self._peers.values()]

    def check(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Check that a peer is left of the (engine, workload) that the run is to measure, if there are peers.

        Raises:
            EngineFailed: all of them are skipped on every workload.
        """
        peers = [pair for pair in pairs if pair[0] != OURS]
        if peers and all(self.has(*pair) for pair in peers):
            raise EngineFailed("no peer could be measured:\n" + "\n".join(self.lines()))


def print_notice(text: str, console: Console) -> None:
    """Print a line that is not about a figure."""
    console.print(text, style="yellow", soft_wrap=True, markup=False)


@dataclass(frozen=True, slots=True)
class StoredFigures:
    """Contents of a file of figures."""

    figures: list[Figure]
    """The last figure of each engine, workload, model, dtype, device, thread count and metric."""
    others: list[Mapping[str, Any]] = field(default_factory=list)
    """JSON objects of workloads on which no engines are compared."""
    skipped: list[SkippedPeer] = field(default_factory=list)
    """Skipped peers that have no figures in this file."""


def read_figures(path: Path, flag: str = "--from") -> StoredFigures:
    """Read a file of JSON lines, as `batchgen bench` prints them. Error messages begin with `flag`.

    Raises:
        UsageError: the file cannot be read, or as `parse_figures`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag}: {path} is not UTF-8 text") from None
    return parse_figures(text, f"{flag}: {path}")


def parse_figures(text: str, where: str) -> StoredFigures:
    """Figures of JSON lines. Error messages begin with `where`.

    Raises:
        UsageError: a line is not a JSON object, a figure's value has the wrong type, or there is no figure.
    """
    figures: dict[tuple[Any, ...], Figure] = {}
    skipped: dict[tuple[Any, ...], SkippedPeer] = {}
    others: list[Mapping[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        here = f"{where}, line {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{here} is not JSON ({error.msg}): it must be what `batchgen bench` prints") from None
        if not isinstance(values, dict):
            raise UsageError(f"{here} is not a JSON object")
        if values.get("metric") == _LEFT_OUT:
            peer = _skipped_peer(values, here)
            skipped[peer.model, peer.engine, peer.workload] = peer
        elif all(name in values for name in _REQUIRED):
            f = _figure(values, here)
            key = (f.model, f.workload, f.engine, f.dtype, f.device, f.threads, f.metric)
            figures.pop(key, None)
            figures[key] = f
        else:
            others.append(values)
    if not figures and not others:
        raise UsageError(f"{where} contains no figures: it must be what `batchgen bench` prints")
    measured = {(f.model, f.engine, name) for f in figures.values() for name in (f.workload, None)}
    return StoredFigures(list(figures.values()), others, [one for key, one in skipped.items() if key not in measured])


def _skipped_peer(values: Mapping[str, Any], where: str) -> SkippedPeer:
    model, engine, workload = (values.get(name) for name in ("model", "engine", "workload"))
    if not isinstance(engine, str) or not isinstance(workload, str | None):
        raise UsageError(f"{where}: `left_out` needs an `engine`, and a `workload` or null")
    return SkippedPeer(str(model or ""), engine, workload, str(values.get("reason")))


def _figure(values: Mapping[str, Any], where: str) -> Figure:
    """The figure of a JSON object written by this or another version. Ignores unknown keys."""
    types = {each.name: str(each.type) for each in fields(Figure)}
    known = {name: value for name, value in values.items() if name in types}
    known |= {name: values["value"] for name in _SPREAD if name not in known}
    for name, value in known.items():
        kind, _, optional = types[name].partition(" | ")
        allowed, expected = _TYPES[kind.partition("[")[0]]
        fits = isinstance(value, allowed) and not isinstance(value, bool)
        if isinstance(value, float):
            fits = fits and math.isfinite(value)
        elif fits and kind.startswith("Mapping[str, Mapping"):
            fits = all(isinstance(one, dict) for one in value.values())
        if not fits and not (optional and value is None):
            raise UsageError(f"{where}: `{name}` must be {expected}, got {value!r}")
    for name, numbers in (("ratio", ("median", *_SPREAD)), ("floors", ("share",))):
        for key, one in known.get(name, {}).items():
            if not all(isinstance(one.get(number), int | float) and one[number] > 0 for number in numbers):
                raise UsageError(f"{where}: `{name}` of {key} must have {', '.join(numbers)} above 0, got {one!r}")
    return Figure(**known)
