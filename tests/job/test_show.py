from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from batchgen.data.schema import OutputRow, completions_to_table, with_footer
from batchgen.errors import ErrorCode, ErrorInfo, InputError, UsageError
from batchgen.job.results.show import Listed, follow_results, show_results, show_row
from batchgen.request.completion import Completion, Score


def good(row: int, text: str, prompt: int = 0, sample: int = 0, **more: object) -> OutputRow:
    return OutputRow(Completion(row, prompt, sample, finish_reason="stop", text=text, **more), f"id-{row}")  # type: ignore[arg-type]


def write(path: Path, rows: list[OutputRow]) -> None:
    pq.write_table(completions_to_table(rows).cast(with_footer({"fingerprint": "f"})), path)


ROWS = [
    good(0, "one\ntwo\x1b[31m red"),
    OutputRow(Completion(1, error=ErrorInfo(ErrorCode.MISSING_PROMPT, "no prompt\there", "text")), "id-1"),
    good(2, "first", completion_tokens=3, output_ids=list(range(100)), mean_logprob=-0.123456789),
    good(2, "second", prompt=1, sample=2, output_ids=[1, 2]),
    good(3, "long " * 200),
]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "out.parquet"
    write(path, ROWS)
    return path


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)


def written(console: Console) -> list[str]:
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_table_on_a_terminal(out: Path) -> None:
    console = terminal(60)
    show_results(out, Listed(), console=console)
    assert written(console) == [
        "  row  id    outcome         text",
        "    0  id-0  stop            one\\ntwo\\x1b[31m red",
        "    1  id-1  missing_prompt  no prompt\\there",
        "    2  id-2  stop            first",
        "2.1.2  id-2  stop            second",
        "    3  id-3  stop            long long long long long long …",
        "5 samples, 1 errors",
    ]


def test_limit_and_errors_only(out: Path) -> None:
    console = terminal()
    show_results(out, Listed(limit=2), console=console)
    assert written(console)[-1] == "5 samples, 1 errors (3 more: --limit 0 lists all)"
    console = terminal()
    show_results(out, Listed(errors=True), console=console)
    assert written(console)[1:] == ["  1  id-1  missing_prompt  no prompt\\there", "5 samples, 1 errors"]


@pytest.mark.parametrize("width", [20, 40, 200])
def test_the_table_keeps_to_any_width(out: Path, width: int) -> None:
    console = terminal(width)
    show_results(out, Listed(), console=console)
    assert max(len(line) for line in written(console)[:-1]) <= width


def test_a_pipe_gets_tab_separated_lines(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_results(out, Listed(limit=2))
    assert capsys.readouterr().out == (
        "0\tid-0\tok\tstop\tone\\ntwo\\x1b[31m red\n1\tid-1\terror\tmissing_prompt\tno prompt\\there\n"
    )


CALLS = [
    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "R\u00f4me", "days": [1]}'}},
    {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
]


def test_calls_and_scores_are_written_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = (Score(-1.25, -0.625, 2, True), Score(-30.0, -math.inf, 3, False))
    rows = [
        good(0, "", tool_calls=json.dumps(CALLS)),
        good(1, "So:", tool_calls=json.dumps(CALLS[1:])),
        OutputRow(Completion(2, scores=scores), "id-2"),
    ]
    write(tmp_path / "out.parquet", rows)
    shown = ['weather(city="R\u00f4me", days=[1]) now()', "So: now()"]
    shown += ["sum -1.25, mean -0.625, 2 tokens, greedy; sum -30, mean -inf, 3 tokens"]
    show_results(tmp_path / "out.parquet", Listed())
    assert [line.split("\t")[4] for line in capsys.readouterr().out.splitlines()] == shown
    console = terminal(120)
    show_results(tmp_path / "out.parquet", Listed(), console=console)
    assert all(text in line for text, line in zip(shown, written(console)[1:], strict=False))
    console = terminal()
    show_row(tmp_path / "out.parquet", 0, console=console)
    assert f"tool_calls     {shown[0]}" in written(console)
    show_row(tmp_path / "out.parquet", 0)
    assert json.loads(json.loads(capsys.readouterr().out)["tool_calls"]) == CALLS


def test_one_row_on_a_terminal(out: Path) -> None:
    console = terminal()
    show_row(out, 2, console=console)
    lines = written(console)
    assert "text               first" in lines
    assert "completion_tokens  3" in lines
    assert "mean_logprob       -0.123457" in lines
    assert "…84more]" in "".join(lines).replace(" ", "")
    assert "sample_index   2" in lines
    assert not any(line.startswith("seed") for line in lines), "null fields are left out"
    console = terminal()
    show_row(out, 0, console=console)
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert "               two\\x1b[31m red" in written(console)


def test_a_pipe_gets_one_row_as_json_lines(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_row(out, 2)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["text"] for record in records] == ["first", "second"]
    assert records[0]["output_ids"] == list(range(100))


def test_infinite_logprobs_are_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "out.parquet", [good(0, "no", cumulative_logprob=-math.inf, output_logprobs=[-0.5, -math.inf])])
    show_row(tmp_path / "out.parquet", 0)
    record = orjson.loads(capsys.readouterr().out)  # raises for NaN and Infinity
    assert record["output_logprobs"] == [-0.5, None]
    assert record["cumulative_logprob"] is None


def test_unfinished_work_is_shown_as_such(out: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="row 9 is not in the results"):
        show_row(out, 9)
    out.unlink()
    parts = tmp_path / "out.parquet.work" / "parts"
    parts.mkdir(parents=True)
    write(parts / "part-00000.parquet", ROWS[:2])
    console = terminal()
    show_results(tmp_path / "out.parquet", Listed(), console=console)
    assert written(console)[-1] == "2 samples, 1 errors, unfinished"
    with pytest.raises(InputError, match=r"none\.parquet"):
        show_results(tmp_path / "none.parquet", Listed())
    with pytest.raises(InputError, match="row 5 is not finished yet, or not in the input"):
        show_row(tmp_path / "out.parquet", 5)


# Columns, conditions, following


def test_columns_in_place_of_the_text(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = Listed(columns=("sample_index", "error.code", "text", "mean_logprob", "output_ids"))
    console = terminal(100)
    show_results(out, listed, console=console)
    lines = written(console)
    assert lines[0].split() == ["sample_index", "error.code", "text", "mean_logprob", "output_ids"]
    assert lines[2].split() == ["0", "missing_prompt"]
    assert "-0.123457" in lines[3]
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "5 samples, 1 errors"
    show_results(out, listed)
    fields = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert fields[0] == ["0", "", "one\\ntwo\\x1b[31m red", "", ""]
    assert fields[1] == ["0", "missing_prompt", "", "", ""]
    assert fields[2] == ["0", "", "first", "-0.123456789", json.dumps(list(range(100)))]
    with pytest.raises(UsageError, match=r"`--columns` finish_reasons: .* did you mean `finish_reason`\?"):
        show_results(out, Listed(columns=("finish_reasons",)))
    show_row(out, 2, columns=("id", "sample_index"))
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"id": "id-2", "sample_index": 0},
        {"id": "id-2", "sample_index": 2},
    ]


@pytest.mark.parametrize("width", [20, 60])
def test_many_columns_keep_to_any_width(out: Path, width: int) -> None:
    console = terminal(width)
    show_results(out, Listed(columns=("row_index", "id", "text", "finish_reason")), console=console)
    assert max(len(line) for line in written(console)[:-1]) <= width


def test_conditions(out: Path) -> None:
    console = terminal()
    show_results(out, Listed.of(errors=False, where=["status=ok", "text~s"], columns=None, limit=1), console=console)
    assert written(console)[1:] == [
        "  2  id-2  stop     first",
        "2 of 5 samples match (1 more: --limit 0 lists all)",
    ]


def test_calls_and_scores_in_a_column(tmp_path: Path) -> None:
    scores = (Score(-1.25, -0.625, 2, True),)
    write(
        tmp_path / "out.parquet",
        [good(0, "", tool_calls=json.dumps(CALLS)), OutputRow(Completion(2, scores=scores), "id-2")],
    )
    console = terminal(120)
    show_results(tmp_path / "out.parquet", Listed(columns=("tool_calls", "scores")), console=console)
    lines = written(console)
    assert lines[1] == 'weather(city="R\u00f4me", days=[1]) now()'
    assert lines[2].strip() == "sum -1.25, mean -0.625, 2 tokens, greedy"


def test_a_running_job_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are listed once, as their parts appear; the last ones are found in the output."""
    out = tmp_path / "out.parquet"
    parts = tmp_path / "out.parquet.work" / "parts"
    parts.mkdir(parents=True)
    part = iter([0, 1])
    steps = [
        lambda: None,
        lambda: write(parts / f"part-{next(part):06d}.parquet", ROWS[:2]),
        lambda: None,
        lambda: write(parts / f"part-{next(part):06d}.parquet", ROWS[2:4]),
        lambda: (write(out, ROWS), shutil.rmtree(parts.parent)),
    ]
    looks = iter(steps)
    monkeypatch.setattr("batchgen.job.results.show.time.sleep", lambda seconds: next(looks)())
    console = terminal(64)
    follow_results(out, Listed(), console=console)
    assert written(console) == [
        "     0  id-0              stop            one\\ntwo\\x1b[31m red",
        "     1  id-1              missing_prompt  no prompt\\there",
        "     2  id-2              stop            first",
        " 2.1.2  id-2              stop            second",
        "     3  id-3              stop            long long long long l…",
    ]
    assert next(looks, None) is None, "it looked until the output was there"


def test_what_follow_filters_and_where_it_ends(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follow_results(out, Listed.of(errors=False, where=["row_index>=2"], columns="row_index,text", limit=2))
    assert capsys.readouterr().out == "2\tfirst\n2\tsecond\n"
    with pytest.raises(InputError, match="there is no unfinished work"):
        follow_results(tmp_path / "none.parquet", Listed())
    with pytest.raises(UsageError, match="`--where` txt: "):
        follow_results(out, Listed.of(errors=False, where=["txt=a"], columns=None, limit=None))
