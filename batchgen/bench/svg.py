"""Charts as inline SVG. Colours are CSS classes, defined by the page's style sheet for light and dark schemes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Final

from batchgen.bench.panels import Bar, Panel

__all__ = ["NARROW", "SERIES", "WIDE", "chart", "linear_ticks", "log_ticks", "value_text"]

SERIES: Final = 8
"""Number of colours of series; further series reuse them."""

WIDE: Final = 760
"""Width in CSS pixels of a chart with names to the left of the bars."""
NARROW: Final = 350
"""Width in CSS pixels of a chart for phones, with names above the bars."""
_ROW: Final = 30
_ABOVE: Final = 18
"""Height of a name above its bar."""
_LANE: Final = 13
"""Height of one peer's dot and range."""
_BAR: Final = 14
_TOP: Final = 26
_BOTTOM: Final = 30
_LABEL: Final = 7.4
"""Upper estimate of the width of a bold character at the page's font size."""
_MAX_LABEL_WIDTH: Final = 250
_EDGE: Final = 12.0
"""Position of the axis if names are above the bars."""
_MAX_FLOOR_RATIO: Final = 4.0
"""A floor above this multiple of the longest bar is not drawn, because the bars would be too short."""
_DOT: Final = 5.0

_Scale = Callable[[float], float]


def chart(panel: Panel, width: float = WIDE) -> str:
    """The panel as an `<svg>` element: bars from 0, or, for ratios, dots on a logarithmic axis with a line at 1.

    Args:
        panel: the panel to draw.
        width: width in CSS pixels. Names are above the bars if they are too long for this width.
    """
    return _dots(panel, width) if panel.times else _bars(panel, width)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """About `most` round numbers, from at most `low` to at most `high`."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * i for i in range(math.floor(low / step), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... and their inverses, from the last at or below `low` to the first at or above `high`; more steps
    if these are three or fewer.
    """
    for factors in ((1.0, 2.0, 5.0), (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, *(1 + i / 10 for i in range(1, 90)))):
        steps = [factor * 10.0**power for power in range(-6, 7) for factor in factors]
        first = max((s for s in steps if s <= low), default=steps[0])
        last = min((s for s in steps if s >= high), default=steps[-1])
        found = [step for step in steps if first <= step <= last]
        if len(found) > 3:
            break
    return found


def number(value: float) -> str:
    """A number with about three digits: 1,234 or 12.3 or 0.52."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def value_text(bar: Bar) -> str:
    """Text at a bar's end: its value, and its note in parentheses."""
    return number(bar.value) + (f" ({bar.note})" if bar.note else "")


def _tick(value: float) -> str:
    return f"{value:,.10g}"


def _left(labels: Sequence[str], width: float) -> float:
    """Position of the axis: right of the names, or `_EDGE` if they are too long and go above the bars."""
    wanted = max((len(label) for label in labels), default=0) * _LABEL
    return _EDGE if wanted > min(_MAX_LABEL_WIDTH, width * 0.4) else wanted + 14


def _bars(panel: Panel, width: float) -> str:
    left = _left([bar.label for bar in panel.bars], width)
    row = _ROW + (_ABOVE if left == _EDGE else 0)
    right = width - 10 - _LABEL * max(len(value_text(bar)) for bar in panel.bars)
    longest = max(bar.high for bar in panel.bars)
    floor = panel.floor if panel.floor is not None and panel.floor <= _MAX_FLOOR_RATIO * longest else None
    most = 6 if width >= WIDE else 4
    ticks = linear_ticks(min(0.0, *(bar.low for bar in panel.bars)), max(longest, floor or 0.0) * 1.02, most)
    low, high = ticks[0], max(ticks[-1], longest, floor or 0.0) or 1.0

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    height = _TOP + row * len(panel.bars) + _BOTTOM
    parts = [*_axis(ticks, x, height, _tick), *_baseline(x(0.0), height)]
    if floor is not None:  # drawn before the bars' numbers, which overlap it on a narrow page
        at = x(floor)
        parts.append(f'<line class="floor" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 6}" y2="{height - _BOTTOM}"/>')
        anchor = "end" if at > width * 0.6 else "start"
        shift = -4 if anchor == "end" else 4
        parts.append(_text(at + shift, _TOP - 10, f"arithmetic floor {number(floor)}", "note", anchor))
    for place, bar in enumerate(panel.bars):
        parts += _bar(bar, _TOP + row * (place + 1) - _ROW / 2, x, left, panel.unit)
    return _svg(panel, width, height, parts)


def _bar(bar: Bar, middle: float, x: _Scale, left: float, unit: str) -> Iterator[str]:
    start, end = sorted((x(0.0), x(bar.value)))
    kind = "ours" if bar.ours else "peer"
    text = f"{bar.label}: {value_text(bar)} {unit} ({number(bar.low)} to {number(bar.high)})"
    yield f"<g><title>{escape(text)}</title>"
    yield _name(bar.label, left, middle, _BAR / 2, "label ours-text" if bar.ours else "label")
    yield (
        f'<rect class="{kind}" x="{start:.1f}" y="{middle - _BAR / 2:.1f}" width="{max(end - start, 1):.1f}" '
        f'height="{_BAR}" rx="2"/>'
    )
    low, high = x(bar.low), x(bar.high)
    yield (
        f'<path class="range" d="M{low:.1f} {middle - 4:.1f}V{middle + 4:.1f}M{low:.1f} {middle:.1f}'
        f'H{high:.1f}M{high:.1f} {middle - 4:.1f}V{middle + 4:.1f}"/>'
    )
    yield _text(max(high, end) + 7, middle + 4, value_text(bar), "value", "start") + "</g>"


def _name(label: str, left: float, middle: float, half: float, kind: str) -> str:
    """A name to the left of a bar or row of dots centred at `middle`, or above it, where `half` is half its height."""
    if left == _EDGE:
        return _text(left, middle - half - 5, label, kind, "start")
    return _text(left - 10, middle + 4, label, kind, "end")


def _dots(panel: Panel, width: float) -> str:
    labels = list(dict.fromkeys(bar.label for bar in panel.bars))
    series = list(dict.fromkeys(bar.series for bar in panel.bars))
    left, right = _left(labels, width), width - 24
    lanes = max(_ROW - 8, _LANE * len(series))
    row = lanes + 16 + (_ABOVE if left == _EDGE else 0)
    ticks = log_ticks(min(1.0, *(bar.low for bar in panel.bars)), max(1.0, *(bar.high for bar in panel.bars)))
    low, high = math.log(ticks[0]), math.log(ticks[-1] if len(ticks) > 1 else ticks[0] * 2)

    def x(value: float) -> float:
        return left + (math.log(value) - low) / (high - low) * (right - left)

    legend = _legend(series, left if width >= WIDE else _EDGE, right)
    top = _TOP + 20 * (1 + max(line for _, _, line, _ in legend))
    height = top + row * len(labels) + _BOTTOM
    parts = [
        *_axis(_spaced_ticks(ticks, x), x, height, lambda value: f"{value:g}×", top),
        *_baseline(x(1.0), height, top),
    ]
    for number_of, at, line, name in legend:
        parts.append(f'<circle class="s{number_of}" cx="{at + _DOT:.1f}" cy="{14 + 20 * line}" r="{_DOT}"/>')
        parts.append(_text(at + 10 + _DOT, 18 + 20 * line, name, "note", "start"))
    for place, label in enumerate(labels):
        middle = top + row * (place + 1) - 8 - lanes / 2
        if place:
            parts.append(_line("grid", 0.0, width, top + row * place))
        parts.append(_name(label, left, middle, lanes / 2, "label"))
        for bar in panel.bars:
            if bar.label == label:
                lane = series.index(bar.series)
                parts += _dot(bar, middle + _LANE * (lane - (len(series) - 1) / 2), x, lane % SERIES)
    return _svg(panel, width, height, parts)


def _spaced_ticks(ticks: Sequence[float], x: _Scale) -> list[float]:
    """Ticks whose labels do not overlap; always includes the one at 1."""
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda tick: (tick != 1.0, tick)):
        if all(abs(x(tick) - x(other)) >= 5 * _LABEL for other in kept):
            kept.append(tick)
    return sorted(kept)


def _dot(bar: Bar, middle: float, x: _Scale, colour: int) -> Iterator[str]:
    text = f"{bar.label}: {number(bar.value)} times {bar.series} ({number(bar.low)} to {number(bar.high)})"
    yield f"<g><title>{escape(text)}</title>"
    yield f'<line class="l{colour}" x1="{x(bar.low):.1f}" x2="{x(bar.high):.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
    yield f'<circle class="s{colour}" cx="{x(bar.value):.1f}" cy="{middle:.1f}" r="{_DOT}"/></g>'


def _legend(series: Sequence[str], left: float, right: float) -> list[tuple[int, float, int, str]]:
    """(colour number, x, line, name) of each series, wrapped into lines."""
    placed, at, line = [], left, 0
    for place, name in enumerate(series):
        width = 26 + len(name) * _LABEL
        if at + width > right and at > left:
            at, line = left, line + 1
        placed.append((place % SERIES, at, line, name))
        at += width
    return placed


def _axis(
    ticks: Sequence[float], x: _Scale, height: float, tick_text: Callable[[float], str], top: float = _TOP
) -> Iterator[str]:
    for tick in ticks:
        at = x(tick)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - _BOTTOM}"/>'
        yield _text(at, height - _BOTTOM + 18, tick_text(tick), "note", "middle")


def _baseline(at: float, height: float, top: float = _TOP) -> Iterator[str]:
    yield f'<line class="base" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - _BOTTOM}"/>'


def _line(kind: str, start: float, end: float, y: float) -> str:
    return f'<line class="{kind}" x1="{start:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(panel: Panel, width: float, height: float, parts: Sequence[str]) -> str:
    text = escape(f"{panel.title}: {panel.unit}", quote=True)
    kind = "wide-chart" if width >= WIDE else "narrow-chart"
    size = f'viewBox="0 0 {width:g} {height:.0f}" style="max-width: {width:g}px"'
    return f'<svg class="{kind}" {size} role="img" aria-label="{text}">{"".join(parts)}</svg>'
