from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config.units import (
    Shard,
    Threshold,
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
)
from batchgen.request.printable import format_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("12B", 12),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2MB", 2_000_000),
        ("2 MiB", 2 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("0.1GB", 100_000_000),
        ("4gb", 4_000_000_000),
        ("1TiB", 2**40),
        ("0.0001KB", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1.5", "4G", "1.5B", "4 Gbit", "1e9", "1,000", "0x10", "٣", "85%"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"must be a size such as 4096, 512MB or 1.5GiB, got {text!r}")):
        parse_size(text)


@given(st.integers(0, 10**15), st.sampled_from([("KB", 10**3), ("MiB", 2**20), ("GiB", 2**30), ("", 1)]))
def test_whole_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize(
    ("text", "memory"),
    [("0.85", 0.85), ("85%", 0.85), ("100%", 1.0), ("1.0", 1.0), ("4GiB", 2**32), ("1048576", 2**20)],
)
def test_memory(text: str, memory: float) -> None:
    parsed = parse_memory(text)
    assert parsed == memory
    assert type(parsed) is type(memory)


@pytest.mark.parametrize("text", ["0.0", "1.5", "0%", "101%", "%", "1", "100KB", "x%", "-5%", "nan", ""])
def test_bad_memory(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("1d", 86400),
        ("1-02:00:00", 93600),
        ("1-02", 93600),
        ("1-02:30", 95400),
        ("02:00:30", 7230),
        ("05:30", 330),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-5", "5x", "30m1h", "1-", "1:2:3:4", "1 h 3", "inf", "1h-2"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("must be a duration such as 90, 90s, 30m, 2h or 1-02:00:00, got")):
        parse_duration(text)


@pytest.mark.parametrize("text", ["36501d", "9" * 400, "9" * 400 + "-00", "876001:00:00"])
def test_durations_above_the_limit(text: str) -> None:
    assert parse_duration("36500d") == 36500 * 86400
    with pytest.raises(ValueError, match=f"must be at most 36500d, got '{text}'"):
        parse_duration(text)


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_slurm_and_unit_durations_agree(d: int, h: int, m: int, s: int) -> None:
    total = d * 86400 + h * 3600 + m * 60 + s
    assert parse_duration(f"{d}-{h:02d}:{m:02d}:{s:02d}") == total
    assert parse_duration(f"{d}d{h}h{m}m{s}s") == total


PARSERS = [
    parse_size,
    parse_memory,
    parse_duration,
    parse_threshold,
    parse_int,
    parse_float,
    parse_bool,
    parse_columns,
    parse_token_ids,
    parse_name_path,
]


@given(st.one_of(st.text(max_size=12), st.text("0123456789.-:%dhmsKGiB/, =_+e", max_size=12)))
def test_parsers_raise_only_their_own_value_errors(text: str) -> None:
    for parse in PARSERS:
        problem = ""
        try:
            parse(text)
        except ValueError as error:
            problem = str(error)
        assert not problem or problem.startswith(("must", "names")), parse.__name__


@pytest.mark.parametrize(("text", "value"), [("7", 7), ("-3", -3), ("1_000", 1000), (" 8 ", 8)])
def test_ints(text: str, value: int) -> None:
    assert parse_int(text) == value


@pytest.mark.parametrize("text", ["", "1.0", "1e3", "True", "_1", "1__0", "0x1", "٣"])
def test_bad_ints(text: str) -> None:
    with pytest.raises(ValueError, match="must be a whole number, got"):
        parse_int(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "x", ""])
def test_bad_floats(text: str) -> None:
    with pytest.raises(ValueError, match="number, got"):
        parse_float(text)


@pytest.mark.parametrize(
    ("threshold", "errors", "rows", "exceeded"),
    [
        ("10", 10, 100, False),
        ("10", 11, 100, True),
        ("0", 0, 10, False),
        ("0", 1, 10, True),
        ("5%", 5, 100, False),
        ("5%", 6, 100, True),
        ("0%", 1, 10**9, True),
        ("100%", 10, 10, False),
        (None, 9, 10, False),
        (None, 10, 10, True),
        (None, 0, 0, False),
    ],
)
def test_thresholds(threshold: str | None, errors: int, rows: int, exceeded: bool) -> None:
    parsed = parse_threshold(threshold) if threshold else Threshold()
    assert parsed.exceeded(errors, rows) is exceeded
    assert str(parsed) == (threshold or "fewer than all rows")


@pytest.mark.parametrize("text", ["", "-1", "1.5", "101%", "%", "ten"])
def test_bad_thresholds(text: str) -> None:
    with pytest.raises(ValueError, match="must be a count such as 10 or a share such as 5%"):
        parse_threshold(text)


def test_shards() -> None:
    assert parse_shard("7/16", {}) == Shard(7, 16)
    assert str(Shard(7, 16)) == "7/16"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("16/16", "shards count from 0"),
        ("0/0", "shards count from 0"),
        ("1", "must be I/N such as 0/16, or auto"),
        ("-1/4", "must be I/N such as 0/16, or auto"),
        ("auto", "auto needs SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT"),
    ],
)
def test_bad_shards(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_shard(text, {})


def slurm(task: int, count: int, low: int = 0, step: int = 1) -> dict[str, str]:
    names = {"ID": task, "COUNT": count, "MIN": low, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items()}


@pytest.mark.parametrize(
    ("task", "count", "low", "step", "index"), [(0, 4, 0, 1, 0), (3, 4, 0, 1, 3), (4, 4, 1, 1, 3), (10, 4, 1, 3, 3)]
)
def test_slurm_shards(task: int, count: int, low: int, step: int, index: int) -> None:
    assert parse_shard("auto", slurm(task, count, low, step)) == Shard(index, count)


@pytest.mark.parametrize(("task", "count", "low", "step"), [(7, 3, 1, 1), (2, 4, 1, 3), (0, 4, 1, 1)])
def test_uneven_slurm_arrays(task: int, count: int, low: int, step: int) -> None:
    with pytest.raises(ValueError, match="evenly spaced"):
        parse_shard("auto", slurm(task, count, low, step))


@pytest.mark.parametrize(("task", "count", "low"), [(7, 1, 7), (3, 2, 3), (2, 3, 2)])
def test_partial_slurm_arrays_are_refused(task: int, count: int, low: int) -> None:
    with pytest.raises(ValueError, match=f"this one begins at {low}; give I/N"):
        parse_shard("auto", slurm(task, count, low))


def test_lists() -> None:
    assert parse_columns("a, b,c") == ("a", "b", "c")
    assert parse_token_ids("2, 13") == (2, 13)
    assert parse_name_path("fr=./a=b") == ("fr", "./a=b")
    for bad in ("", "a,,b", "a,a"):
        with pytest.raises(ValueError, match=r"names"):
            parse_columns(bad)
    for bad in ("", "1,", "-1", "1;2"):
        with pytest.raises(ValueError, match="must be token ids"):
            parse_token_ids(bad)
    for bad in ("", "name", "=p", "n="):
        with pytest.raises(ValueError, match="must be NAME=PATH"):
            parse_name_path(bad)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**51, "2048.0 TiB")]
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text
