"""Figures as tables on stderr, as wide as the terminal allows, and as a chart (`--chart FILE`) by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from batchgen.bench.figures import (
    CPU_RATE,
    RATE,
    SLOWDOWN,
    Figure,
    Spread,
    StoredFigures,
    ours_over,
    print_notice,
    read_figures,
)
from batchgen.bench.gate import FULL_EQUALITY
from batchgen.bench.process import OURS
from batchgen.errors import OutputError, UsageError

_UNLIMITED: Final = 10_000
"""Width of output that is not a terminal."""
_SPREAD, _CPU, _OVER, _SLOWER = "tokens/s (min-max)", "tokens/CPU-s", f"{OURS} over it", "% slower than plain"
_DETAILS: Final = (
    ("workload", "engine", "setting", "format", _SPREAD, _CPU, "floor", "serial", _OVER, _SLOWER),
    ("workload", "engine", _SPREAD, "floor", _OVER, _SLOWER),
    ("workload", "engine", _SPREAD, "floor", "x"),
    ("workload", "engine", "tokens/s", "floor", "x"),
    ("engine", "tokens/s", "x"),
)
"""Columns for terminals from wide to narrow. "floor" is the share of the arithmetic floor, "serial" of the serial one.
"""
_LEFT: Final = ("workload", "engine", "setting", "format")


def engine_text(figure: Figure) -> str:
    """The engine's name, with the share of rows equal to the reference in float32 if it is below `FULL_EQUALITY`."""
    return figure.engine + (f" ({figure.rows_equal:.0%} equal)" if figure.rows_equal < FULL_EQUALITY else "")


def share_text(share: float | None) -> str:
    """A share in per cent; empty for None."""
    return "" if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _cells(rate: Figure, figures: Sequence[Figure]) -> dict[str, str]:
    """Column -> text of a rate's line; some are of other metrics of the same engine and workload."""
    here = rate.model, rate.workload, rate.engine, rate.dtype
    related = {f.metric: f for f in figures if (f.model, f.workload, f.engine, f.dtype) == here}
    cpu, slower, ratio = related.get(CPU_RATE), related.get(SLOWDOWN), ours_over(rate, figures)
    return {
        "workload": rate.workload,
        "engine": engine_text(rate),
        "setting": ", ".join(f"{key} {value}" for key, value in rate.setting.items()),
        "format": rate.dtype,
        "tokens/s": f"{rate.value:,.1f}",
        _SPREAD: f"{rate.value:,.1f} ({rate.min:,.1f}-{rate.max:,.1f})",
        _CPU: f"{cpu.value:,.1f}" if cpu else "",
        "floor": share_text(rate.floor_share),
        "serial": share_text(rate.floors.get("serial", {}).get("share")),
        "x": f"{ratio.median:.2f}" if ratio else "",
        _OVER: f"{ratio.median:.2f} ({ratio.min:.2f}-{ratio.max:.2f})" if ratio else "",
        _SLOWER: f"{slower.value:.1f} ({slower.min:.1f}-{slower.max:.1f})" if slower else "",
    }


def print_comparison(figures: Sequence[Figure], console: Console) -> None:
    """Print a table with one line per workload and engine: the most detailed one that fits the terminal, or else the
    narrowest; the full table if the output is not a terminal.
    """
    wide = _wide(console)
    tables = [_table(figures, columns) for columns in _DETAILS]
    wide.print(next((table for table in tables if _width(table) <= wide.width), tables[-1]))


def _wide(console: Console) -> Console:
    """The console, without a limit of its width if it is not a terminal."""
    return console if console.is_terminal else Console(file=console.file, width=_UNLIMITED, color_system=None)


def _width(table: Table) -> int:
    unlimited = Console(width=_UNLIMITED)
    return Measurement.get(unlimited, unlimited.options, table).maximum


def _table(figures: Sequence[Figure], columns: Sequence[str]) -> Table:
    rates = [figure for figure in figures if figure.metric == RATE]
    lines = [_cells(figure, figures) for figure in rates]
    # Empty columns are dropped. A table without a workload column has a heading line for each workload instead.
    kept = [name for name in columns if name in _LEFT[:2] or any(line[name] for line in lines)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in kept:
        table.add_column(name, no_wrap=True, justify="left" if name in _LEFT else "right")
    several_models = len({figure.model for figure in rates}) > 1
    model, workload = None, None
    for figure, line in zip(rates, lines, strict=True):
        if several_models and figure.model != model:
            table.add_row(Text(figure.model, style="bold"))
            model, workload = figure.model, None
        if "workload" not in columns and figure.workload != workload:
            table.add_row(Text(figure.workload, style="bold"))
        workload = figure.workload
        table.add_row(*(Text(line[name]) for name in kept))
    return table


def print_others(others: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print figures of workloads without engines, one table per workload with a column for each JSON line."""
    wide = _wide(console)
    for name in dict.fromkeys(str(line.get("workload", "other")) for line in others):
        header, rows, same = _other_table([line for line in others if str(line.get("workload", "other")) == name])
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        for _ in rows:
            table.add_column(justify="right")
        for i, key in enumerate(header):
            table.add_row(key, *(Text(row[i]) for row in rows))
        wide.print(Text(name, style="bold"))
        if _width(table) <= wide.width:
            wide.print(table)
        else:
            for row in rows:
                line = ", ".join(f"{key} {text}" for key, text in zip(header, row, strict=True) if text)
                wide.print(Text(line), soft_wrap=False)
        wide.print(Text(", ".join(f"{key} {text}" for key, text in same.items()), style="dim"))


def _other_table(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]], dict[str, str]]:
    """Table of one workload without engines: column names, rows, and the values that all rows have in common."""
    keys = dict.fromkeys(k for line in lines for k, v in line.items() if not isinstance(v, dict | list))
    kept = [key for key in keys if key != "workload" and any(line.get(key) is not None for line in lines)]
    texts = {key.replace("_", " "): [_plain(line.get(key)) for line in lines] for key in kept}
    same = {key: column[0] for key, column in texts.items() if len(set(column)) == 1 and len(lines) > 1}
    header = [key for key in texts if key not in same]
    return header, [[texts[key][i] for key in header] for i in range(len(lines))], same


def _plain(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


_KINDS: Final = (".png", ".svg")
_NO_BARS: Final = "--chart: there are no bars to draw, because no engine has a rate; leave it out"
_STYLE: Final = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 9}
_BAR_INCHES: Final = 0.34
"""Height of a bar in inches."""
_NOTE_WIDTH: Final = 130
"""Number of characters per line below the picture."""
_OURS, _PEER, _FLOOR = "#1f6feb", "#a9b2bd", "#b35900"


@dataclass(frozen=True, slots=True)
class _Bar:
    """A median and its range, drawn as a bar or, for a ratio, as a dot."""

    label: str
    spread: Spread
    ours: bool
    note: str = ""
    """Text in parentheses after the number."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """Bars with a common axis, the first on top."""

    title: str
    unit: str
    bars: Sequence[_Bar]
    floor: float | None = None
    """The arithmetic floor, in `unit`."""
    ratio: bool = False
    """Whether values are ratios, drawn on a logarithmic axis: 2 and 1/2 are equally far from 1."""


def check_chart(path: Path, *, bars: bool = True) -> None:
    """Check that a chart can be written to `path`, before a long measurement.

    Args:
        path: the file to write.
        bars: whether engines are measured; other workloads have nothing to draw.

    Raises:
        UsageError: the name ends in neither .png nor .svg; there are no bars; matplotlib is not installed; the folder
            does not exist.
    """
    if path.suffix.lower() not in _KINDS:
        raise UsageError(f"--chart must end in {' or '.join(_KINDS)}, got {path}")
    if not bars:
        raise UsageError(_NO_BARS)
    if find_spec("matplotlib") is None:
        raise UsageError(f"--chart {path} needs matplotlib, which is not installed: pip install 'batchgen[report]'")
    if not path.parent.is_dir():
        raise UsageError(f"--chart: the folder {path.parent} does not exist; create it, or name another file")


def draw_stored(path: Path, chart: Path | None, console: Console) -> None:
    """Print the figures of an earlier run to `console` and, if `chart` is given, draw them.

    Raises:
        UsageError: the file contains no figures, or `chart` cannot be drawn.
        OutputError: as `write_chart`.
    """
    if chart is not None:
        check_chart(chart)
    stored = read_figures(path)
    if stored.figures:
        print_comparison(stored.figures, console)
    for peer in stored.skipped:
        print_notice(peer.line(), console)
    print_others(stored.others, console)
    if chart is not None:
        write_chart(chart, stored)


def write_chart(path: Path, stored: StoredFigures) -> None:
    """Write the chart of `stored` to `path`, which `check_chart` has checked.

    Raises:
        UsageError: no engine has figures.
        OutputError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure as Picture

    panels = list(_panels(stored.figures))
    if not panels:
        raise UsageError(_NO_BARS)
    notes = [part for line in _notes(stored) for part in wrap(line, _NOTE_WIDTH)]
    heights = [1.2 + _BAR_INCHES * len(panel.bars) for panel in panels]
    with matplotlib.rc_context(_STYLE):
        picture = Picture(figsize=(9, sum(heights) + 0.2 * len(notes)), layout="constrained")
        axes = picture.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for panel, axis in zip(panels, axes, strict=True):
            _draw(axis, panel)
        picture.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize="small", color="dimgray")
        try:
            picture.savefig(path, dpi=150)
        except OSError as error:
            raise OutputError(f"cannot write the chart {path}: {error.strerror or error}") from None


def _panels(figures: Sequence[Figure]) -> Iterator[_Panel]:
    """Of each model the ratios, the slowdowns of special rows, then the rates on each workload."""
    for model in dict.fromkeys(figure.model for figure in figures):
        own = [figure for figure in figures if figure.model == model]
        rates = [figure for figure in own if figure.metric == RATE]
        names = dict.fromkeys(figure.workload for figure in rates)
        groups = {name: [figure for figure in rates if figure.workload == name] for name in names}
        over = [(f, ours_over(f, rates)) for group in groups.values() for f in group]
        if ratios := [_Bar(f"{f.workload} / {f.engine}", spread, True) for f, spread in over if spread is not None]:
            title = f"{model}: {OURS}'s output tokens per second divided by each peer's, repeat by repeat"
            yield _Panel(title, "times the peer's rate", ratios, ratio=True)
        if slower := [_bar(f, f"{f.workload} / {f.engine}") for f in own if f.metric == SLOWDOWN]:
            title = f"{model}: slowdown of rows that request more than tokens"
            yield _Panel(title, "% slower than the same rows without their fields, repeat by repeat", slower)
        for name, group in groups.items():
            several = len({figure.dtype for figure in group}) > 1
            bars = [
                _bar(f, engine_text(f) + (f", {f.dtype}" if several else ""), share_text(f.floor_share))
                for f in sorted(group, key=lambda f: -f.value)
            ]
            floors = [f.floor_tokens_per_second for f in group if f.floor_tokens_per_second]
            unit = "output tokens per second" + (" (share of the arithmetic floor)" if floors else "")
            yield _Panel(f"{model}: {name}", unit, bars, max(floors, default=None))


def _bar(figure: Figure, label: str, note: str = "") -> _Bar:
    return _Bar(label, Spread(figure.value, figure.min, figure.max), figure.engine == OURS, note)


def _notes(stored: StoredFigures) -> list[str]:
    """Lines below the picture: the machines, versions and settings of each model's figures, and the skipped peers."""
    lines = []
    for model in dict.fromkeys(figure.model for figure in stored.figures):
        own = [figure for figure in stored.figures if figure.model == model]
        facts = (
            [f.cpu, f.device, f"{f.threads} threads", f.dtype, f"{f.repeat} repeats", f.commit and f"commit {f.commit}"]
            + [f"{name} {value}" for name, value in f.versions.items()]
            + [f.date[:10]]
            for f in own
        )
        lines.append(f"{model}: " + ", ".join(dict.fromkeys(fact for some in facts for fact in some if fact)))
    return lines + [peer.line() for peer in stored.skipped]


def _draw(axis: Any, panel: _Panel) -> None:
    places, spreads = range(len(panel.bars)), [bar.spread for bar in panel.bars]
    values = [spread.median for spread in spreads]
    ranges = [[s.median - s.min for s in spreads], [s.max - s.median for s in spreads]]
    if panel.ratio:
        axis.errorbar(values, places, xerr=ranges, fmt="o", color=_OURS, capsize=3)
        axis.set_xscale("log")
        axis.axvline(1.0, color="black", linewidth=1)
    else:
        colours = [_OURS if bar.ours else _PEER for bar in panel.bars]
        axis.barh(places, values, xerr=ranges, color=colours, height=0.6, capsize=3, error_kw={"linewidth": 1})
        axis.margins(x=0.18)  # room for the numbers
    for place, bar in zip(places, panel.bars, strict=True):
        digits = 0 if abs(bar.spread.median) >= 100 else 1 if abs(bar.spread.median) >= 10 else 2
        text = f"{bar.spread.median:,.{digits}f}" + (f" ({bar.note})" if bar.note else "")
        at, offset = (max(bar.spread.max, bar.spread.median), place), (5, 0)
        axis.annotate(text, at, offset, textcoords="offset points", ha="left", va="center", fontsize="small")
    axis.set_yticks(places, [bar.label for bar in panel.bars])
    axis.set_ylim(len(panel.bars) - 0.4, -0.6)
    if panel.floor is not None:
        axis.axvline(panel.floor, color=_FLOOR, linestyle="--", label=f"arithmetic floor {panel.floor:,.0f}")
        axis.legend(loc="lower right", fontsize="small", frameon=False)
    axis.set_title(panel.title, fontsize="medium", loc="left", wrap=True)
    axis.set_xlabel(panel.unit)
