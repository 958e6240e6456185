"""Contents of a chart, independent of its format: a panel for each workload, and summaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchgen.bench.correctness import FULL_EQUALITY
from batchgen.bench.figures import CPU_RATE, RATE, SLOWDOWN, Figure, ours_over
from batchgen.bench.peers import OURS
from batchgen.bench.results import SkippedPeer
from batchgen.bench.workload_defs import GPU_WORKLOADS, MORE_WORKLOADS, WORKLOADS

__all__ = [
    "Bar",
    "Panel",
    "Section",
    "engine_text",
    "other_table",
    "sections",
    "setting_text",
    "share_text",
    "spread_text",
]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart: a median and its range."""

    label: str
    value: float
    low: float
    high: float
    ours: bool
    """Whether it is batchgen's."""
    series: str = ""
    """Name of the peer, if bars of several peers share a label."""
    note: str = ""
    """Text in parentheses after the number."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart and the table under it."""

    title: str
    unit: str
    bars: Sequence[Bar]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    floor: float | None = None
    """The arithmetic floor, in `unit`."""
    times: bool = False
    """Whether values are ratios, drawn on a logarithmic axis around 1."""
    about: str = ""
    """Description of the workload."""


@dataclass(slots=True)
class Section:
    """The panels of one model."""

    model: str
    facts: list[tuple[str, str]]
    """(name, value) of the machine and versions of its figures."""
    panels: list[Panel] = field(default_factory=list)
    skipped: Sequence[SkippedPeer] = ()
    """Peers without figures."""


def sections(figures: Sequence[Figure], skipped: Sequence[SkippedPeer] = ()) -> list[Section]:
    """A section for each model, in the order of the figures: ratios, slowdowns of special rows, then each workload."""
    found = []
    for model in dict.fromkeys(figure.model for figure in figures):
        own = [figure for figure in figures if figure.model == model]
        section = Section(model, _facts(own), skipped=[peer for peer in skipped if peer.model in (model, "")])
        section.panels += _ratios(own)
        section.panels += _slowdowns(own)
        for workload in dict.fromkeys(figure.workload for figure in own if figure.metric == RATE):
            section.panels.append(_workload(workload, [f for f in own if f.workload == workload]))
        found.append(section)
    return found


def spread_text(median: float, low: float, high: float, digits: int = 1) -> str:
    """A median with its range, as in "566.0 (539.1 to 582.3)"; the median alone if the range is empty."""
    text = f"{median:,.{digits}f}"
    return text if low == high else f"{text} ({low:,.{digits}f} to {high:,.{digits}f})"


def engine_text(figure: Figure) -> str:
    """The engine's name, with the share of rows equal to the reference in float32 if it is below `FULL_EQUALITY`."""
    return figure.engine + (f" ({figure.rows_equal:.0%} equal)" if figure.rows_equal < FULL_EQUALITY else "")


def setting_text(figure: Figure) -> str:
    """The engine's setting, as in "batch 8"."""
    return ", ".join(f"{key} {value}" for key, value in figure.setting.items())


def share_text(share: float | None) -> str:
    """A share in per cent; empty for None."""
    return "" if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def other_table(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]], dict[str, str]]:
    """Table of one workload without engines: column names, rows, and the values that all rows have in common."""
    keys = dict.fromkeys(k for line in lines for k, v in line.items() if not isinstance(v, dict | list))
    keys_with_values = [key for key in keys if key != "workload" and any(line.get(key) is not None for line in lines)]
    texts = {key: [_plain(line.get(key)) for line in lines] for key in keys_with_values}
    same = {key: column[0] for key, column in texts.items() if len(set(column)) == 1 and len(lines) > 1}
    header = [key for key in texts if key not in same]
    rows = [[texts[key][i] for key in header] for i in range(len(lines))]
    return [key.replace("_", " ") for key in header], rows, {key.replace("_", " "): v for key, v in same.items()}


def _plain(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def _facts(figures: Sequence[Figure]) -> list[tuple[str, str]]:
    def distinct(values: Iterable[str | None]) -> str:
        return "; ".join(dict.fromkeys(value for value in values if value))

    versions = distinct(", ".join(f"{name} {value}" for name, value in figure.versions.items()) for figure in figures)
    facts = [
        ("Processor", distinct(figure.cpu for figure in figures)),
        ("Device", distinct(figure.device for figure in figures)),
        ("Threads", distinct(str(figure.threads) for figure in figures)),
        ("Number format", distinct(figure.dtype for figure in figures)),
        ("Commit", distinct(figure.commit for figure in figures)),
        ("Versions", versions),
        ("Repeats", distinct(str(figure.repeat) for figure in figures)),
        (
            "Matrix multiplication",
            distinct(f"up to {f.gemm_gflops:,.0f} GFLOP/s ({f.gemm_form})" if f.gemm_form else None for f in figures),
        ),
        ("Memory", distinct(f"{f.bandwidth_gbytes:,.1f} GB/s" for f in figures if f.bandwidth_gbytes)),
        ("Date", distinct(figure.date[:10] for figure in figures)),
    ]
    return [(name, value) for name, value in facts if value]


def _ratios(figures: Sequence[Figure]) -> list[Panel]:
    """Batchgen's rate divided by each peer's, by workload."""
    rates = [figure for figure in figures if figure.metric == RATE]
    found = [(figure, over) for figure in rates if (over := ours_over(figure, rates)) is not None]
    if not found:
        return []
    peers = list(dict.fromkeys(figure.engine for figure, _ in found))
    workloads = list(dict.fromkeys(figure.workload for figure, _ in found))
    found.sort(key=lambda pair: workloads.index(pair[0].workload))
    bars = [Bar(f.workload, over.median, over.min, over.max, True, series=f.engine) for f, over in found]
    texts: dict[tuple[str, str], str] = {}
    for f, over in found:
        previous = texts.get((f.workload, f.engine))
        text = spread_text(over.median, over.min, over.max, 2)
        texts[f.workload, f.engine] = text if previous is None else f"{previous}; {text}"  # one for each dtype
    rows = [[workload, *(texts.get((workload, name), "") for name in peers)] for workload in workloads]
    title = f"{OURS}'s output tokens per second divided by each peer's, repeat by repeat"
    return [Panel(title, "times the peer's rate", bars, ["workload", *peers], rows, times=True)]


def _slowdowns(figures: Sequence[Figure]) -> list[Panel]:
    """Slowdown of special rows, by workload and engine."""
    found = [figure for figure in figures if figure.metric == SLOWDOWN]
    if not found:
        return []
    several = len({figure.engine for figure in found}) > 1
    bars = [
        Bar(f"{f.workload}, {f.engine}" if several else f.workload, f.value, f.min, f.max, f.engine == OURS)
        for f in found
    ]
    rows = [[f.workload, f.engine, f"{spread_text(f.value, f.min, f.max)} %"] for f in found]
    unit = "% slower than the same rows without their fields, repeat by repeat"
    header = ["workload", "engine", "slower"]
    return [Panel("Slowdown of rows that request more than tokens", unit, bars, header, rows)]


def _workload(name: str, figures: Sequence[Figure]) -> Panel:
    rates = sorted((f for f in figures if f.metric == RATE), key=lambda f: -f.value)
    by_cpu = {(f.engine, f.dtype): f.value for f in figures if f.metric == CPU_RATE}
    several = len({figure.dtype for figure in rates}) > 1
    bars = [
        Bar(
            engine_text(f) + (f", {f.dtype}" if several else ""),
            f.value,
            f.min,
            f.max,
            f.engine == OURS,
            note=share_text(f.floor_share),
        )
        for f in rates
    ]
    header = ["engine", "tokens/s", "of arithmetic floor", f"{OURS} over it", "of overlap", "of serial"]
    header += ["tokens/CPU-s", "setting", "format", "version"]
    rows = []
    for f in rates:
        over = ours_over(f, rates)
        rows.append([
            engine_text(f),
            spread_text(f.value, f.min, f.max),
            share_text(f.floor_share),
            "" if over is None else spread_text(over.median, over.min, over.max, 2),
            *(share_text(f.floors.get(kind, {}).get("share")) for kind in ("overlap", "serial")),
            f"{by_cpu[f.engine, f.dtype]:,.1f}" if (f.engine, f.dtype) in by_cpu else "",
            setting_text(f),
            f.dtype if several else "",
            f.version,
        ])  # fmt: skip
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]  # drop columns that are empty
    header, rows = [header[i] for i in kept], [[row[i] for i in kept] for row in rows]
    floors = [f.floor_tokens_per_second for f in rates if f.floor_tokens_per_second]
    known = (WORKLOADS | MORE_WORKLOADS | GPU_WORKLOADS).get(name)
    return Panel(
        name,
        "output tokens per second" + (" (share of the arithmetic floor)" if floors else ""),
        bars,
        header,
        rows,
        floor=max(floors, default=None),
        about="" if known is None else known.description,
    )
