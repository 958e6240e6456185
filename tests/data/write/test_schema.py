"""The output schema is the documented one, and tables contain the values of the completions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.schema import (
    RUN_KEY,
    SCHEMA,
    VERSION_KEY,
    OutputRow,
    completions_to_table,
    extra_json,
    with_footer,
)
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request.completion import Completion
from tests.data.helpers import failed, sample

GOLDEN = {
    "id": "string", "row_index": "int64", "prompt_index": "int32", "sample_index": "int32", "status": "string",
    "finish_reason": "string", "stop_kind": "string", "matched_stop": "string", "matched_text": "string",
    "error": "struct<code: string, message: string, param: string>", "text": "string",
    "reasoning": "string", "reasoning_tokens": "int32", "reasoning_cut": "bool",
    "tool_calls": "string", "tool_calls_error": "string",
    "output_ids": "list<item: int32>", "prompt_ids": "list<item: int32>",
    "prompt_tokens": "int32", "media_tokens": "int32", "completion_tokens": "int32", "cached_tokens": "int32",
    "cached_tokens_details": "struct<prefix: int32, duplicate: int32>",
    "output_logprobs": "list<item: float>", "input_logprobs": "list<item: float>",
    "cumulative_logprob": "double", "mean_logprob": "double",
    "output_top_ids": "list<item: int32>", "output_top_logprobs": "list<item: float>",
    "input_top_ids": "list<item: int32>", "input_top_logprobs": "list<item: float>",
    "output_ids_logprobs": "list<item: float>", "input_ids_logprobs": "list<item: float>",
    "output_tokens_text": "list<item: string>", "input_tokens_text": "list<item: string>",
    "routed_experts": "list<item: int32>",
    "scores": "list<item: struct<sum: double, mean: double, tokens: int32, is_greedy: bool>>",
    "score_logprobs": "list<item: float>", "constraint_ok": "bool", "min_new_tokens_unmet": "bool",
    "seed": "int64", "effective_max_new_tokens": "int32", "dropped_tokens": "int32", "dedup_of": "int64",
    "request_hash": "int64", "prompt": "string", "extra": "string",
}  # fmt: skip


def test_the_schema_is_the_documented_one() -> None:
    assert [(field.name, str(field.type)) for field in SCHEMA] == [*GOLDEN.items()]


@pytest.mark.parametrize("rows", [[], [sample(1)], [failed(0)], [sample(0), failed(1), sample(2, 3, 4)]])
def test_every_table_has_the_whole_schema(rows: list[OutputRow]) -> None:
    table = completions_to_table(rows)
    assert table.schema == SCHEMA
    assert len(table) == len(rows)
    table.validate(full=True)


def test_a_finished_sample() -> None:
    values: dict[str, Any] = {
        "finish_reason": "stop",
        "stop_kind": "string",
        "matched_stop": "END",
        "matched_text": "END",
        "text": "abc",
        "output_ids": [1, 2],
        "prompt_ids": [7, 8, 9],
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "output_logprobs": [-0.5, -1.0],
        "output_top_ids": [1, 5, 2, 6],
        "output_top_logprobs": [-0.5, -2.0, -1.0, -3.0],
        "cumulative_logprob": -1.5,
        "mean_logprob": -0.75,
        "seed": -(2**63),
        "effective_max_new_tokens": 16,
        "dedup_of": 2**40,
    }
    given = {**values, "prompt_ids": (7, 8, 9), "output_logprobs": np.array([-0.5, -1.0])}
    row = OutputRow(Completion(3, 1, 2, **given), "the id", '{"a":1}', "the prompt")
    keys = {"id": "the id", "row_index": 3, "prompt_index": 1, "sample_index": 2, "status": "ok"}
    (found,) = completions_to_table([row]).to_pylist()
    assert {name: value for name, value in found.items() if value is not None} == {
        **keys, **values, "prompt": "the prompt", "extra": '{"a":1}'
    }  # fmt: skip


def test_an_error_row() -> None:
    row = OutputRow(Completion(5, error=ErrorInfo(ErrorCode.EMPTY_PROMPT, "no text", "text")), "x")
    (found,) = completions_to_table([row]).to_pylist()
    assert {name: value for name, value in found.items() if value is not None} == {
        "id": "x",
        "row_index": 5,
        "prompt_index": 0,
        "sample_index": 0,
        "status": "error",
        "error": {"code": "empty_prompt", "message": "no text", "param": "text"},
    }


def test_ids_that_exceed_int32_are_refused() -> None:
    for ids in ([2**31], np.array([2**31], np.int64)):
        with pytest.raises((OverflowError, pa.ArrowInvalid)):
            completions_to_table([OutputRow(Completion(0, output_ids=ids), "x")])  # type: ignore[arg-type]


LISTS: Any = st.none() | st.lists(st.integers(-5, 5), max_size=4)


@given(st.lists(st.tuples(LISTS, LISTS, st.sampled_from(["list", "tuple", "array"])), max_size=8))
def test_flat_lists_equal_the_values_given(rows: list[tuple[list[int] | None, list[int] | None, str]]) -> None:
    def shaped(values: list[int] | None, shape: str, dtype: type) -> Any:
        makers: dict[str, Any] = {"list": list, "tuple": tuple, "array": lambda v: np.array(v, dtype)}
        return None if values is None else makers[shape](values)

    table = completions_to_table(
        [
            OutputRow(
                Completion(i, output_ids=shaped(ids, how, np.int32), output_logprobs=shaped(scores, how, np.float32)),
                "x",
            )
            for i, (ids, scores, how) in enumerate(rows)
        ]
    )
    table.validate(full=True)
    assert table["output_ids"].to_pylist() == [ids for ids, _, _ in rows]
    assert table["output_logprobs"].to_pylist() == [scores for _, scores, _ in rows]


def test_lists_that_contain_nulls() -> None:
    rows = [OutputRow(Completion(0, output_logprobs=[None, -0.5]), "x"), OutputRow(Completion(1), "y")]  # type: ignore[list-item]
    assert completions_to_table(rows)["output_logprobs"].to_pylist() == [[None, -0.5], None]


def test_masked_entries_of_arrays_are_nulls() -> None:
    def masked(values: list[float], missing: int) -> Any:
        return np.ma.MaskedArray(np.array(values, np.float32), np.arange(len(values)) < missing)

    lists: list[Any] = [masked([0.0, -0.5], 1), None, np.array([-1.5], np.float32), masked([], 0), masked([0.0], 1)]
    table = completions_to_table([OutputRow(Completion(i, input_logprobs=x), "x") for i, x in enumerate(lists)])
    table.validate(full=True)
    assert table["input_logprobs"].to_pylist() == [[None, -0.5], None, [-1.5], [], [None]]
    ids: Any = np.ma.MaskedArray(np.array([0, 0, 7, 8], np.int32), [True, True, False, False])
    table = completions_to_table([OutputRow(Completion(0, input_top_ids=ids), "x")])
    assert table["input_top_ids"].to_pylist() == [[None, None, 7, 8]]


def test_extra_json() -> None:
    assert extra_json({}) is None
    assert extra_json({"a": "é\u2028", "n": 2**70}) == '{"a":"é\u2028","n":1180591620717411303424}'
    assert extra_json({"a": [float("nan"), {"b": float("inf")}], "c": 1.5}) == '{"a":[null,{"b":null}],"c":1.5}'


def test_json_and_orjson_write_strings_equally() -> None:
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), 0x1F600, 0x10FFFF]))
    fields = {"a": everything, everything: None, "b": True, "c": False, "": "", 'q"\\': "\n"}
    assert extra_json(fields) == json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def test_footer() -> None:
    metadata = with_footer({"fingerprint": "é"}).metadata
    assert metadata[VERSION_KEY] == b"2"
    assert json.loads(metadata[RUN_KEY]) == {"fingerprint": "é"}
