"""`batchgen show`: results as a table or one whole row on a terminal, as tab-separated or JSON lines in a pipe."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchgen.config.units import parse_columns
from batchgen.data.out.conditions import Condition, check_columns
from batchgen.data.out.view import Results, open_results
from batchgen.data.schema import non_finite_to_none
from batchgen.errors import InputError, UsageError
from batchgen.job.display.console import SafeConsole
from batchgen.job.display.pager import paged
from batchgen.request.foreign_text import read_json
from batchgen.request.printable import json_printable, printable

Record = Mapping[str, Any]

_KEY = ("row_index", "prompt_index", "sample_index")
_LISTED = [*_KEY, *("id", "status", "finish_reason", "error", "text", "tool_calls", "scores", "embedding")]
_POLL_SECONDS = 0.5
_TRIES = 5
"""Looks at a job that fail before its error is reported: its parts become the output while they are read."""
_LIST_ITEMS = 16
_ID_WIDTH = 24
_TEXT_WIDTH = 8
"""Least number of cells for the text column."""
_GAP = 2
_HEADERS = ("row", "id", "outcome")


@dataclass(frozen=True, slots=True)
class Listed:
    """Which samples are listed, and what of them."""

    errors: bool = False
    """Failed samples only."""
    where: Sequence[Condition] = ()
    """Samples that meet all of these."""
    columns: Sequence[str] = ()
    """Columns, or parts of them such as `error.code`; none: the row, its id, how it ended, and its text or error."""
    limit: int | None = None
    """Most samples; None for all."""

    @staticmethod
    def of(errors: bool, where: Sequence[str], columns: str | None, limit: int | None) -> Listed:
        """What the options of `show` ask for; `limit` 0: all.

        Raises:
            UsageError: a condition or the names of columns are not of their form.
        """
        try:
            names = () if columns is None else parse_columns(columns)
        except ValueError as problem:
            raise UsageError(f"`--columns` {problem}") from None
        return Listed(errors, tuple(map(Condition.parse, where)), names, limit or None)

    def check(self, results: Results) -> None:
        """Check that the results have the columns.

        Raises:
            UsageError: one is missing.
        """
        for names, option in ((self.columns, "--columns"), ([each.column for each in self.where], "--where")):
            if names:
                check_columns(names, results.schemas, option)

    def rows(self, results: Results) -> Iterator[Record]:
        """The rows of `results`, with the columns that are listed and those that name a sample."""
        names: Sequence[str] = _LISTED
        if self.columns:
            names = [*_KEY, *(part for name in self.columns for part in (name, name.partition(".")[0]))]
        return results.rows(errors=self.errors, columns=names, where=self.where)

    def cells(self, row: Record, *, full: bool = False) -> list[str]:
        """What a line shows of a row, escaped; with `full`, whole lists and objects as JSON."""
        if not self.columns:
            outcome = [row["status"], _outcome(row)] if full else [_outcome(row)]
            return list(map(printable, (_label(row), row["id"] or "", *outcome, message_of(row))))
        return [(_json_cell if full else _cell)(name, _part(row, name)) for name in self.columns]


def show_results(
    out: Path, listed: Listed, *, finished: bool = False, pager: bool = False, console: Console | None = None
) -> None:
    """List the samples of `out`: a table and a line of counts on a terminal, lines with tabs in a pipe.

    Args:
        out: path, as for `open_results`.
        listed: which samples are listed.
        finished: show the finished output even if newer, unfinished work exists.
        pager: whether a table longer than the terminal goes through the pager.
        console: the console to print to; stdout if None.

    Raises:
        InputError: there are no results to read.
        UsageError: a folder without results, or a column that they do not have.
    """
    console = console or SafeConsole()
    results = _open_with_note(out, finished)
    listed.check(results)
    rows = islice(listed.rows(results), listed.limit)
    if not console.is_terminal:
        _write_lines(listed, rows)
        return
    shown = list(rows)
    with _paged(console, pager):
        console.print((_columns_table if listed.columns else _table)(listed, shown, console.width))
        console.print(Text(_counts(results, len(shown), listed), style="dim"))


def follow_results(out: Path, listed: Listed, *, console: Console | None = None) -> None:
    """Write the samples of a running job as they are committed, until it has finished: a line each.

    Raises:
        InputError: there is no such job, or its results cannot be read.
        UsageError: a column that they do not have.
    """
    console = console or SafeConsole()
    for rows in _committed(out, listed):
        if console.is_terminal:
            for row in rows:
                cells = listed.cells(row)
                if not listed.columns:
                    cells = [f"{cells[0]:>6}", f"{_truncate(cells[1], _ID_WIDTH):<16}", f"{cells[2]:<14}", cells[3]]
                console.print(Text(_truncate("  ".join(cells), console.width)))
        else:
            _write_lines(listed, rows)
            sys.stdout.flush()


def _committed(out: Path, listed: Listed) -> Iterator[list[Record]]:
    """Rows of a job, a list for each look at what it has committed, each row once, until the output is finished."""
    seen: set[Path] = set()
    keys: set[tuple[int, int, int]] = set()
    failures, left = 0, listed.limit
    while True:
        try:
            results = open_results(out, waiting=True)
            new = replace(results, files=[file for file in results.files if file not in seen])
            if new.files and not seen:
                listed.check(results)
            rows = list(islice((row for row in listed.rows(new) if _key(row) not in keys), left))
            failures = 0
        except InputError:  # the job has just finished and removed its parts
            failures += 1
            if failures > _TRIES or not seen:
                raise
            time.sleep(_POLL_SECONDS)
            continue
        seen |= {*new.files}
        keys |= set(map(_key, rows))
        left = None if left is None else left - len(rows)
        yield rows
        if results.complete or left == 0:
            return
        time.sleep(_POLL_SECONDS)


def _key(row: Record) -> tuple[int, int, int]:
    return row["row_index"], row["prompt_index"], row["sample_index"]


def _write_lines(listed: Listed, rows: Iterable[Record]) -> None:
    for row in rows:
        sys.stdout.write("\t".join(listed.cells(row, full=True)) + "\n")


@contextmanager
def _paged(console: Console, pager: bool) -> Iterator[None]:
    """Context in which what is printed goes through the pager if it is longer than the terminal."""
    if not (pager and console.is_terminal):
        yield
        return
    with console.capture() as captured:
        yield
    paged(captured.get())


def show_row(
    out: Path,
    row_index: int,
    *,
    columns: Sequence[str] = (),
    finished: bool = False,
    pager: bool = False,
    console: Console | None = None,
) -> None:
    """Print all columns of one input row: a block per sample on a terminal, JSON lines in a pipe.

    NaN and infinity are null in JSON. `columns`: only these; `finished`, `pager` and `console` are as in
    `show_results`.

    Raises:
        InputError: there are no results to read, or the row is not in them.
        UsageError: a folder without results, or a column that they do not have.
    """
    console = console or SafeConsole()
    results = _open_with_note(out, finished)
    if columns:
        check_columns(columns, results.schemas, "--columns")
    shown = False
    with _paged(console, pager):
        for row in results.rows(row=row_index):
            shown = True
            values = {name: _part(row, name) for name in columns} if columns else row
            present = {name: value for name, value in values.items() if value is not None}
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


def _counts(results: Results, shown: int, listed: Listed) -> str:
    total, errors = len(results), results.count(errors=True)
    of = results.count(listed.errors, listed.where) if listed.where else errors if listed.errors else total
    state = "" if results.complete else ", unfinished"
    rest = f" ({of - shown:,} more: --limit 0 lists all)" if of > shown else ""
    found = f"{of:,} of {total:,} samples match" if listed.where else f"{total:,} samples, {errors:,} errors"
    return f"{found}{state}{rest}"


def _columns_table(listed: Listed, rows: Sequence[Record], width: int) -> Table:
    """One line per sample with the columns that were asked for: the widest are cut where all do not fit `width`."""
    lines = [list(map(printable, listed.columns)), *map(listed.cells, rows)]
    natural = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    room, widths = width - _GAP * len(natural), dict.fromkeys(range(len(natural)), 1)
    for done, place in enumerate(sorted(widths, key=natural.__getitem__)):
        widths[place] = max(min(natural[place], room // (len(natural) - done)), 1)
        room -= widths[place]
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in natural:
        table.add_column(no_wrap=True, overflow="ellipsis")
    for i, line in enumerate(lines):
        cells = (Text(_truncate(cell, widths[place]), style="" if i else "bold") for place, cell in enumerate(line))
        table.add_row(*cells)
    return table


def _part(row: Record, name: str) -> Any:
    """The value of a column, or of a part of one; None if the row has none."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _cell(name: str, value: Any) -> str:
    """A value on one line, shortened as in the block of a row."""
    if name == "tool_calls":
        return printable(calls_text(value))
    if name == "scores" and value is not None:
        return "; ".join(map(_score, value))
    if value is None or isinstance(value, str):
        return printable(value or "")
    return _format_value(value).replace("\n", ", ")


def _json_cell(_: str, value: Any) -> str:
    """A whole value: text as it is, null as nothing, all else as JSON."""
    if value is None or isinstance(value, str):
        return printable(value or "")
    return json_printable(json.dumps(non_finite_to_none(value), ensure_ascii=False))


def _table(_: Listed, rows: Sequence[Record], width: int) -> Table:
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
