"""`batchgen show`: results as a table or one whole row on a terminal, as tab-separated or JSON lines in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchgen.data.out.view import Results, open_results
from batchgen.data.schema import non_finite_to_none
from batchgen.errors import InputError
from batchgen.job.display.console import SafeConsole
from batchgen.request.foreign_text import read_json
from batchgen.request.printable import json_printable, printable

Record = Mapping[str, Any]

_LISTED = [
    *("row_index", "prompt_index", "sample_index", "id", "status", "finish_reason", "error"),
    *("text", "tool_calls", "scores", "embedding"),
]
_LIST_ITEMS = 16
_ID_WIDTH = 24
_TEXT_WIDTH = 8
"""Least number of cells for the text column."""
_GAP = 2
_HEADERS = ("row", "id", "outcome")


def show_results(
    out: Path, *, errors_only: bool, limit: int | None, finished: bool = False, console: Console | None = None
) -> None:
    """List the samples of `out`, at most `limit`; on a terminal, a line of counts follows.

    Args:
        out: path, as for `open_results`.
        errors_only: list failed samples only.
        limit: most samples to list; None for all.
        finished: show the finished output even if newer, unfinished work exists.
        console: the console to print to; stdout if None.

    Raises:
        InputError: there are no results to read.
        UsageError: a folder without results.
    """
    console = console or SafeConsole()
    results = _open_with_note(out, finished)
    rows = islice(results.rows(errors=errors_only, columns=_LISTED), limit)
    if not console.is_terminal:
        for row in rows:
            fields = (_label(row), row["id"] or "", row["status"], _outcome(row), message_of(row))
            sys.stdout.write("\t".join(printable(field) for field in fields) + "\n")
        return
    listed = list(rows)
    console.print(_table(listed, console.width))
    console.print(Text(_counts(results, len(listed), errors_only), style="dim"))


def show_row(out: Path, row_index: int, *, finished: bool = False, console: Console | None = None) -> None:
    """Print all columns of one input row: a block per sample on a terminal, JSON lines in a pipe.

    NaN and infinity are null in JSON. `finished` and `console` are as in `show_results`.

    Raises:
        InputError: there are no results to read, or the row is not in them.
        UsageError: a folder without results.
    """
    console = console or SafeConsole()
    results = _open_with_note(out, finished)
    shown = False
    for row in results.rows(row=row_index):
        shown = True
        present = {name: value for name, value in row.items() if value is not None}
        if console.is_terminal:
            console.print(_block(present))
        else:
            line = json.dumps(non_finite_to_none(present), ensure_ascii=False, allow_nan=False)
            sys.stdout.write(json_printable(line) + "\n")
    if not shown:
        state = "is not in the results" if results.complete else "is not finished yet, or not in the input"
        raise InputError(f"row {row_index} {state}: {out}")


def _open_with_note(out: Path, finished: bool) -> Results:
    """Open the results and print their note, if any, to stderr."""
    results = open_results(out, finished=finished)
    if results.note is not None:
        print(printable(f"{out}: {results.note}"), file=sys.stderr)
    return results


def _counts(results: Results, shown: int, errors_only: bool) -> str:
    total = len(results)
    errors = sum(1 for _ in results.rows(errors=True, columns=["row_index"]))
    of = errors if errors_only else total
    state = "" if results.complete else ", unfinished"
    rest = f" ({of - shown:,} more: --limit 0 lists all)" if of > shown else ""
    return f"{total:,} samples, {errors:,} errors{state}{rest}"


def _table(rows: Sequence[Record], width: int) -> Table:
    """One line per sample, with the text cut to fit `width`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(_HEADERS[0], justify="right", no_wrap=True)
    for name in (*_HEADERS[1:], "text"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    lines = [(_label(row), _truncate(row["id"] or "", _ID_WIDTH), _outcome(row)) for row in rows]
    used = sum(max(map(cell_len, column)) + _GAP for column in zip(_HEADERS, *lines, strict=True))
    text_width = max(width - used, _TEXT_WIDTH)
    for row, (label, row_id, outcome) in zip(rows, lines, strict=True):
        style = "red" if row["status"] == "error" else ""
        table.add_row(
            Text(label), Text(row_id), Text(outcome, style=style), Text(_truncate(message_of(row), text_width))
        )
    return table


def _truncate(text: str, width: int) -> str:
    """`text`, escaped and cut to `width` terminal cells."""
    line = Text(printable(text[: 4 * width]))
    line.truncate(width, overflow="ellipsis")
    return line.plain


def _block(row: Record) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in row.items():
        shown = printable(calls_text(value)) if name == "tool_calls" else _format_value(value)
        table.add_row(Text(printable(name)), Text(shown))
    table.add_row("", "")
    return table


def _format_value(value: object) -> str:
    if isinstance(value, list) and len(value) > _LIST_ITEMS:
        head = ", ".join(_format_value(item) for item in value[:_LIST_ITEMS])
        return f"[{head}, … {len(value) - _LIST_ITEMS:,} more]"
    if isinstance(value, str):
        return printable(value, keep="\n\t")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "[" + ", ".join(_format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "\n".join(
            f"{printable(name)}: {_format_value(item)}" for name, item in value.items() if item is not None
        )
    return printable(str(value))


def _label(row: Record) -> str:
    """`7`, or `7.1.2` for prompt 1, sample 2 of row 7."""
    if row["prompt_index"] or row["sample_index"]:
        return f"{row['row_index']}.{row['prompt_index']}.{row['sample_index']}"
    return str(row["row_index"])


def _outcome(row: Record) -> str:
    return str(row["error"]["code"] if row["error"] else row["finish_reason"] or row["status"])


def message_of(row: Record) -> str:
    """The error of a sample, or its text and calls, or the scores of a row that has them."""
    if row["error"]:
        return str(row["error"]["message"])
    if row.get("scores") is not None:
        return "; ".join(map(_score, row["scores"]))
    if row.get("embedding") is not None:
        first = ", ".join(f"{number:.4g}" for number in row["embedding"][:4])
        return f"{len(row['embedding'])} numbers: {first}, ..."
    return " ".join(filter(None, (row["text"], calls_text(row.get("tool_calls")))))


def _score(score: Record) -> str:
    if "label" in score:
        return f"{score['label']} {score['score']:.6g}"
    greedy = ", greedy" if score["is_greedy"] else ""
    return f"sum {score['sum']:.6g}, mean {score['mean']:.6g}, {score['tokens']} tokens{greedy}"


def calls_text(text: str | None) -> str:
    """Calls of tools as `name(argument=value)`."""
    calls = [call["function"] for call in read_json(text or "[]", unwritable=True)]
    return " ".join(f"{call['name']}({_arguments(call['arguments'])})" for call in calls)


def _arguments(text: str) -> str:
    values = read_json(text, unwritable=True)
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
