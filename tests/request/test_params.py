"""`SamplingParams` created from Python; `test_every_field` has the values that are refused."""

from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import pytest

from batchgen.errors import RowError
from batchgen.request.fields.hidden_states import HiddenStates
from batchgen.request.fields.params import SamplingParams
from tests.cases import each

OPTIONAL = [item.name for item in fields(SamplingParams) if "None" in str(item.type)]


def test_null_is_refused_or_none() -> None:
    for item in fields(SamplingParams):
        if item.name in OPTIONAL:
            assert getattr(SamplingParams(**{item.name: None}), item.name) is None
        else:
            with pytest.raises(RowError, match=f"`{item.name}` must not be null"):
                SamplingParams(**{item.name: None})


@each(
    "name, value, problem",
    [
        ("ignore_eos", 1, "must be true or false, got 1"),
        ("stop", 5, "must be a string or a list of strings, got 5"),
        ("stop_regex", ["a", None], "must be a string or a list of strings, got ['a', null]"),
        ("choice", "yes", "must be a list of strings, got 'yes'"),
        ("choice", [1], "must be a list of strings, got [1]"),
        ("stop_token_ids", 5, "must be a list of token ids, got an integer"),
        ("bad_words", ["a", ""], "must not contain an empty string or list"),
        ("bad_words", [[]], "must not contain an empty string or list"),
        ("logit_bias", {"a": 1.0}, "must have token ids as keys, got 'a'"),
        ("json_schema", {"a": {1}}, "must be JSON: "),
        ("return_hidden_states", "all", "must be true or false, got 'all'"),
        ("return_hidden_states", {"layer": 1}, "has the keys `layers`, `tokens` and `pool`, got 'layer'"),
        ("max_new_tokens", "5", "must be an integer, got '5'"),
        ("max_new_tokens", -1, "must be between 0 and 2147483648, got -1"),
        ("seed", 2**63, "must fit a signed 64-bit integer"),
        ("temperature", "hot", "must be a number, got 'hot'"),
        ("top_p", 1.0000001, "must be in (0, 1], got 1.0000001"),
    ],
)
def test_messages(name: str, value: Any, problem: str) -> None:
    with pytest.raises(RowError, match=re.escape(f"`{name}` {problem}")):
        SamplingParams(**{name: value})


def test_aliases_are_accepted_as_in_rows() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=1) == SamplingParams(max_new_tokens=3, min_new_tokens=1)
    assert SamplingParams(max_completion_tokens=3).max_new_tokens == 3
    assert replace(SamplingParams(max_tokens=3), n=2) == SamplingParams(max_new_tokens=3, n=2)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"temprature": 1}, "`temprature` is not a field of SamplingParams; did you mean `temperature`?"),
        ({"maxTokens": 1}, "did you mean `max_tokens`?"),
        ({"repeat_penalty": 1.1}, "an option of llama.cpp and Ollama: use `repetition_penalty`"),
        (
            {"truncate_prompt_tokens": 5},
            "is not a field of SamplingParams; it is set for a whole run",
        ),
        ({"max_tokens": 1, "max_new_tokens": 1}, "`max_new_tokens` is given together with its alias"),
    ],
)
def test_other_names_are_refused_with_the_right_one(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(RowError, match=re.escape(problem)):
        SamplingParams(**given)


def test_any_iterable_and_mapping_of_python_is_accepted() -> None:
    params = SamplingParams(
        stop_token_ids=range(3, 5),  # type: ignore[arg-type]
        stop={"a": 1, "b": 2}.keys(),  # type: ignore[arg-type]
        logit_bias=MappingProxyType({5: 1}),  # type: ignore[arg-type]
        json_schema=OrderedDict(type="object"),
        return_hidden_states=HiddenStates(layers=range(2)),  # type: ignore[arg-type]
    )
    assert params.stop_token_ids == (3, 4)
    assert params.stop == ("a", "b")
    assert params.logit_bias == ((5, 1.0),)
    assert params.json_schema == '{"type":"object"}'
    assert params.return_hidden_states == HiddenStates(layers=(0, 1))
    assert SamplingParams(choice=(text for text in ["x", "y"])).choice == ("x", "y")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids={7}).stop_token_ids == (7,)  # type: ignore[arg-type]


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
    assert SamplingParams(top_k=0, suffix="") == SamplingParams()
    again = SamplingParams(**{item.name: getattr(params, item.name) for item in fields(params)})
    assert again == params, "stored values are accepted unchanged"
    for same in (again, copy.copy(params), pickle.loads(pickle.dumps(params))):
        assert {params: 1}[same] == 1
