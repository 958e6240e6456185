"""What a run did: the figures of `--report`, and the closing lines for a person."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchgen.errors import OutputError
from batchgen.printable import encodable
from batchgen.units import format_size

__all__ = ["RunSummary", "format_seconds", "print_summary", "write_report"]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Figures of one finished run. Counts are of the whole job, earlier runs that this one resumed included."""

    output: str
    rows: int
    """Rows of input."""
    rows_ok: int
    rows_error: int
    fingerprint: str
    errors: Mapping[str, int] = field(default_factory=dict)
    """Error code -> rows."""
    rows_skipped: int = 0
    """Bad rows left out under `--on-bad-row skip`."""
    rows_resumed: int = 0
    """Rows that an earlier run had committed."""
    prompt_tokens: int = 0
    distinct_prompt_tokens: int = 0
    """Nodes of the exact trie over all prompts."""
    computed_prompt_tokens: int = 0
    """Prompt tokens that went through the model."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    dropped_tokens: int = 0
    """Tokens of the samples that `best_of` did not keep; not among `completion_tokens`."""
    kv_peak_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds."""
    output_tokens_per_second: float = 0.0
    """Tokens that this run generated, over its seconds of generating."""
    already_done: bool = False
    """The output was complete before; nothing was run."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further counted quantities: steps, preemptions, occupancy, waits for the disk."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the names that `check --json` uses too."""
        return asdict(self)

    def to_json(self) -> str:
        """One JSON object, with a line for each figure."""
        return encodable(json.dumps(self.as_dict(), indent=2, ensure_ascii=False))


def write_report(summary: RunSummary, target: str, stdout: TextIO | None = None) -> None:
    """Write the summary as JSON to a file, or to stdout for "-".

    Raises:
        OutputError: the file cannot be written.
    """
    text = summary.to_json() + "\n"
    if target == "-":
        stream = stdout or sys.stdout
        stream.write(text)
        stream.flush()
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise OutputError(f"cannot write the report {target}: {problem.strerror}") from None


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    """Print the closing summary, on stderr unless told otherwise; plain text where that is no terminal."""
    console = console or _Console(stderr=True, highlight=False)
    closing = _closing(summary, folded=console.is_terminal)
    with suppress(OSError):
        # A line stays one in a log, however long the path in it.
        console.print(closing, soft_wrap=isinstance(closing, Text))


class _Console(Console):
    """A console that nobody may read: the job is done all the same."""

    def on_broken_pipe(self) -> None:
        """Fall silent; rich would end the process."""
        self.quiet = True


def _closing(summary: RunSummary, *, folded: bool) -> Table | Text:
    if summary.already_done:
        return Text(f"{summary.output} is complete: {summary.rows:,} rows, nothing to do")
    lines = _lines(summary)
    if not folded:
        width = max(len(label) for label, _ in lines)
        return Text("\n").join(Text(f"{label:{width}}  ") + value for label, value in lines)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in lines:
        table.add_row(label, value)
    return table


def _lines(summary: RunSummary) -> list[tuple[str, Text]]:
    lines = [("output", Text(summary.output)), ("rows", Text(_rows(summary)))]
    if summary.errors:
        counts = sorted(summary.errors.items(), key=lambda item: (-item[1], item[0]))
        codes = ", ".join(f"{code} {count:,}" for code, count in counts)
        lines.append(("errors", Text(codes, style="red")))
        lines.append(("", Text(f"see: batchgen show {shlex.quote(summary.output)} --errors", style="dim")))
    # A prompt whose samples come in turns is entered again, at its last token, for each turn.
    shared = max(0, summary.prompt_tokens - summary.computed_prompt_tokens)
    tokens_in = f"in {summary.prompt_tokens:,} (computed {summary.computed_prompt_tokens:,}, shared {shared:,})"
    dropped = f" (and {summary.dropped_tokens:,} dropped by best_of)" if summary.dropped_tokens else ""
    lines.append(("tokens", Text(f"{tokens_in}, out {summary.completion_tokens:,}{dropped}")))
    lines.append(("speed", Text(f"{summary.output_tokens_per_second:,.0f} output tokens/s")))
    if summary.engine.get("steps"):
        lines.append(("steps", Text(_steps(summary.engine))))
    phases = ", ".join(f"{phase} {format_seconds(spent)}" for phase, spent in summary.seconds.items())
    if phases:
        lines.append(("time", Text(phases)))
    if summary.kv_peak_bytes:
        lines.append(("KV peak", Text(format_size(summary.kv_peak_bytes))))
    return lines


def _steps(engine: Mapping[str, Any]) -> str:
    text = f"{engine['steps']:,}, slots {engine['occupancy']:.0%} full"
    tail = engine["tail_steps"]
    return f"{text}; {engine['tail_efficiency']:.0%} in the last {tail:,}, with nothing left to begin" if tail else text


def _rows(summary: RunSummary) -> str:
    parts = [f"{summary.rows:,}", f"ok {summary.rows_ok:,}", f"errors {summary.rows_error:,}"]
    if summary.rows_skipped:
        parts.append(f"skipped {summary.rows_skipped:,}")
    if summary.rows_resumed:
        parts.append(f"resumed {summary.rows_resumed:,}")
    return f"{parts[0]} ({', '.join(parts[1:])})"


def format_seconds(seconds: float) -> str:
    """`0.25 s`, `12.3 s`, `3m 20s`, `2h 05m`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
