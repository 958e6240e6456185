from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from batchgen.errors import OutputError
from batchgen.job.summary import RunSummary, format_seconds, print_summary, write_report

SUMMARY = RunSummary(
    output="results.parquet",
    rows=1000,
    rows_ok=950,
    rows_error=50,
    fingerprint="abc",
    errors={"missing_prompt": 5, "invalid_json": 40, "duplicate_id": 5},
    rows_resumed=100,
    prompt_tokens=12_345,
    distinct_prompt_tokens=4_000,
    computed_prompt_tokens=4_345,
    cached_tokens=8_000,
    completion_tokens=56_789,
    kv_peak_bytes=3 * 2**29,
    kv_peak_bytes_by_group={"full": 3 * 2**29},
    seconds={"reading": 0.25, "generating": 200.0, "total": 7500.0},
    output_tokens_per_second=283.9,
    engine={"steps": 1234, "occupancy": 0.9768, "tail_steps": 56, "tail_efficiency": 0.5, "tail_tokens": 1792},
)


def printed(summary: RunSummary, width: int = 100, terminal: bool = False, colour: bool = True) -> str:
    system: Literal["standard"] | None = "standard" if colour else None
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=terminal,
        highlight=False,
        color_system=system if terminal else None,
    )
    print_summary(summary, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_text_is_the_same_in_a_log_and_on_a_terminal() -> None:
    lines = printed(SUMMARY).splitlines()
    assert lines == printed(SUMMARY, width=20).splitlines(), "a log has no width"
    shown = [line.rstrip() for line in printed(SUMMARY, terminal=True, colour=False).splitlines()]
    assert lines == shown
    assert lines == [
        "output   results.parquet",
        "rows     1,000 (ok 950, errors 50, resumed 100)",
        "errors   invalid_json 40, duplicate_id 5, missing_prompt 5",
        "         see: batchgen show results.parquet --errors",
        "tokens   prompt 12,345 (computed 4,345, shared 8,000), output 56,789",
        "speed    284 generated tokens/s",
        "steps    1,234, slots 98% full (50% in the last 56, with no sample waiting)",
        "time     reading 0.25 s, generating 3m 20s, total 2h 05m",
        "KV peak  1.5 GiB",
    ]


def test_a_run_without_errors_prints_no_error_lines() -> None:
    text = printed(replace(SUMMARY, rows_ok=1000, rows_error=0, errors={}, rows_skipped=3))
    assert "--errors" not in text
    assert "1,000 (ok 1,000, errors 0, skipped 3, resumed 100)" in text


def test_how_answers_ended_and_what_comes_next(tmp_path: Path) -> None:
    out = tmp_path / "results.parquet"
    texts = [" ", None, "Forty-\ntwo \x1b[31m" + "x" * 300, "other"]
    pq.write_table(pa.table({"row_index": [0, 1, 2, 2], "prompt_index": [0, 0, 1, 2], "text": texts}), out)
    summary = replace(
        SUMMARY,
        output=str(out),
        rows_error=0,
        errors={},
        copied_tokens=1_000,
        dropped_tokens=7,
        finish_reasons={"length": 1, "stop": 2_000},
        constraints={"failed": 3},
        advice=["first", "second"],
    )
    lines = [line.rstrip() for line in printed(summary, width=60, terminal=True, colour=False).splitlines()]
    shown = {label: line[14:] for line in lines if (label := line[:13].rstrip())}
    assert shown["first answer"] == "Forty- two"
    assert next(line for line in lines if "31m" in line).startswith(f"{'':14}\\x1b[31mxxx")
    assert "prompt" not in shown
    asked = replace(
        summary, prompt_of=lambda row, prompt: f"{'of ' * 99}row {row}, prompt {prompt}:\n\x1b[31mhow many?"
    )
    text = printed(asked, width=60, terminal=True, colour=False)
    words = " ".join(text.partition("first answer")[0].split())
    assert "prompt …" in words
    assert words.endswith("of row 2, prompt 1: \\x1b[31mhow many?")
    assert max(map(len, text.splitlines())) <= 60
    assert "prompt_of" not in asked.to_json()
    assert (shown["ended by"], shown["constraints"]) == ("stop 2,000, length 1", "failed 3")
    assert lines[lines.index("advice        first") + 1] == "              second"
    log = printed(summary)
    assert "Forty" not in log
    assert "output 56,789 (1,000 copied from equal rows, 7 more discarded by best_of)" in log
    assert log.splitlines()[-1].split() == ["next", "batchgen", "show", str(out)]


def test_an_output_of_json_lines_has_no_first_answer(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    out.write_text('{"text": "Forty-two"}\n')
    assert "first answer" not in printed(replace(SUMMARY, output=str(out)), terminal=True)


def test_other_lines() -> None:
    assert "prompt 3 (computed 10, shared 0)" in printed(replace(SUMMARY, prompt_tokens=3, computed_prompt_tokens=10))
    text = printed(replace(SUMMARY, engine={**SUMMARY.engine, "tail_steps": 0}))
    assert "steps    1,234, slots 98% full" in [line.rstrip() for line in text.splitlines()]


def test_an_output_that_was_already_complete() -> None:
    assert printed(replace(SUMMARY, already_done=True)) == "results.parquet is complete: 1,000 rows, nothing to do\n"


def test_colour_on_a_terminal_only() -> None:
    assert "\x1b[" in printed(SUMMARY, terminal=True)
    assert "\x1b[" not in printed(SUMMARY)


@pytest.mark.parametrize("width", [20, 40, 80])
def test_lines_fit_a_narrow_terminal(width: int) -> None:
    assert max(map(len, printed(SUMMARY, width, terminal=True, colour=False).splitlines())) <= width


def test_file_names_are_not_parsed_as_markup() -> None:
    assert "[bold]x.parquet" in printed(replace(SUMMARY, output="[bold]x.parquet"))
    assert "[bold]x.parquet" in printed(replace(SUMMARY, output="[bold]x.parquet", already_done=True))


def test_a_closed_stderr_does_not_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Gone())
    print_summary(SUMMARY)


def test_the_report_has_its_documented_keys() -> None:
    record = json.loads(SUMMARY.to_json())
    names = """rows rows_ok rows_error errors prompt_tokens distinct_prompt_tokens computed_prompt_tokens cached_tokens
        completion_tokens kv_peak_bytes seconds output_tokens_per_second fingerprint"""
    assert set(names.split()) <= set(record)
    assert record["errors"] == {"missing_prompt": 5, "invalid_json": 40, "duplicate_id": 5}
    assert record["engine"] == SUMMARY.engine


def test_report_to_a_file_and_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(SUMMARY.to_json(), str(tmp_path / "r.json"))
    write_report(SUMMARY.to_json(), "-")
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(capsys.readouterr().out)
    with pytest.raises(OutputError, match=r"cannot write the report .*: No such file or directory"):
        write_report(SUMMARY.to_json(), str(tmp_path / "no" / "r.json"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (9.994, "9.99 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1m 00s"),
        (3599.6, "1h 00m"),
        (7200, "2h 00m"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
