"""Scoring rows: which fields they may have."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import TextPrompt, TokenPrompt
from batchgen.request.rows.values import RowDefaults
from tests.rows import HELLO, parse, text

pytestmark = pytest.mark.field("completion", "completions")
SCORING_PARAMS = SamplingParams(max_new_tokens=0, temperature=0.0)


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"completion": " yes"}, (" yes",)),
        ({"completion": [1, 2]}, ((1, 2),)),
        ({"completions": [" yes", " no"]}, (" yes", " no")),
        ({"completions": [[1, 2], " no", [3]]}, ((1, 2), " no", (3,))),
        ({"completion": None, "completions": ["a"]}, ("a",)),
    ],
)
def test_texts(fields: dict[str, Any], texts: tuple[Any, ...]) -> None:
    row = parse(text(**fields, label=3))
    assert (row.completions, row.params, row.extra) == (texts, SCORING_PARAMS, {"label": 3})
    assert row.prompts == (TextPrompt("Hello"),)
    assert parse({"input_ids": [[1], [2]], **fields}).prompts == (
        TokenPrompt(array("i", (1,))),
        TokenPrompt(array("i", (2,))),
    )
    assert parse({"messages": HELLO, **fields}).completions == texts
    assert parse(text()).completions == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"completion": ""}, "completion"),
        ({"completion": []}, "completion"),
        ({"completion": 5}, "completion"),
        ({"completions": []}, "completions"),
        ({"completions": ["a", ""]}, "completions"),
        ({"completions": "a"}, "completions"),
        ({"completion": "a", "completions": ["b"]}, "completions"),
    ],
)
def test_wrong_texts(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RowError) as caught:
        parse(text(**fields))
    assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.INVALID_FIELD, param)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2), ("best_of", 2), ("temperature", 0), ("max_tokens", 5), ("stop", "a"), ("seed", 1),
        ("return_logprob", True), ("logprobs", 0), ("top_p", 0.5), ("ignore_eos", True), ("logit_bias", {"1": 2}),
        ("allowed_token_ids", [1]), ("echo", True), ("skip_special_tokens", False),
    ],
)  # fmt: skip
def test_fields_without_effect_on_scoring_are_refused(name: str, value: Any) -> None:
    for row in (text(completion="a", **{name: value}), text(completion="a", sampling_params={name: value})):
        with pytest.raises(RowError, match=f"`{name}` has no effect with `completion`") as caught:
            parse(row)
        assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.INVALID_FIELD, name)
    with pytest.raises(RowError, match="no effect with `completions`"):
        parse(text(completions=["a"], **{name: value}))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "max_new_tokens": 0, "stop": [], "return_logprob": False, "echo": False},
        {"temperature": None, "seed": None, "model": "*"},
        {"response_format": {"type": "text"}, "return_hidden_states": False, "stream": False, "logit_bias": {}},
        {"skip_special_tokens": True, "top_logprobs_num": 0, "logprob_start_len": -1, "top_k": -1, "suffix": ""},
    ],
)
def test_fields_that_request_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert parse(text(completion="a", **fields)).params == SCORING_PARAMS


def test_run_wide_defaults_do_not_apply() -> None:
    run_wide = RowDefaults(
        flags={
            "n": 4, "temperature": 0.7, "stop": ["a"], "return_logprob": True, "logprob_start_len": 0,
            "min_new_tokens": 5, "stream": True, "custom_logit_processor": "calm",
        },
        model={"top_k": 50},
    )  # fmt: skip
    for row in (text(completion="a"), text(completions=["a", "b"], max_new_tokens=0, n=1)):
        assert parse(row, run_wide).params == SCORING_PARAMS


def test_generating_rows_next_to_scoring_rows_have_the_defaults() -> None:
    """Rows that differ only in the text to score do not share cached parameters."""
    run_wide = RowDefaults(flags={"n": 4, "min_new_tokens": 5})
    for _ in range(2):
        assert parse(text(), run_wide).params == SamplingParams(n=4, min_new_tokens=5)
        assert parse(text(completion="a"), run_wide).params == SCORING_PARAMS


@pytest.mark.field("lora_path")
def test_the_run_s_adapter_applies() -> None:
    run_wide = RowDefaults(flags={"lora_path": "fr", "n": 4}, adapters=frozenset({"fr", "de"}))
    assert parse(text(completion="a"), run_wide).params == replace(SCORING_PARAMS, lora_path="fr")
    assert parse(text(completion="a", lora_path="de"), run_wide).params == replace(SCORING_PARAMS, lora_path="de")
