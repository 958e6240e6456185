from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config.units import (
    Shard,
    Threshold,
    TotalShare,
    parse_bool,
    parse_columns,
    parse_duration,
    parse_float,
    parse_int,
    parse_memory,
    parse_name_path,
    parse_shard,
    parse_size,
    parse_threshold,
    parse_token_ids,
    parse_total_share,
)
from batchgen.request.printable import format_size

Parser = Callable[[str], Any]
VALUES: dict[Parser, dict[str, Any]] = {
    parse_size: {
        "0": 0, "4096": 4096, "12B": 12, "1KB": 1000, "1KiB": 1024, "2MB": 2_000_000, "2 MiB": 2 * 2**20,
        "1.5GiB": 3 * 2**29, "0.1GB": 100_000_000, "4gb": 4_000_000_000, "1TiB": 2**40, "0.0001KB": 0,
    },
    parse_memory: {"0.85": 0.85, "85%": 0.85, "100%": 1.0, "1.0": 1.0, "4GiB": 2**32, "1048576": 2**20},
    parse_duration: {
        "90": 90.0, "0.5": 0.5, "90s": 90.0, "30m": 1800.0, "2h": 7200.0, "1.5h": 5400.0, "1h30m": 5400.0,
        "1d": 86400.0, "1-02:00:00": 93600.0, "1-02": 93600.0, "1-02:30": 95400.0, "02:00:30": 7230.0, "05:30": 330.0,
        "36500d": 36500 * 86400.0,
    },
    parse_total_share: {"0.9": TotalShare(0.9), "85%": TotalShare(0.85), "1": TotalShare(1)},
    parse_int: {"7": 7, "-3": -3, "1_000": 1000, " 8 ": 8, "4k": 4000, "4K": 4096, "-1m": -1_000_000},
    parse_columns: {"a, b,c": ("a", "b", "c")},
    parse_token_ids: {"2, 13": (2, 13)},
    parse_name_path: {"fr=./a=b": ("fr", "./a=b")},
}  # fmt: skip
WRONG: dict[Parser, tuple[str, list[str]]] = {
    parse_size: (
        "must be a size such as 4096, 512MB or 1.5GiB, got ",
        ["", "GB", "-1", "1.5", "4G", "1.5B", "4 Gbit", "1e9", "1,000", "0x10", "٣", "85%"],
    ),
    parse_memory: ("must be a", ["0.0", "1.5", "0%", "101%", "%", "1", "100KB", "x%", "-5%", "nan", ""]),
    parse_duration: (
        "must be a duration such as 90, 90s, 30m, 2h or 1-02:00:00, got ",
        ["", "h", "-5", "5x", "30m1h", "1-", "1:2:3:4", "1 h 3", "inf", "1h-2"],
    ),
    parse_total_share: ("must be a share above 0 and up to 1 (0.85, 85%), got ", ["0", "2", "1.5", "4.5GiB", "101%"]),
    parse_int: (
        "must be a whole number, got ",
        ["", "1.0", "1e3", "4kb", "4 k", "k", "True", "_1", "1__0", "0x1", "٣"],
    ),
    parse_threshold: (
        "must be a count such as 10 or a share such as 5%, got ", ["", "-1", "1.5", "101%", "%", "ten"],
    ),
    parse_columns: ("must be names separated by commas, got ", ["", "a,,b"]),
    parse_token_ids: ("must be token ids", ["", "1,", "-1", "1;2"]),
    parse_name_path: ("must be NAME=PATH", ["", "name", "=p", "n="]),
}  # fmt: skip


def test_values() -> None:
    for parse, cases in VALUES.items():
        for text, value in cases.items():
            parsed = parse(text)
            assert (parsed, type(parsed)) == (value, type(value)), (parse, text)


def test_wrong_texts() -> None:
    for parse, (problem, texts) in WRONG.items():
        for text in texts:
            with pytest.raises(ValueError, match="^" + re.escape(problem) + (f"{text!r}$" * problem.endswith("got "))):
                pytest.fail(f"{parse} accepts {text!r}: {parse(text)}")
    with pytest.raises(ValueError, match=r"^names a column twice: 'a,a'$"):
        parse_columns("a,a")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "x", ""])
def test_wrong_floats(text: str) -> None:
    with pytest.raises(ValueError, match="number, got"):
        parse_float(text)


@given(st.integers(0, 10**15), st.sampled_from([("KB", 10**3), ("MiB", 2**20), ("GiB", 2**30), ("", 1)]))
def test_whole_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize("text", ["36501d", "9" * 400, "9" * 400 + "-00", "876001:00:00"])
def test_durations_above_the_limit(text: str) -> None:
    with pytest.raises(ValueError, match=f"must be at most 36500d, got '{text}'"):
        parse_duration(text)


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_slurm_and_unit_durations_agree(d: int, h: int, m: int, s: int) -> None:
    total = d * 86400 + h * 3600 + m * 60 + s
    assert parse_duration(f"{d}-{h:02d}:{m:02d}:{s:02d}") == total
    assert parse_duration(f"{d}d{h}h{m}m{s}s") == total


@given(st.one_of(st.text(max_size=12), st.text("0123456789.-:%dhmsKGiB/, =_+e", max_size=12)))
def test_parsers_raise_only_their_own_value_errors(text: str) -> None:
    for parse in (*WRONG, parse_float, parse_bool):
        problem = ""
        try:
            parse(text)
        except ValueError as error:
            problem = str(error)
        assert not problem or problem.startswith(("must", "names")), parse


@pytest.mark.parametrize(
    ("threshold", "errors", "rows", "exceeded"),
    [
        ("10", 10, 100, False), ("10", 11, 100, True), ("0", 0, 10, False), ("0", 1, 10, True), ("5%", 5, 100, False),
        ("5%", 6, 100, True), ("0%", 1, 10**9, True), ("100%", 10, 10, False), (None, 9, 10, False),
        (None, 10, 10, True), (None, 0, 0, False),
    ],
)  # fmt: skip
def test_thresholds(threshold: str | None, errors: int, rows: int, exceeded: bool) -> None:
    parsed = parse_threshold(threshold) if threshold else Threshold()
    assert parsed.exceeded(errors, rows) is exceeded
    assert str(parsed) == (threshold or "fewer than all rows")


def slurm(task: int, count: int, low: int = 0, step: int = 1, high: int | None = None) -> dict[str, str]:
    names = {"ID": task, "COUNT": count, "MIN": low, "MAX": high, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items() if value is not None}


@pytest.mark.parametrize(
    ("text", "array", "shard"),
    [
        ("7/16", {}, "7/16"),
        ("16/16", {}, "shards count from 0"),
        ("0/0", {}, "shards count from 0"),
        ("1", {}, "must be I/N such as 0/16, or auto"),
        ("-1/4", {}, "must be I/N such as 0/16, or auto"),
        ("auto", {}, "auto needs SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT"),
        ("auto", slurm(0, 4), "0/4"),
        ("auto", slurm(3, 4), "3/4"),
        ("auto", slurm(4, 4, 1), "3/4"),
        ("auto", slurm(10, 4, 1, 3), "3/4"),
        ("auto", slurm(0, 1, 0, 1, 0), "0/1"),
        ("auto", slurm(3, 4, 0, 1, 3), "3/4"),
        ("auto", slurm(7, 4, 1, 3, 10), "2/4"),
        ("auto", slurm(3, 2, 0, 1, 3), "1/2"),  # --array=0,3
        ("auto", slurm(4, 3, 0, 1, 4), "2/3"),  # --array=0,2,4
        ("auto", slurm(0, 3, 0, 1, 7), "the array's 3 ids from 0 to 7 must be evenly spaced"),
        ("auto", slurm(3, 3, 1, 1, 7), "auto cannot derive the part of task 3"),  # --array=1,3,7
        ("auto", slurm(0, 2, 0, 2, 3), "evenly spaced"),
        ("auto", slurm(0, 4, 0, 1, 2), "evenly spaced"),
        ("auto", slurm(7, 3, 1), "evenly spaced"),
        ("auto", slurm(2, 4, 1, 3), "evenly spaced"),
        ("auto", slurm(0, 4, 1), "evenly spaced"),
        ("auto", slurm(7, 1, 7), "this one begins at 7; give I/N"),
        ("auto", slurm(3, 2, 3), "this one begins at 3; give I/N"),
        ("auto", slurm(2, 3, 2), "this one begins at 2; give I/N"),
    ],
)
def test_shards(text: str, array: dict[str, str], shard: str) -> None:
    if "/" in shard and shard[0].isdigit():
        assert parse_shard(text, array) == Shard(*map(int, shard.split("/")))
        assert str(parse_shard(text, array)) == shard
        return
    with pytest.raises(ValueError, match=re.escape(shard)):
        parse_shard(text, array)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**51, "2048.0 TiB")]
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text
