"""`--chart FILE`: a picture of results, drawn by matplotlib: a panel for each workload, and summaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from rich.console import Console

from batchgen.bench.figures import RATE, SLOWDOWN, Figure, Spread, ours_over
from batchgen.bench.process import OURS
from batchgen.bench.results import StoredFigures, print_notice, read_figures
from batchgen.bench.table import engine_text, print_comparison, print_others, share_text
from batchgen.errors import OutputError, UsageError

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
