"""Tables of figures on stderr: engines by workload, with as many columns as fit the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from batchgen.bench.figures import CPU_RATE, RATE, SLOWDOWN, Figure, ours_over
from batchgen.bench.gate import FULL_EQUALITY
from batchgen.bench.process import OURS

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
