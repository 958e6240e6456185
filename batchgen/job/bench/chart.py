"""`--chart FILE`: figures as an HTML page, or as a PNG picture where matplotlib is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from rich.console import Console

from batchgen.errors import OutputError, UsageError
from batchgen.job.bench.page import page
from batchgen.job.bench.panels import Panel, Section, sections
from batchgen.job.bench.stored import StoredFigures, read_figures
from batchgen.job.bench.svg import log_ticks, value_text
from batchgen.job.bench.table import print_comparison, print_others

__all__ = ["check_chart", "draw_stored", "write_chart"]

_LIBRARY: Final = "matplotlib"
_NO_BARS: Final = "--chart: there is nothing to draw in a PNG; name a .html file, which has tables"
_INCH: Final = 0.34
"""Of height for a bar."""
_LETTERS: Final = 130
"""In a line under the picture."""
_OURS, _PEER, _FLOOR = "#1f6feb", "#a9b2bd", "#b35900"


def check_chart(path: Path, *, bars: bool = True) -> None:
    """Refuse a name that nothing can be written to, before hours of measuring.

    Args:
        path: the file.
        bars: whether engines are measured; other figures have tables alone.

    Raises:
        UsageError: it is neither .html nor .png, or a .png without bars or without matplotlib; its folder is missing.
    """
    kind = path.suffix.lower()
    if kind not in (".html", ".png"):
        raise UsageError(f"--chart must end in .html or .png, got {path}")
    if kind == ".png" and not bars:
        raise UsageError(_NO_BARS)
    if kind == ".png" and find_spec(_LIBRARY) is None:
        raise UsageError(f"--chart {path}: a PNG needs {_LIBRARY}, which is not installed; name a .html file instead")
    if not path.parent.is_dir():
        raise UsageError(f"--chart: there is no folder {path.parent}")


def write_chart(path: Path, stored: StoredFigures) -> None:
    """Draw figures to `path`, which `check_chart` let pass.

    Raises:
        UsageError: a PNG is asked for of measurements that have no chart.
        OutputError: it cannot be written.
    """
    try:
        if path.suffix.lower() == ".html":
            path.write_text(page(stored.figures, stored.others, stored.left_out), encoding="utf-8")
        else:
            _write_png(path, sections(stored.figures, stored.left_out))
    except OSError as error:
        raise OutputError(f"cannot write the chart {path}: {error.strerror or error}") from None


def draw_stored(path: Path, chart: Path | None, console: Console) -> None:
    """Print the comparison of an earlier run's figures to `console` and draw them to `chart`, if one is given.

    Raises:
        UsageError: the file holds no figures, or `chart` cannot be drawn.
        OutputError: as `write_chart`.
    """
    if chart is not None:
        check_chart(chart)
    stored = read_figures(path)
    if stored.figures:
        print_comparison(stored.figures, console)
    for left in stored.left_out:
        console.print(left.line(), style="yellow", soft_wrap=True, markup=False)
    print_others(stored.others, console)
    if chart is not None:
        write_chart(chart, stored)


def _write_png(path: Path, found: Sequence[Section]) -> None:
    panels = [(section.model, panel) for section in found for panel in section.panels]
    if not panels:
        raise UsageError(_NO_BARS)
    heights = [1.2 + _INCH * len(panel.bars) for _, panel in panels]
    notes = [line for section in found for line in _notes(section)]
    figure_type = importlib.import_module(f"{_LIBRARY}.figure").Figure
    canvas_type = importlib.import_module(f"{_LIBRARY}.backends.backend_agg").FigureCanvasAgg
    figure = figure_type(figsize=(9, sum(heights) + 0.2 * len(notes)), layout="constrained")
    canvas_type(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (model, panel), axis in zip(panels, axes, strict=True):
        _draw(axis, f"{model}: {panel.title}" + (f" ({panel.about})" if panel.about else ""), panel)
    figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize="small", color="dimgray", parse_math=False)
    figure.savefig(path, dpi=150)


def _notes(section: Section) -> list[str]:
    """What stands under a picture: what was measured with, and which peers are not in it."""
    told = "; ".join(f"{name}: {value}" for name, value in section.facts)
    lines = [f"{section.model}: {told}", *(left.line() for left in section.left_out)]
    return [part for line in lines for part in wrap(line, _LETTERS)]


def _draw(axis: Any, title: str, panel: Panel) -> None:
    """Bars, or dots for ratios, the first on top, each with its range."""
    places = range(len(panel.bars))
    values = [bar.value for bar in panel.bars]
    ranges = [[bar.value - bar.low for bar in panel.bars], [bar.high - bar.value for bar in panel.bars]]
    if panel.times:  # a ratio of 2 is as far from even as one of a half
        axis.errorbar(values, places, xerr=ranges, fmt="o", color=_OURS, capsize=3)
        axis.set_xscale("log")
        ticks = log_ticks(min(1.0, *(bar.low for bar in panel.bars)), max(1.0, *(bar.high for bar in panel.bars)))
        axis.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
        axis.minorticks_off()
        axis.axvline(1.0, color="black", linewidth=1)
    else:
        colours = [_OURS if bar.ours else _PEER for bar in panel.bars]
        axis.barh(places, values, xerr=ranges, color=colours, height=0.6, capsize=3, error_kw={"linewidth": 1})
        axis.margins(x=0.18)  # for the numbers
    for place, bar in zip(places, panel.bars, strict=True):
        at = (bar.value, place) if panel.times else (max(bar.high, bar.value), place)
        away = (0, 6) if panel.times else (5, 0)
        sides = {"ha": "center", "va": "bottom"} if panel.times else {"ha": "left", "va": "center"}
        axis.annotate(value_text(bar), at, away, textcoords="offset points", fontsize="small", **sides)
    axis.set_yticks(places, [f"{bar.label} / {bar.series}" if bar.series else bar.label for bar in panel.bars])
    axis.set_ylim(len(panel.bars) - 0.4, -0.6)  # the first on top
    if panel.floor is not None:
        axis.axvline(panel.floor, color=_FLOOR, linestyle="--")
        told = f"arithmetic floor {panel.floor:,.0f}"
        beside: Any = {"xytext": (-4, 0), "textcoords": "offset points", "xycoords": ("data", "axes fraction")}
        axis.annotate(told, (panel.floor, 0.03), **beside, ha="right", va="bottom", fontsize="small", color=_FLOOR)
    axis.set_title(title, fontsize="medium", loc="left", wrap=True)
    axis.set_xlabel(panel.unit)
