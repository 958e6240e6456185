"""`--chart FILE`: results as a self-contained HTML page, or as a PNG if matplotlib is installed.

The page has inline SVG and CSS, no script and no network access; it follows the reader's light or dark scheme.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from rich.console import Console

from batchgen.bench.figures import Figure
from batchgen.bench.panels import Panel, Section, other_table, sections
from batchgen.bench.results import SkippedPeer, StoredFigures, read_figures
from batchgen.bench.svg import NARROW, SERIES, chart, log_ticks, value_text
from batchgen.bench.table import print_comparison, print_others
from batchgen.errors import OutputError, UsageError

__all__ = ["check_chart", "draw_stored", "page", "write_chart"]

_LIGHT: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#5d4aa8", "#666666")
_DARK: Final = ("#4aa8e0", "#ff8a3c", "#2fcf9f", "#f0a3cc", "#e0bf3a", "#9ad5f5", "#a893f0", "#b5b5b5")
assert len(_LIGHT) == len(_DARK) == SERIES

_VARIABLES: Final = (
    (
        ("surface", "#ffffff"), ("ink", "#1b1f24"), ("soft", "#5b6470"), ("grid", "#e4e7eb"), ("ours", "#1f6feb"),
        ("peer", "#a9b2bd"), ("range", "#30363d"), ("floor", "#b35900"),
    ),
    (
        ("surface", "#14171b"), ("ink", "#e8eaed"), ("soft", "#a0a8b2"), ("grid", "#2b3038"), ("ours", "#5b9dff"),
        ("peer", "#5d6671"), ("range", "#d5d9de"), ("floor", "#f0a35e"),
    ),
)  # fmt: skip

_LONG: Final = 30
"""Number of characters above which a table cell may wrap."""

_ABOUT: Final = {
    "plan": "The planner alone, without a model: wall-clock seconds; page waste as a share; sizes in bytes.",
    "job": "Cost of a row outside the model: whole jobs of the demonstration model, one of them killed and resumed.",
    "startup": "Fresh interpreters: time to the help, to the first token of one row, and to the end of that run.",
}

_STYLE: Final = """
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 75rem; background: var(--surface); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 2rem 0 .25rem; }
p, dl { color: var(--soft); margin: .25rem 0; max-width: 46rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; font-size: .875rem; }
dt { color: var(--ink); } dd { margin: 0; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; margin: .5rem 0; } .narrow-chart { display: none; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .note, .unit { fill: var(--soft); color: var(--soft); font-size: 12px; }
svg .value { font-variant-numeric: tabular-nums; paint-order: stroke; stroke: var(--surface); stroke-width: 4px; }
svg .ours-text { font-weight: 600; }
.grid { stroke: var(--grid); } .base { stroke: var(--soft); }
.ours { fill: var(--ours); } .peer { fill: var(--peer); }
.range { stroke: var(--range); stroke-width: 1.2; fill: none; }
.floor { stroke: var(--floor); stroke-width: 1.5; stroke-dasharray: 5 4; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; margin: .25rem 0 1rem; }
th, td { padding: .25rem .75rem .25rem 0; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--soft); white-space: normal; vertical-align: bottom; }
td.long { white-space: normal; min-width: 11rem; } td:last-child { white-space: normal; overflow-wrap: anywhere; }
ul { margin: .25rem 0; padding-left: 1.25rem; font-size: .875rem; overflow-wrap: anywhere; max-width: 60rem; }
@media (max-width: 720px) {
  .wide-chart, thead { display: none; } .narrow-chart { display: block; }
  table, tbody, tr, td { display: block; }
  tr { border-bottom: 1px solid var(--grid); padding: .375rem 0; }
  td, td.long { display: grid; grid-template-columns: 9.5rem 1fr; white-space: normal; border: 0; padding: 0;
    overflow-wrap: anywhere; }
  td::before { content: attr(data-name); color: var(--soft); } td:empty { display: none; }
  td:first-child { font-weight: 600; }
}
"""

_HOW_TO_READ: Final = """
<h2>How to read it</h2>
<p>All engines ran alternately in one call, each in a separate process with the same number of threads and its fastest
setting. A bar is the median of the repeats, its line their range; a ratio compares two engines repeat by repeat. Every
engine shown passed the correctness gate: its greedy tokens in float32 equal those of the reference, up to the gate's
tolerance. "85% equal" after a name is the share of checked rows that are equal, shown where it is below 95%.</p>
<p>The arithmetic floor is 2 × parameters × tokens at the highest matrix multiplication rate measured on this machine,
each distinct prompt token once. Overlap and serial add attention and the reads of the decode steps: the longer of
reading and computing, or the sum of both.</p>
"""


def page(
    figures: Sequence[Figure], others: Sequence[Mapping[str, Any]] = (), skipped: Sequence[SkippedPeer] = ()
) -> str:
    """The HTML page.

    Args:
        figures: figures of engines on workloads.
        others: JSON objects of other measurements; each workload becomes a table.
        skipped: peers without figures, with the reasons.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>batchgen bench</title>",
        f"<style>{_colours()}{_STYLE}</style></head><body>",
        "<h1>batchgen bench</h1>",
        *(_section(section) for section in sections(figures, skipped)),
        *_others(others),
        _HOW_TO_READ if figures else "",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _colours() -> str:
    def root(variables: Sequence[tuple[str, str]], series: Sequence[str]) -> str:
        named = [*variables, *((f"s{i}", colour) for i, colour in enumerate(series))]
        return ":root { " + " ".join(f"--{name}: {value};" for name, value in named) + " }"

    light, dark = (root(*both) for both in zip(_VARIABLES, (_LIGHT, _DARK), strict=True))
    series = " ".join(
        f".s{i} {{ fill: var(--s{i}); }} .l{i} {{ stroke: var(--s{i}); stroke-width: 2; }}" for i in range(SERIES)
    )
    scheme = ":root { color-scheme: light dark; }"
    return f"{scheme}\n{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{series}"


def _section(section: Section) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in section.facts)
    panels = "\n".join(_panel(panel) for panel in section.panels)
    return f"<h2>Model {escape(section.model)}</h2>\n<dl>{facts}</dl>\n{_skipped_list(section.skipped)}{panels}"


def _skipped_list(found: Sequence[SkippedPeer]) -> str:
    if not found:
        return ""
    items = "".join(
        f"<li><strong>{escape(peer.engine)}</strong>, {escape(peer.workload or 'all workloads')}: "
        f"{escape(peer.reason)}</li>"
        for peer in found
    )
    return f"<h3>Engines without figures</h3>\n<ul>{items}</ul>\n"


def _panel(panel: Panel) -> str:
    about = f"<p>{escape(panel.about)}</p>\n" if panel.about else ""
    head = f'<h3>{escape(panel.title)}</h3>\n{about}<div class="unit">{escape(panel.unit)}</div>'
    return f"{head}\n{chart(panel)}\n{chart(panel, NARROW)}\n{_table(panel.header, panel.rows)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "\n".join(f"<tr>{''.join(map(_cell, header, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _cell(name: str, text: str) -> str:
    """A table cell with its column's name, which a narrow page shows in front of it."""
    kind = ' class="long"' if len(text) > _LONG else ""
    return f'<td{kind} data-name="{escape(name, quote=True)}">{escape(text)}</td>'


def _others(others: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table for each workload; columns are the keys with scalar values."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for values in others:
        by_name.setdefault(str(values.get("workload", "other")), []).append(values)
    tables = []
    for name, lines in by_name.items():
        header, rows, same = other_table(lines)
        facts = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in same.items())
        about = f"<p>{escape(_ABOUT[name])}</p>\n" if name in _ABOUT else ""
        tables.append(f"<h2>Workload {escape(name)}</h2>\n{about}<dl>{facts}</dl>\n{_table(header, rows)}")
    return tables


_LIBRARY: Final = "matplotlib"
_NO_BARS: Final = "--chart: a PNG has no tables, and there are no bars to draw; name a .html file instead"
_BAR_INCHES: Final = 0.34
"""Height of a bar in inches."""
_NOTE_WIDTH: Final = 130
"""Number of characters per line below the picture."""
_OURS, _PEER, _FLOOR = "#1f6feb", "#a9b2bd", "#b35900"


def check_chart(path: Path, *, bars: bool = True) -> None:
    """Check that a chart can be written to `path`, before a long measurement.

    Args:
        path: the file to write.
        bars: whether engines are measured; other workloads have tables only.

    Raises:
        UsageError: the name ends in neither .html nor .png; a .png has no bars or there is no matplotlib; the folder
            does not exist.
    """
    kind = path.suffix.lower()
    if kind not in (".html", ".png"):
        raise UsageError(f"--chart must end in .html or .png, got {path}")
    if kind == ".png" and not bars:
        raise UsageError(_NO_BARS)
    if kind == ".png" and find_spec(_LIBRARY) is None:
        raise UsageError(f"--chart {path}: a PNG needs {_LIBRARY}, which is not installed; name a .html file instead")
    if not path.parent.is_dir():
        raise UsageError(f"--chart: the folder {path.parent} does not exist; create it, or name another file")


def write_chart(path: Path, stored: StoredFigures) -> None:
    """Write the chart of `stored` to `path`, which `check_chart` has checked.

    Raises:
        UsageError: the name ends in .png and no engine has figures.
        OutputError: the file cannot be written.
    """
    try:
        if path.suffix.lower() == ".html":
            path.write_text(page(stored.figures, stored.others, stored.skipped), encoding="utf-8")
        else:
            _write_png(path, sections(stored.figures, stored.skipped))
    except OSError as error:
        raise OutputError(f"cannot write the chart {path}: {error.strerror or error}") from None


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
        console.print(peer.line(), style="yellow", soft_wrap=True, markup=False)
    print_others(stored.others, console)
    if chart is not None:
        write_chart(chart, stored)


def _write_png(path: Path, found: Sequence[Section]) -> None:
    panels = [(section.model, panel) for section in found for panel in section.panels]
    if not panels:
        raise UsageError(_NO_BARS)
    heights = [1.2 + _BAR_INCHES * len(panel.bars) for _, panel in panels]
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
    """Lines below a picture: the machine and versions, and the skipped peers."""
    facts = "; ".join(f"{name}: {value}" for name, value in section.facts)
    lines = [f"{section.model}: {facts}", *(peer.line() for peer in section.skipped)]
    return [part for line in lines for part in wrap(line, _NOTE_WIDTH)]


def _draw(axis: Any, title: str, panel: Panel) -> None:
    """Draw bars, or dots for ratios, each with its range; the first is on top."""
    places = range(len(panel.bars))
    values = [bar.value for bar in panel.bars]
    ranges = [[bar.value - bar.low for bar in panel.bars], [bar.high - bar.value for bar in panel.bars]]
    if panel.times:  # a logarithmic axis: ratios of 2 and 1/2 are equally far from 1
        axis.errorbar(values, places, xerr=ranges, fmt="o", color=_OURS, capsize=3)
        axis.set_xscale("log")
        ticks = log_ticks(min(1.0, *(bar.low for bar in panel.bars)), max(1.0, *(bar.high for bar in panel.bars)))
        axis.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
        axis.minorticks_off()
        axis.axvline(1.0, color="black", linewidth=1)
    else:
        colours = [_OURS if bar.ours else _PEER for bar in panel.bars]
        axis.barh(places, values, xerr=ranges, color=colours, height=0.6, capsize=3, error_kw={"linewidth": 1})
        axis.margins(x=0.18)  # room for the numbers
    for place, bar in zip(places, panel.bars, strict=True):
        at = (bar.value, place) if panel.times else (max(bar.high, bar.value), place)
        away = (0, 6) if panel.times else (5, 0)
        sides = {"ha": "center", "va": "bottom"} if panel.times else {"ha": "left", "va": "center"}
        axis.annotate(value_text(bar), at, away, textcoords="offset points", fontsize="small", **sides)
    axis.set_yticks(places, [f"{bar.label} / {bar.series}" if bar.series else bar.label for bar in panel.bars])
    axis.set_ylim(len(panel.bars) - 0.4, -0.6)  # the first on top
    if panel.floor is not None:
        axis.axvline(panel.floor, color=_FLOOR, linestyle="--")
        text = f"arithmetic floor {panel.floor:,.0f}"
        offset: Any = {"xytext": (-4, 0), "textcoords": "offset points", "xycoords": ("data", "axes fraction")}
        axis.annotate(text, (panel.floor, 0.03), **offset, ha="right", va="bottom", fontsize="small", color=_FLOOR)
    axis.set_title(title, fontsize="medium", loc="left", wrap=True)
    axis.set_xlabel(panel.unit)
