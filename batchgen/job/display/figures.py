"""Labelled figures, as at the end of a run: a table on a terminal, a line each in a log."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchgen.request.printable import printable


def print_figures(lines: Sequence[tuple[str, Text]], console: Console) -> None:
    """Print a line for each (label, value); a value without a label belongs to the line before.

    On a terminal, long values are wrapped between words. In a log they are not, so that paths stay whole.
    """
    shown = [(label, Text(printable(value.plain), style=value.style)) for label, value in lines]
    width = max(len(label) for label, _ in shown)
    if not console.is_terminal:
        for label, value in shown:
            console.print(Text(f"{label:{width}}  ") + value, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in shown:
        table.add_row(label, value)
    console.print(table)
