"""`--chart FILE`: figures as an HTML page, or as a PNG picture where matplotlib is installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from batchgen.errors import OutputError, UsageError
from batchgen.job.bench.figures import Figure
from batchgen.job.bench.page import page
from batchgen.job.bench.panels import Panel, sections
from batchgen.job.bench.stored import read_figures
from batchgen.job.bench.table import print_comparison

__all__ = ["check_chart", "draw_stored", "write_chart"]

_LIBRARY: Final = "matplotlib"
_INCH: Final = 0.34
"""Of height for a bar."""
_OURS, _PEER, _FLOOR = "#1f6feb", "#a9b2bd", "#b35900"


def check_chart(path: Path) -> None:
    """Refuse a name that nothing can be written to, before hours of measuring.

    Raises:
        UsageError: it is neither .html nor .png, or a .png without matplotlib; its folder is missing.
    """
    kind = path.suffix.lower()
    if kind not in (".html", ".png"):
        raise UsageError(f"--chart must end in .html or .png, got {path}")
    if kind == ".png" and find_spec(_LIBRARY) is None:
        raise UsageError(f"--chart {path}: a PNG needs {_LIBRARY}, which is not installed; name a .html file instead")
    if not path.parent.is_dir():
        raise UsageError(f"--chart: there is no folder {path.parent}")


def write_chart(path: Path, figures: Sequence[Figure], others: Sequence[Mapping[str, Any]] = ()) -> None:
    """Draw figures to `path`, which `check_chart` let pass.

    Raises:
        UsageError: a PNG is asked for of measurements that have no chart.
        OutputError: it cannot be written.
    """
    try:
        if path.suffix.lower() == ".html":
            path.write_text(page(figures, others), encoding="utf-8")
        else:
            _write_png(path, [(s.model, panel) for s in sections(figures) for panel in s.panels])
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
    if chart is not None:
        write_chart(chart, stored.figures, stored.others)


def _write_png(path: Path, panels: Sequence[tuple[str, Panel]]) -> None:
    if not panels:
        raise UsageError("--chart: there is nothing to draw in a PNG; name a .html file, which has tables")
    heights = [1.2 + _INCH * len(panel.bars) for _, panel in panels]
    figure_type = importlib.import_module(f"{_LIBRARY}.figure").Figure
    canvas_type = importlib.import_module(f"{_LIBRARY}.backends.backend_agg").FigureCanvasAgg
    figure = figure_type(figsize=(9, sum(heights)), layout="constrained")
    canvas_type(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (model, panel), axis in zip(panels, axes, strict=True):
        _draw(axis, f"{model}: {panel.title}", panel)
    figure.savefig(path, dpi=150)


def _draw(axis: Any, title: str, panel: Panel) -> None:
    """Bars, or dots for ratios, the first on top, each with its range."""
    places = range(len(panel.bars))
    values = [bar.value for bar in panel.bars]
    ranges = [[bar.value - bar.low for bar in panel.bars], [bar.high - bar.value for bar in panel.bars]]
    if panel.times:  # a ratio of 2 is as far from even as one of a half
        axis.errorbar(values, places, xerr=ranges, fmt="o", color=_OURS, capsize=3)
        axis.set_xscale("log")
        axis.axvline(1.0, color="black", linewidth=1)
    else:
        colours = [_OURS if bar.ours else _PEER for bar in panel.bars]
        axis.barh(places, values, xerr=ranges, color=colours, height=0.6, capsize=3, error_kw={"linewidth": 1})
    axis.set_yticks(places, [f"{bar.label} / {bar.series}" if bar.series else bar.label for bar in panel.bars])
    axis.invert_yaxis()
    if panel.floor is not None:
        axis.axvline(panel.floor, color=_FLOOR, linestyle="--", label=f"arithmetic floor {panel.floor:,.0f}")
        axis.legend(loc="lower right", fontsize="small")
    axis.set_title(title, fontsize="medium", loc="left")
    axis.set_xlabel(panel.unit)
