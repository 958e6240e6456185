"""Figures as one HTML page that needs nothing else: inline SVG and CSS, no script, no network; light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from batchgen.job.bench.figures import Figure
from batchgen.job.bench.panels import Panel, Section, other_table, sections
from batchgen.job.bench.stored import LeftOut
from batchgen.job.bench.svg import NARROW, SERIES, chart

__all__ = ["page"]

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
"""Letters of a cell that may be broken into lines."""

_ABOUT: Final = {
    "plan": "The planner alone, without a model: seconds of wall clock; page waste as a share; sizes in bytes.",
    "job": "What a row costs beside the model: whole jobs of the demonstration model, one of them killed and resumed.",
    "startup": "Fresh interpreters: to the help, to the first token of one row, and to the end of that run.",
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
<p>All engines ran in turn in one call, each in a process of its own with the same threads, at the best of its settings.
A bar is the median of the repeats, its line their range; ratios are of repeats side by side. No engine is shown whose
greedy tokens were not the reference's in float32, within what the correctness gate allows; "85% equal" beside a name
says in how many of the checked rows they were, where that is below 95%.</p>
<p>The arithmetic floor is 2 × parameters × tokens at this machine's best rate of matrix products in any form, each
distinct prompt token once. Overlap and serial add attention, and what the decode steps must read: the longer of
reading and multiplying, or both one after the other.</p>
"""


def page(figures: Sequence[Figure], others: Sequence[Mapping[str, Any]] = (), left_out: Sequence[LeftOut] = ()) -> str:
    """The page.

    Args:
        figures: of engines on workloads.
        others: JSON objects of other measurements, which become tables as they stand.
        left_out: peers without figures, each with its reason.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>batchgen bench</title>",
        f"<style>{_colours()}{_STYLE}</style></head><body>",
        "<h1>batchgen bench</h1>",
        *(_section(section) for section in sections(figures, left_out)),
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
    return f"<h2>Model {escape(section.model)}</h2>\n<dl>{facts}</dl>\n{_left_out(section.left_out)}{panels}"


def _left_out(found: Sequence[LeftOut]) -> str:
    if not found:
        return ""
    told = "".join(
        f"<li><strong>{escape(left.engine)}</strong>, {escape(left.workload or 'all workloads')}: "
        f"{escape(left.reason)}</li>"
        for left in found
    )
    return f"<h3>Engines without figures</h3>\n<ul>{told}</ul>\n"


def _panel(panel: Panel) -> str:
    about = f"<p>{escape(panel.about)}</p>\n" if panel.about else ""
    head = f'<h3>{escape(panel.title)}</h3>\n{about}<div class="unit">{escape(panel.unit)}</div>'
    return f"{head}\n{chart(panel)}\n{chart(panel, NARROW)}\n{_table(panel.header, panel.rows)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "\n".join(f"<tr>{''.join(map(_cell, header, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _cell(name: str, text: str) -> str:
    """With its column's name, which stands beside it where the page is narrow."""
    kind = ' class="long"' if len(text) > _LONG else ""
    return f'<td{kind} data-name="{escape(name, quote=True)}">{escape(text)}</td>'


def _others(others: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table for each workload; columns are the keys with plain values."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for values in others:
        by_name.setdefault(str(values.get("workload", "other")), []).append(values)
    made = []
    for name, lines in by_name.items():
        header, rows, same = other_table(lines)
        facts = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in same.items())
        about = f"<p>{escape(_ABOUT[name])}</p>\n" if name in _ABOUT else ""
        made.append(f"<h2>Workload {escape(name)}</h2>\n{about}<dl>{facts}</dl>\n{_table(header, rows)}")
    return made
