"""`SamplingParams` created from Python: values of any wrong type are refused by name."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from batchgen.errors import RowError
from batchgen.request.params import HiddenStates, SamplingParams

OPTIONAL = [item.name for item in fields(SamplingParams) if "None" in str(item.type)]
REQUIRED = [item.name for item in fields(SamplingParams) if item.name not in OPTIONAL]
UNKNOWN_TYPES: list[Any] = [object(), 1.5j, {"a": object()}, [object()], b"a", [[1.5]]]


@pytest.mark.parametrize("name", REQUIRED)
def test_null_in_a_required_field_is_refused(name: str) -> None:
    with pytest.raises(RowError, match=f"`{name}` must not be null"):
        SamplingParams(**{name: None})


@pytest.mark.parametrize("name", OPTIONAL)
def test_null_in_an_optional_field_is_none(name: str) -> None:
    assert getattr(SamplingParams(**{name: None}), name) is None


@pytest.mark.parametrize("name", [*OPTIONAL, *REQUIRED])
@pytest.mark.parametrize("value", UNKNOWN_TYPES, ids=range(len(UNKNOWN_TYPES)))
def test_values_of_unknown_types_are_refused_by_name(name: str, value: Any) -> None:
    if name in ("json_schema", "structural_tag") and value == [[1.5]]:
        pytest.skip("valid JSON, which is checked when the constraint is compiled")
    with pytest.raises(RowError, match=re.escape(f"`{name}`")):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("ignore_eos", 1, "true or false, got 1"),
        ("return_logprob", "yes", "true or false, got 'yes'"),
        ("echo", [], "true or false"),
        ("stop", 5, "must be a list, got 5"),
        ("stop", ["a", 5], "must contain only strings, got 5"),
        ("stop_regex", ["a", None], "must contain only strings, got null"),
        ("choice", "yes", "must be a list"),
        ("choice", [1], "must contain only strings, got 1"),
        ("stop_token_ids", 5, "must be a list, got 5"),
        ("allowed_token_ids", "5", "must be a list"),
        ("bad_words", "word", "must be a list"),
        ("bad_words", [5], "must be a list, got 5"),
        ("logit_bias", {"a": 1.0}, "must map token ids to numbers"),
        ("logit_bias", 5, "must map token ids to numbers"),
        ("regex", 5, "must be a string, got 5"),
        ("lora_path", ["a"], "must be a string"),
        ("json_schema", {"a": {1}}, "must be JSON"),
        ("return_hidden_states", "all", "must be true, false or an object of layers, tokens, pool"),
        ("return_hidden_states", {"layer": 1}, "must be true, false or an object of layers, tokens, pool"),
        ("return_hidden_states", {"layers": 5}, "must be true, false or an object of layers, tokens, pool"),
        ("max_new_tokens", "5", "must be an integer, got '5'"),
        ("temperature", "hot", "must be a finite number, got 'hot'"),
    ],
)
def test_messages(name: str, value: Any, problem: str) -> None:
    with pytest.raises(RowError, match=re.escape(f"`{name}` ") + ".*" + re.escape(problem)):
        SamplingParams(**{name: value})


def test_other_accepted_forms_are_normalised() -> None:
    params = SamplingParams(
        stop="a",  # type: ignore[arg-type]
        stop_regex=["b"],
        choice=None,
        stop_token_ids=[3],
        logit_bias={"5": 1, 2: -1.5},
        bad_words=["x", [1, 2]],
        json_schema={"type": "object"},
        return_hidden_states=True,
    )
    assert params.stop == ("a",)
    assert params.stop_regex == ("b",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == ((2, -1.5), (5, 1.0))
    assert params.bad_words == ("x", (1, 2))
    assert params.json_schema == '{"type":"object"}'
    assert params.return_hidden_states == HiddenStates()
    assert SamplingParams(return_hidden_states=False).return_hidden_states is None
