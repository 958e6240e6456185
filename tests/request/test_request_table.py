"""`RequestTable` finds the requests of a prompt by its row and its index in the row."""

from __future__ import annotations

import pytest

from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable

TABLES: dict[str, list[tuple[int, int]]] = {
    "one prompt in every row": [(row, 0) for row in range(5)],
    "rows left out": [(1, 0), (4, 0), (5, 0), (9, 0)],
    "several prompts": [(0, 0), (0, 1), (1, 0), (3, 0), (3, 1), (3, 2)],
    "several texts": [(0, 0), (0, 0), (2, 0), (2, 1), (2, 1), (2, 1), (3, 0), (3, 0)],
    "one row": [(0, 0)],
    "one row with texts": [(1, 0), (1, 0)],
}


@pytest.mark.parametrize("name", TABLES)
def test_requests_of_a_prompt(name: str) -> None:
    keys, table, params = TABLES[name], RequestTable(), SamplingParams()
    for number, (row, prompt) in enumerate(keys):
        table.append(row, prompt, [number + 1] * (number + 1), params, 7 * number, 3)
    for row, prompt in [(row, prompt) for row in range(11) for prompt in range(4)]:
        places = [i for i, key in enumerate(keys) if key == (row, prompt)]
        if places or not any(row == known for known, _ in keys):
            assert [*table.requests_of(row, prompt)] == places
    assert [(request.row_index, request.prompt_index) for request in table] == keys
    assert [request.seed for request in table] == [7 * number for number in range(len(keys))]
    assert [table.prompt_ids(i).tolist() for i in range(len(keys))] == [[i + 1] * (i + 1) for i in range(len(keys))]
