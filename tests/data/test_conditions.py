"""Conditions on columns, against the same comparison in Python on random rows."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.out.conditions import Condition, check_columns
from batchgen.data.out.view import open_results
from batchgen.data.schema import SCHEMA, with_footer
from batchgen.errors import UsageError

COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "~": lambda text, part: part in text,
}  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "finish_reason": ["stop", "length", None],
    "completion_tokens": [0, 1, 7, 100, None],
    "mean_logprob": [-1.5, -0.25, None],
    "constraint_ok": [True, False, None],
    "error.code": ["oom", "invalid_field", None],
}


def rows_of(rng: random.Random, count: int) -> list[dict[str, Any]]:
    rows = []
    for number in range(count):
        row = {name: rng.choice(values) for name, values in VALUES.items()}
        code = row.pop("error.code")
        error = None if code is None else {"code": code, "message": "m", "param": None}
        rows.append({**row, "error": error, "row_index": number, "status": "error" if code else "ok"})
    return rows


def value_of(row: dict[str, Any], name: str) -> Any:
    return (row["error"] or {}).get("code") if name == "error.code" else row[name]


def text_of(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("seed", range(30))
def test_random_conditions_find_the_rows_that_python_finds(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    rows = rows_of(rng, rng.choice([0, 1, 17, 60]))
    table = pa.Table.from_pylist(rows, SCHEMA).cast(with_footer({"fingerprint": "f"}))
    pq.write_table(table, tmp_path / "r.parquet", row_group_size=13)
    conditions, kept = [], rows
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(list(VALUES))
        value = rng.choice(VALUES[name])
        signs = ["=", "!="] if value is None or isinstance(value, bool) else [*COMPARED]
        sign = rng.choice([each for each in signs if each != "~" or isinstance(value, str)])
        conditions.append(Condition.parse(f"{name}{sign}{text_of(value)}"))

        def meets(row: dict[str, Any], name: str = name, sign: str = sign, value: Any = value) -> bool:
            found = value_of(row, name)
            if value is None:
                return (found is None) == (sign == "=")
            return sign == "!=" if found is None else COMPARED[sign](found, value)

        kept = list(filter(meets, kept))
    results = open_results(tmp_path / "r.parquet")
    found = [row["row_index"] for row in results.rows(where=conditions, columns=["row_index"])]
    assert found == [row["row_index"] for row in kept]
    assert results.count(where=conditions) == len(kept)
    errors = [row["row_index"] for row in results.rows(errors=True, where=conditions)]
    assert errors == [row["row_index"] for row in kept if row["error"]]
    assert results.count(errors=True, where=conditions) == len(errors)


@pytest.mark.parametrize(
    ("text", "column", "sign", "value"),
    [
        ("a=b", "a", "=", "b"),
        (" a >= 3", "a", ">=", "3"),
        ("a!=", "a", "!=", ""),
        ("error.code=x=y", "error.code", "=", "x=y"),
        ("my field~<b>", "my field", "~", "<b>"),
    ],
)
def test_the_first_sign_is_the_comparison(text: str, column: str, sign: str, value: str) -> None:
    parsed = Condition.parse(text)
    assert (parsed.column, parsed.sign, parsed.value) == (column, sign, value)


@pytest.mark.parametrize("text", ["", "finish_reason", "=stop", "~"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be a column, one of = != < <= > >= ~"):
        Condition.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("completion_tokens=many", "`completion_tokens` is int32, not 'many'"),
        ("completion_tokens~1", "`completion_tokens` is int32; ~ looks into text"),
        ("output_ids=1", "compare text, a number, or a part as in error.code"),
        ("error=oom", "compare text, a number, or a part as in error.code"),
    ],
)
def test_a_condition_that_does_not_fit_its_column(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Condition.parse(text).mask(SCHEMA.empty_table())
    assert message in str(caught.value)
    assert text in str(caught.value)


def test_a_column_that_one_file_lacks_is_null_there() -> None:
    table = pa.table({"row_index": [1, 2]})
    for text, met in (
        ("lang=de", False),
        ("lang!=de", True),
        ("lang=null", True),
        ("lang<3", False),
        ("lang~d", False),
    ):
        assert Condition.parse(text).mask(table).to_pylist() == [met, met], text


def test_columns_that_no_file_has() -> None:
    check_columns(["error.code", "id", "row_index"], [pa.schema([("x", pa.int64())]), SCHEMA], "--where")
    with pytest.raises(UsageError, match=r"`--where` error.cod: .* did you mean `error.code`\?"):
        check_columns(["error.cod"], [SCHEMA], "--where")
