"""Choice of rows to replay, and comparison of two outputs of a row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from batchgen.data.out.compare import Difference, choose_rows, compare
from batchgen.data.out.finish import finish
from batchgen.data.schema import SCHEMA
from tests.data.helpers import begin, commit, expect, failed, group


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows 0 to 49 of one or two samples; every fifth is an error."""
    out = tmp_path_factory.mktemp("replay") / "out.parquet"
    counts = [1 + row % 2 for row in range(50)]
    with begin(out) as work:
        commit(work, ([failed(row)] if row % 5 == 0 else group(row, samples=counts[row]) for row in range(50)))
        finish(work, expect((row, 0, counts[row]) for row in range(50)), {})
    return out


def test_rows_are_chosen_among_the_good_ones(finished: Path) -> None:
    good = {row for row in range(50) if row % 5}
    chosen = choose_rows(finished, 12, 0)
    assert len(chosen) == len(set(chosen)) == 12
    assert chosen == sorted(chosen) == choose_rows(finished, 12, 0)
    assert set(chosen) <= good
    assert choose_rows(finished, 12, 1) != chosen
    assert set(choose_rows(finished, 1000, 3)) == good
    assert set().union(*(choose_rows(finished, 5, seed) for seed in range(100))) == good, "every good row can be chosen"


def test_a_row_with_a_failed_prompt_is_not_chosen(tmp_path: Path) -> None:
    """Rows of two prompts: the first fails in rows 0, 6, ..., the last in rows 3, 9, ..."""
    out = tmp_path / "out.parquet"
    prompts = [(row, prompt) for row in range(30) for prompt in range(2)]
    with begin(out) as work:
        bad = {(row, row % 2) for row in range(0, 30, 3)}
        commit(work, ([failed(*key)] if key in bad else group(*key) for key in prompts))
        finish(work, expect((row, prompt, 1) for row, prompt in prompts), {})
    assert choose_rows(out, 1000, 0) == [row for row in range(30) if row % 3]


def row(sample: int = 0, **values: Any) -> dict[str, Any]:
    given = {"prompt_index": 0, "sample_index": sample, "output_ids": [1, 2, 3], "output_logprobs": [-1.0, -2.0, -0.5]}
    return dict.fromkeys(SCHEMA.names) | given | values


DIFFERENCES: list[tuple[dict[str, Any], Difference | None]] = [
    ({}, None),
    (
        {
            "id": "other",
            "cached_tokens": 9,
            "cached_tokens_details": {"prefix": 9},
            "dedup_of": 4,
            "prompt": "p",
            "extra": "{}",
            "prompt_ids": [1],
        },
        None,
    ),
    ({"text": "b"}, Difference(("text",))),
    (
        {"output_ids": [1, 9, 3], "output_logprobs": [-1.0, -5.0, -0.5]},
        Difference(("output_ids", "output_logprobs"), (0, 1), 1, (2, 9)),
    ),
    ({"output_ids": [1, 2]}, Difference(("output_ids",), (0, 1), 2, (3, None))),
    ({"output_ids": [1, 2, 3, 4]}, Difference(("output_ids",), (0, 1), 3, (None, 4))),
    ({"output_logprobs": [-1.0, -2.0, -0.75]}, Difference(("output_logprobs",), logprob=0.25)),
    ({"output_logprobs": None}, Difference(("output_logprobs",), logprob=math.inf)),
    ({"input_logprobs": [None, -1.0]}, Difference(("input_logprobs",), logprob=math.inf)),
    ({"mean_logprob": -1.0}, Difference(("mean_logprob",), logprob=math.inf)),
    ({"sample_index": 2}, Difference(("sample_index",))),
]


@pytest.mark.parametrize(("changes", "expected"), DIFFERENCES)
def test_compare_reports_the_first_difference(changes: dict[str, Any], expected: Difference | None) -> None:
    recorded = [row(), row(1)]
    assert compare(recorded, [row(), row(1) | changes]) == expected


def test_numbers_are_compared_only_where_tokens_are_equal() -> None:
    old = [row(output_logprobs=[-1.0, -math.inf, -0.5]), row(1)]
    new = [row(output_logprobs=[-1.25, -math.inf, -0.5]), row(1, output_ids=[7, 2, 3], output_logprobs=[-9.0] * 3)]
    assert compare(old, new) == Difference(("output_logprobs", "output_ids"), (0, 1), 0, (1, 7), 0.25)
