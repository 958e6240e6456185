"""Summary of a finished run: the JSON report (`--report`) and the text printed at the end."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.text import Text

from batchgen.config.units import STDIN
from batchgen.config.urls import path_of
from batchgen.data.durable_files import replace_durably
from batchgen.data.files import exists, followed, is_file, open_to_replace, temporary_near
from batchgen.data.lines import errors_path, is_lines, lines_of_job
from batchgen.data.out.chosen_columns import totals_of
from batchgen.data.out.view import Totals, first_answer
from batchgen.data.reserved_paths import refuse_other_file
from batchgen.data.results_file import keeps_rows, read_footer
from batchgen.errors import BatchgenError, OutputError
from batchgen.job.display.console import SafeConsole
from batchgen.job.display.figures import print_figures
from batchgen.job.display.media_figures import MEDIA_COUNTS, media_line
from batchgen.request.printable import format_kv_peak, json_printable, printable
from batchgen.request.rows.unknown_keys import carried_summary

if TYPE_CHECKING:
    from batchgen.engine.running import Running
    from batchgen.job.rows.ingest import Ingested


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Figures of one finished run. Counts cover the whole job, including the runs that this one resumed."""

    output: str
    rows: int
    """Number of input rows."""
    rows_ok: int
    rows_error: int
    fingerprint: str
    errors: Mapping[str, int] = field(default_factory=dict)
    """Error code -> number of rows."""
    rows_skipped: int = 0
    """Number of invalid rows left out because of `--on-bad-row skip`."""
    rows_resumed: int = 0
    """Number of rows that earlier runs had committed."""
    prompt_tokens: int = 0
    distinct_prompt_tokens: int = 0
    """Prompt tokens that remain when every shared prefix counts once: the tokens of the prefix tree."""
    computed_prompt_tokens: int = 0
    """Prompt tokens that were run through the model."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    """Tokens of all answers in the output."""
    copied_tokens: int = 0
    """Tokens of answers that are copies of an equal greedy row's; included in `completion_tokens`."""
    dropped_tokens: int = 0
    """Tokens of samples that `best_of` discarded; not included in `completion_tokens`."""
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    """Finish reason -> number of answers."""
    constraints: Mapping[str, int] = field(default_factory=dict)
    """`met`, `failed` -> number of answers whose text was checked against their constraint."""
    empty_texts: int = 0
    """Number of answers without text and calls of tools."""
    media: Mapping[str, Any] | None = None
    """Images and sounds of the job, what was done with them, and how busy they left the device; None without any."""
    kv_peak_bytes: int = 0
    kv_peak_bytes_by_group: Mapping[str, int] = field(default_factory=dict)
    """`full`, `window` -> the peak of these layers."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase name -> seconds."""
    output_tokens_per_second: float = 0.0
    """Tokens that this run generated per second of its generating phase."""
    already_done: bool = False
    """Whether the output was complete before this run, so that nothing was computed."""
    kernels: str = ""
    """The kernels that computed, with their versions and the times by which they were chosen."""
    reasoning: str | None = None
    """The format in which thoughts were looked for; None: none is known, or with `--reasoning off`."""
    tool_parser: str | None = None
    """The format in which calls of tools were looked for; None: none is known, or with `--tool-parser off`."""
    advice: Sequence[str] = ()
    """What is probably not as meant, with a remedy each."""
    carried_options: Sequence[Mapping[str, Any]] = ()
    """`key`, `rows` and `hint` of each carried key that looks like an option."""
    commonest_error: str | None = None
    """The most frequent reason of row errors, with its first row."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Counters of the engine and the writer: steps, preemptions, slot occupancy, writer stalls."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What the steps of this run showed of the machine's rates and of output lengths, for `batchgen plan`; empty if
    another process ran them."""
    prompt_of: Callable[[int, int], str | None] | None = None
    """Gives the text of a prompt of a row, which the report does not have."""

    def to_json(self) -> str:
        """The summary as an indented JSON object, under the same names as in `check --json`."""
        figures = {name: value for name, value in asdict(self).items() if name != "prompt_of"}
        return json_printable(json.dumps(figures, indent=2, ensure_ascii=False))


@dataclass(frozen=True, slots=True)
class RunCounts:
    """What a job's plan and engine counted, apart from the job, so that its plan need not stay in memory."""

    prompt_tokens: int
    distinct_prompt_tokens: int
    computed_prompt_tokens: int
    output_tokens: int
    kv_peaks: Mapping[str, int]
    """Most bytes of keys and values, by kind of layers."""
    engine: dict[str, Any]
    measured: Mapping[str, Any] = field(default_factory=dict)
    """See `RunSummary`."""

    @staticmethod
    def of(running: Running) -> RunCounts:
        """The counts of a job in the engine, after its last step."""
        stats, tree = running.scheduler.stats, running.workload.tree
        return RunCounts(
            prompt_tokens=tree.prompt_tokens,
            distinct_prompt_tokens=tree.distinct_tokens,
            computed_prompt_tokens=stats.prompt_tokens + stats.recomputed_last_tokens,
            output_tokens=running.loop.state.output_tokens,
            kv_peaks=running.kv_peak_bytes,
            engine={**stats.as_dict(), **running.loop.counts()},
        )

    def plus(self, alone: RunCounts) -> RunCounts:
        """With the work of a row that ran alone, when all others were done."""
        return replace(
            self,
            computed_prompt_tokens=self.computed_prompt_tokens + alone.computed_prompt_tokens,
            output_tokens=self.output_tokens + alone.output_tokens,
            kv_peaks={kind: max(peak, alone.kv_peaks[kind]) for kind, peak in self.kv_peaks.items()},
            engine={name: _both(name, count, alone.engine[name]) for name, count in self.engine.items()},
        )


_LARGEST: Final = ("peak_pages", "peak_window_pages", "max_decode_rows", "in_flight_peak_bytes")
_OF_PLAN: Final = (
    "slots", "tail_steps", "tail_tokens", "tokens_per_step", "group_min_saving", "occupancy", "tail_efficiency"
)  # fmt: skip
"""Counts that describe how full the steps of all rows were."""


def _both(name: str, together: Any, alone: Any) -> Any:
    """A count of the engine over the rows that ran together and one that ran alone."""
    if name in _OF_PLAN:
        return together
    return max(together, alone) if name in _LARGEST or name.startswith(MEDIA_COUNTS) else together + alone


def run_summary(
    result: Path,
    record: Mapping[str, Any],
    rows: Ingested,
    totals: Totals,
    counts: RunCounts,
    seconds: Mapping[str, float],
) -> RunSummary:
    """The summary of a run that has finished its job, with what its rows, its output and its engine counted.

    Args:
        result: path of the output.
        record: the job's record of the footer.
        rows: the rows of the input.
        totals: the totals of the output.
        counts: what the plan and the engine counted.
        seconds: phase name -> seconds.
    """
    generating = seconds["generating"]
    return RunSummary(
        output=str(result),
        rows=rows.rows,
        **counted(totals),
        fingerprint=record["fingerprint"],
        reasoning=record.get("reasoning"),
        tool_parser=record.get("tool_parser"),
        rows_skipped=rows.skipped,
        prompt_tokens=counts.prompt_tokens,
        distinct_prompt_tokens=counts.distinct_prompt_tokens,
        computed_prompt_tokens=counts.computed_prompt_tokens,
        kv_peak_bytes=sum(counts.kv_peaks.values()),
        kv_peak_bytes_by_group=counts.kv_peaks,
        seconds={phase: round(spent, 3) for phase, spent in seconds.items()},
        output_tokens_per_second=counts.output_tokens / generating if generating else 0.0,
        engine=counts.engine,
        measured=counts.measured,
    )


def finished_summary(result: Path, fingerprint: str, count_rows: Callable[[], int], *, skips: bool) -> RunSummary:
    """The summary of an output that was already complete.

    Args:
        result: path of the output.
        fingerprint: the job's.
        count_rows: gives the number of input rows, which JSON lines do not record.
        skips: whether the job leaves bad rows out.

    Raises:
        OutputError: lines of an output of JSON lines are missing.
    """
    if is_lines(result):
        totals, record = _line_counts(result, fingerprint, count_rows(), skips)
    else:
        totals, record = totals_of(result), read_footer(result) or {}
    return RunSummary(
        output=str(result),
        rows=int(record.get("input_rows") or totals.rows),
        **counted(totals),
        fingerprint=fingerprint,
        rows_skipped=int(record.get("rows_skipped") or 0),
        kernels=str(record.get("kernels") or ""),
        reasoning=record.get("reasoning"),
        tool_parser=record.get("tool_parser"),
        already_done=True,
    )


def _line_counts(result: Path, fingerprint: str, rows: int, skips: bool) -> tuple[Totals, Mapping[str, Any]]:
    """Totals of JSON lines, and what a footer would record. Rows without a line are the skipped ones, if there may be.

    Raises:
        OutputError: rows have no line, and none may be skipped.
    """
    totals = totals_of(result)
    without = max(0, rows - totals.rows)
    if without and not skips:
        raise OutputError(
            f"{result} is complete, but {without:,} of the job's {rows:,} rows have no line: lines were removed, or "
            f"{errors_path(result)}, which has those that failed. Put the file back, or compute all rows again with "
            "--overwrite."
        )
    mark = lines_of_job(result, fingerprint) or {}
    return totals, {**mark, "input_rows": rows, "rows_skipped": without}


def counted(totals: Totals) -> dict[str, Any]:
    """The fields of a summary that are counted in the output."""
    return {
        "rows_ok": totals.rows - totals.rows_error,
        "rows_error": totals.rows_error,
        "errors": dict(totals.errors),
        "cached_tokens": totals.cached_tokens,
        "completion_tokens": totals.completion_tokens,
        "copied_tokens": totals.copied_tokens,
        "dropped_tokens": totals.dropped_tokens,
        "finish_reasons": dict(totals.finish_reasons),
        "constraints": dict(totals.constraints),
        "empty_texts": totals.empty_texts,
    }


def write_report(text: str, target: str, *, overwrite: bool = False) -> None:
    """Write a report, which is JSON, to a file, or to stdout for "-". A regular file is replaced atomically.

    Raises:
        OutputError: the file cannot be written, or holds something else than a report and `overwrite` is not set.
    """
    text += "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = followed(Path(target))
    refuse_other_file("--report", target, overwrite)
    try:
        if exists(path) and not is_file(path):
            with open_to_replace(path) as pipe:
                pipe.write(text.encode())
        else:
            replace_durably(path, lambda stream: stream.write(text.encode()), temporary_near(path))
    except OSError as problem:
        raise OutputError(f"cannot write the report {target}: {problem.strerror}") from None


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    """Print the summary to `console` (default: stderr), as plain text if it is not a terminal.

    The first answer is for a reader, not for a log: it is printed on a terminal only.
    """
    console = console or SafeConsole(stderr=True)
    with suppress(OSError):
        if summary.already_done:
            done = Text(printable(f"{summary.output} is complete: {summary.rows:,} rows, nothing to do"))
            console.print(done, soft_wrap=True)
            return
        lines = _lines(summary)
        if console.is_terminal:
            lines[2:2] = _first_answer(summary, 2 * console.width)
        print_figures(lines, console)


def _first_answer(summary: RunSummary, width: int) -> list[tuple[str, Text]]:
    """The first answer that has text, cut to `width`, after the end of its prompt."""
    if summary.output == STDIN or not keeps_rows(path_of(summary.output)):
        return []
    with suppress(BatchgenError, OSError):
        found = first_answer(path_of(summary.output))
        if found is not None:
            row, prompt, answer = found
            asked = None if summary.prompt_of is None else summary.prompt_of(row, prompt)
            lines = [] if asked is None else [("prompt", _one_line(asked, -width))]
            return [*lines, ("first answer", _one_line(answer, width))]
    return []


def _one_line(text: str, width: int) -> Text:
    """Text on one line, cut to `width` characters; to its last ones if that is negative."""
    line = printable(" ".join(text.split()))
    if len(line) <= abs(width):
        return Text(line)
    return Text(f"{line[:width]}…" if width > 0 else f"…{line[width:]}")


def _lines(summary: RunSummary) -> list[tuple[str, Text]]:
    lines = [("output", Text(summary.output)), ("rows", Text(_rows(summary)))]
    if summary.errors:
        lines.append(("errors", Text(by_count(summary.errors), style="red")))
        if summary.commonest_error is not None:
            lines.append(("", Text(summary.commonest_error)))
        if summary.output != STDIN:
            lines.append(("", Text(f"see: {_where_errors_are(summary.output)}", style="dim")))
    if summary.carried_options:
        lines.append(("carried", Text(carried_summary(summary.carried_options), style="yellow")))
    if summary.finish_reasons:
        lines.append(("ended by", Text(by_count(summary.finish_reasons))))
    if summary.constraints:
        lines.append(("constraints", Text(by_count(summary.constraints))))
    # The last prompt token may be computed several times (for samples that start later), so the difference can be < 0.
    shared = max(0, summary.prompt_tokens - summary.computed_prompt_tokens)
    prompt_text = f"prompt {summary.prompt_tokens:,} (computed {summary.computed_prompt_tokens:,}, shared {shared:,})"
    more = [f"{summary.copied_tokens:,} copied from equal rows"] if summary.copied_tokens else []
    more += [f"{summary.dropped_tokens:,} more discarded by best_of"] if summary.dropped_tokens else []
    output_text = f"output {summary.completion_tokens:,}" + (f" ({', '.join(more)})" if more else "")
    lines.append(("tokens", Text(f"{prompt_text}, {output_text}")))
    lines.append(("speed", Text(f"{summary.output_tokens_per_second:,.0f} generated tokens/s")))
    if summary.media is not None:
        lines.append(("media", Text(media_line(summary.media))))
    if summary.engine.get("steps"):
        lines.append(("steps", Text(_steps(summary.engine))))
    phases = ", ".join(f"{phase} {format_seconds(spent)}" for phase, spent in summary.seconds.items())
    if phases:
        lines.append(("time", Text(phases)))
    if summary.kv_peak_bytes_by_group:
        lines.append(("KV peak", Text(format_kv_peak(summary.kv_peak_bytes_by_group))))
    lines += [("advice" if i == 0 else "", Text(line, style="yellow")) for i, line in enumerate(summary.advice)]
    if not summary.rows_error and summary.output != STDIN and keeps_rows(path_of(summary.output)):
        lines.append(("next", Text(f"batchgen show {shlex.quote(summary.output)}", style="dim")))
    return lines


def by_count(counts: Mapping[str, int]) -> str:
    """`stop 40, length 8`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count:,}" for name, count in ordered)


def _where_errors_are(output: str) -> str:
    path = path_of(output)
    if keeps_rows(path):
        return f"batchgen show {shlex.quote(output)} --errors"
    return str(errors_path(path) if is_lines(path) and exists(errors_path(path)) else path)


def _steps(engine: Mapping[str, Any]) -> str:
    text = f"{engine['steps']:,}, slots {engine['occupancy']:.0%} full"
    tail = engine["tail_steps"]
    return f"{text} ({engine['tail_efficiency']:.0%} in the last {tail:,}, with no sample waiting)" if tail else text


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
