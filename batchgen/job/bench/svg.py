"""Charts as inline SVG. Colours are classes that the page's style sheet fills in, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Final

from batchgen.job.bench.panels import Bar, Panel

__all__ = ["SERIES", "chart", "linear_ticks", "log_ticks"]

SERIES: Final = 8
"""Series that have colours of their own; further ones begin again."""

_WIDTH: Final = 760
_ROW: Final = 30
_BAR: Final = 14
_TOP: Final = 26
_BOTTOM: Final = 30
_LABEL: Final = 7.4
"""Width of a letter at the size that the page sets, in bold, rather more than less."""
_MOST_LABEL: Final = 230
_VALUES: Final = 70
"""Room for the numbers at the bars' ends."""
_MOST_FLOOR: Final = 4.0
"""A floor further off than so many times the longest bar would leave the bars no room; the table has it."""
_DOT: Final = 5.0

_Scale = Callable[[float], float]


def chart(panel: Panel) -> str:
    """The panel as an `<svg>` element: bars from 0, or for ratios dots on a logarithmic axis with a line at 1."""
    return _dots(panel) if panel.times else _bars(panel)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from at most `low` to at most `high`, some of `most`."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * i for i in range(math.floor(low / step), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... and their inverses, from the last at or below `low` to the first at or above `high`."""
    steps = [factor * 10.0**power for power in range(-6, 7) for factor in (1, 2, 5)]
    first = max((s for s in steps if s <= low), default=steps[0])
    last = min((s for s in steps if s >= high), default=steps[-1])
    return [step for step in steps if first <= step <= last]


def number(value: float) -> str:
    """A number as short as its size allows: 1,234 or 12.3 or 0.52."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _tick(value: float) -> str:
    return f"{value:,.10g}"


def _label_width(labels: Sequence[str]) -> float:
    return min(_MOST_LABEL, max((len(label) for label in labels), default=0) * _LABEL) + 14


def _bars(panel: Panel) -> str:
    left, right = _label_width([bar.label for bar in panel.bars]), _WIDTH - _VALUES
    longest = max(bar.high for bar in panel.bars)
    floor = panel.floor if panel.floor is not None and panel.floor <= _MOST_FLOOR * longest else None
    ticks = linear_ticks(min(0.0, *(bar.low for bar in panel.bars)), max(longest, floor or 0.0) * 1.02)
    low, high = ticks[0], max(ticks[-1], longest, floor or 0.0) or 1.0

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    height = _TOP + _ROW * len(panel.bars) + _BOTTOM
    parts = [*_axis(ticks, x, height, _tick), *_baseline(x(0.0), height)]
    for place, bar in enumerate(panel.bars):
        parts += _bar(bar, place, x, left, panel.unit)
    if floor is not None:
        at = x(floor)
        parts.append(f'<line class="floor" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 6}" y2="{height - _BOTTOM}"/>')
        anchor = "end" if at > _WIDTH * 0.6 else "start"
        shift = -4 if anchor == "end" else 4
        parts.append(_text(at + shift, _TOP - 10, f"arithmetic floor {number(floor)}", "note", anchor))
    return _svg(panel, height, parts)


def _bar(bar: Bar, place: int, x: _Scale, left: float, unit: str) -> Iterator[str]:
    middle = _TOP + _ROW * (place + 0.5)
    start, end = sorted((x(0.0), x(bar.value)))
    kind = "ours" if bar.ours else "peer"
    told = f"{bar.label}: {number(bar.value)} {unit} ({number(bar.low)} to {number(bar.high)})"
    yield f"<g><title>{escape(told)}</title>"
    yield _text(left - 10, middle + 4, bar.label, "label ours-text" if bar.ours else "label", "end")
    yield (
        f'<rect class="{kind}" x="{start:.1f}" y="{middle - _BAR / 2:.1f}" width="{max(end - start, 1):.1f}" '
        f'height="{_BAR}" rx="2"/>'
    )
    low, high = x(bar.low), x(bar.high)
    yield (
        f'<path class="range" d="M{low:.1f} {middle - 4:.1f}V{middle + 4:.1f}M{low:.1f} {middle:.1f}'
        f'H{high:.1f}M{high:.1f} {middle - 4:.1f}V{middle + 4:.1f}"/>'
    )
    yield _text(max(high, end) + 7, middle + 4, number(bar.value), "value", "start") + "</g>"


def _dots(panel: Panel) -> str:
    labels = list(dict.fromkeys(bar.label for bar in panel.bars))
    series = list(dict.fromkeys(bar.series for bar in panel.bars))
    left, right = _label_width(labels), _WIDTH - 24
    ticks = log_ticks(min(1.0, *(bar.low for bar in panel.bars)), max(1.0, *(bar.high for bar in panel.bars)))
    low, high = math.log(ticks[0]), math.log(ticks[-1] if len(ticks) > 1 else ticks[0] * 2)

    def x(value: float) -> float:
        return left + (math.log(value) - low) / (high - low) * (right - left)

    legend = _legend(series, left, right)
    top = _TOP + 20 * (1 + max(line for _, _, line, _ in legend))
    height = top + _ROW * len(labels) + _BOTTOM
    parts = [*_axis(ticks, x, height, lambda value: f"{value:g}×", top), *_baseline(x(1.0), height, top)]
    for number_of, at, line, name in legend:
        parts.append(f'<circle class="s{number_of}" cx="{at:.1f}" cy="{14 + 20 * line}" r="{_DOT}"/>')
        parts.append(_text(at + 10, 18 + 20 * line, name, "note", "start"))
    for place, label in enumerate(labels):
        middle = top + _ROW * (place + 0.5)
        parts.append(_text(left - 10, middle + 4, label, "label", "end"))
        for bar in panel.bars:
            if bar.label == label:
                parts += _dot(bar, middle, x, series.index(bar.series) % SERIES)
    return _svg(panel, height, parts)


def _dot(bar: Bar, middle: float, x: _Scale, colour: int) -> Iterator[str]:
    told = f"{bar.label}: {number(bar.value)} times {bar.series} ({number(bar.low)} to {number(bar.high)})"
    yield f"<g><title>{escape(told)}</title>"
    yield f'<line class="l{colour}" x1="{x(bar.low):.1f}" x2="{x(bar.high):.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
    yield f'<circle class="s{colour}" cx="{x(bar.value):.1f}" cy="{middle:.1f}" r="{_DOT}"/></g>'


def _legend(series: Sequence[str], left: float, right: float) -> list[tuple[int, float, int, str]]:
    """(colour, x, line, name) of each series, in as many lines as it takes."""
    placed, at, line = [], left, 0
    for place, name in enumerate(series):
        width = 26 + len(name) * _LABEL
        if at + width > right and at > left:
            at, line = left, line + 1
        placed.append((place % SERIES, at, line, name))
        at += width
    return placed


def _axis(
    ticks: Sequence[float], x: _Scale, height: float, told: Callable[[float], str], top: float = _TOP
) -> Iterator[str]:
    for tick in ticks:
        at = x(tick)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - _BOTTOM}"/>'
        yield _text(at, height - _BOTTOM + 18, told(tick), "note", "middle")


def _baseline(at: float, height: float, top: float = _TOP) -> Iterator[str]:
    yield f'<line class="base" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - _BOTTOM}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(panel: Panel, height: float, parts: Sequence[str]) -> str:
    told = escape(f"{panel.title}: {panel.unit}", quote=True)
    body = "".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{told}">{body}</svg>'
