"""Tables of figures on stderr: engines by workload, with as many columns as fit the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from batchgen.bench.figures import CPU_RATE, RATE, SLOWDOWN, Figure, ours_over
from batchgen.bench.gate import FULL_EQUALITY
from batchgen.bench.process import OURS

_Cell = Callable[[Figure, "_RelatedFigures"], str]
_UNLIMITED: Final = 10_000
"""Width of output that is not a terminal."""


def engine_text(figure: Figure) -> str:
    """The engine's name, with the share of rows equal to the reference in float32 if it is below `FULL_EQUALITY`."""
    return figure.engine + (f" ({figure.rows_equal:.0%} equal)" if figure.rows_equal < FULL_EQUALITY else "")


def share_text(share: float | None) -> str:
    """A share in per cent; empty for None."""
    return "" if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


class _RelatedFigures:
    """Figures shown in the same line as a rate."""

    def __init__(self, figures: Sequence[Figure]) -> None:
        self._by_metric = {(f.metric, f.model, f.workload, f.engine, f.dtype): f for f in figures}
        self._figures = figures

    def get(self, metric: str, rate: Figure) -> Figure | None:
        """The figure of the same engine and workload with another metric."""
        return self._by_metric.get((metric, rate.model, rate.workload, rate.engine, rate.dtype))

    def times(self, rate: Figure) -> str:
        """Rate of batchgen divided by this one, with its range; empty for batchgen itself."""
        ratio = ours_over(rate, self._figures)
        return "" if ratio is None else f"{ratio.median:.2f} ({ratio.min:.2f}-{ratio.max:.2f})"

    def short_times(self, rate: Figure) -> str:
        """`times` without its range."""
        return self.times(rate).partition(" ")[0]


def _cpu(rate: Figure, related: _RelatedFigures) -> str:
    figure = related.get(CPU_RATE, rate)
    return "" if figure is None else f"{figure.value:,.1f}"


def _slower(rate: Figure, related: _RelatedFigures) -> str:
    figure = related.get(SLOWDOWN, rate)
    return "" if figure is None else f"{figure.value:.1f} ({figure.min:.1f}-{figure.max:.1f})"


_WORKLOAD: Final = ("workload", lambda f, _: f.workload)
_ENGINE: Final = ("engine", lambda f, _: engine_text(f))
_SETTING: Final = ("setting", lambda f, _: ", ".join(f"{key} {value}" for key, value in f.setting.items()))
_DTYPE: Final = ("format", lambda f, _: f.dtype)
_SPREAD: Final = ("tokens/s (min-max)", lambda f, _: f"{f.value:,.1f} ({f.min:,.1f}-{f.max:,.1f})")
_MEDIAN: Final = ("tokens/s", lambda f, _: f"{f.value:,.1f}")
_CPU: Final = ("tokens/CPU-s", _cpu)
_FLOOR: Final = ("floor", lambda f, _: share_text(f.floor_share))
_SERIAL: Final = ("serial", lambda f, _: share_text(f.floors.get("serial", {}).get("share")))
_TIMES: Final = (f"{OURS} over it", lambda f, b: b.times(f))
_SHORT_TIMES: Final = ("x", lambda f, b: b.short_times(f))
_SLOWER: Final = ("% slower than plain", _slower)

_DETAILS: Final[tuple[tuple[tuple[str, _Cell], ...], ...]] = (
    (_WORKLOAD, _ENGINE, _SETTING, _DTYPE, _SPREAD, _CPU, _FLOOR, _SERIAL, _TIMES, _SLOWER),
    (_WORKLOAD, _ENGINE, _SPREAD, _FLOOR, _TIMES, _SLOWER),
    (_WORKLOAD, _ENGINE, _SPREAD, _FLOOR, _SHORT_TIMES),
    (_WORKLOAD, _ENGINE, _MEDIAN, _FLOOR, _SHORT_TIMES),
    (_ENGINE, _MEDIAN, _SHORT_TIMES),
)
"""Columns for terminals from wide to narrow. "floor" is the share of the arithmetic floor, "serial" of the serial one.
"""
_LEFT: Final = ("workload", "engine", "setting", "format")


def print_comparison(figures: Sequence[Figure], console: Console) -> None:
    """Print the most detailed table that fits the terminal; the full table if the output is not a terminal."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_UNLIMITED, color_system=None)
    console.print(comparison(figures, console.width))


def print_others(others: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print figures of workloads without engines, one table per workload with a column for each JSON line."""
    for name in dict.fromkeys(str(line.get("workload", "other")) for line in others):
        header, rows, same = _other_table([line for line in others if str(line.get("workload", "other")) == name])
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        for _ in rows:
            table.add_column(justify="right")
        for i, key in enumerate(header):
            table.add_row(key, *(Text(row[i]) for row in rows))
        wide = console if console.is_terminal else Console(file=console.file, width=_UNLIMITED, color_system=None)
        wide.print(Text(name, style="bold"))
        if Measurement.get(unlimited := Console(width=_UNLIMITED), unlimited.options, table).maximum <= wide.width:
            wide.print(table)
        else:
            for row in rows:
                line = ", ".join(f"{key} {text}" for key, text in zip(header, row, strict=True) if text)
                wide.print(Text(line), soft_wrap=False)
        wide.print(Text(", ".join(f"{key} {text}" for key, text in same.items()), style="dim"))


def _other_table(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]], dict[str, str]]:
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


def comparison(figures: Sequence[Figure], width: int = _UNLIMITED) -> Table:
    """Table with one line per workload and engine: the most detailed one of at most `width` characters, or else the
    narrowest.
    """
    console = Console(width=_UNLIMITED)
    tables = (_table(figures, columns) for columns in _DETAILS)
    table = next(tables)
    while Measurement.get(console, console.options, table).maximum > width:
        following = next(tables, None)
        if following is None:
            break
        table = following
    return table


def _table(figures: Sequence[Figure], columns: Sequence[tuple[str, _Cell]]) -> Table:
    related = _RelatedFigures(figures)
    rates = [figure for figure in figures if figure.metric == RATE]
    cells = [[cell(figure, related) for _, cell in columns] for figure in rates]
    # Empty columns are dropped. A table without a workload column has a heading line for each workload instead.
    kept = [i for i, (name, _) in enumerate(columns) if name in _LEFT[:2] or any(line[i] for line in cells)]
    workload_headings = columns[0][0] != "workload"
    models = dict.fromkeys(figure.model for figure in rates)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i in kept:
        table.add_column(columns[i][0], no_wrap=True, justify="left" if columns[i][0] in _LEFT else "right")
    model, workload = None, None
    for figure, line in zip(rates, cells, strict=True):
        if len(models) > 1 and figure.model != model:
            table.add_row(Text(figure.model, style="bold"))
            model, workload = figure.model, None
        if workload_headings and figure.workload != workload:
            table.add_row(Text(figure.workload, style="bold"))
        workload = figure.workload
        table.add_row(*(Text(line[i]) for i in kept))
    return table
