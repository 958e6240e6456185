"""The commonest reason of row errors, with its first row."""

from __future__ import annotations

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.job.display.reasons import Reasons
from batchgen.request.completion import Completion


def reasons(*errors: tuple[ErrorCode, str | None]) -> str | None:
    found = Reasons()
    for row, (code, param) in enumerate(errors):
        found.add(Completion(row, error=ErrorInfo(code, f"in.jsonl, line {row + 1}: \x1b no", param)), f"id {row}")
    return found.commonest()


def test_the_most_rows_win() -> None:
    field, prompt = (ErrorCode.INVALID_FIELD, "model"), (ErrorCode.MISSING_PROMPT, None)
    assert reasons(prompt, field, field) == (
        r"most frequent: invalid_field in 2 rows, first in row 1 (id 'id 1'): in.jsonl, line 2: \x1b no"
    )


def test_one_code_of_two_fields_is_two_reasons() -> None:
    model, other = (ErrorCode.INVALID_FIELD, "model"), (ErrorCode.INVALID_FIELD, "n")
    assert "in 2 rows, first in row 0" in str(reasons(model, other, model))


def test_of_equal_ones_the_first() -> None:
    found = reasons((ErrorCode.UNKNOWN_FIELD, "a"), (ErrorCode.INVALID_FIELD, "b"))
    assert str(found).startswith("most frequent: unknown_field in 1 row, first in row 0")


def test_no_errors() -> None:
    assert reasons() is None


def test_many_reasons_and_long_messages_stay_small() -> None:
    found = reasons(*[(ErrorCode.UNKNOWN_FIELD, f"key {i}") for i in range(3000)])
    assert str(found).startswith("most frequent: unknown_field in 1 row, first in row 0")
    one = Reasons()
    one.add(Completion(0, error=ErrorInfo(ErrorCode.INVALID_JSON, "x" * 9000)), "a")
    assert len(str(one.commonest())) < 600
