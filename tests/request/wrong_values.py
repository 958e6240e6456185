"""Wrong values of every sampling field, derived from its check: a new field is tested without a new line here."""

from __future__ import annotations

import math
from typing import Any

from batchgen.request.checks import (
    Check,
    Integer,
    Number,
    boolean,
    ids,
    mapping,
    nonempty_ids,
    nonempty_string,
    string,
    string_or_mapping,
    strings,
)
from batchgen.request.fields import field_checks
from batchgen.request.fields.field import Field
from batchgen.request.fields.hidden_states import hidden_states

_NO_STRINGS: list[Any] = [5, True, {"a": 1}, "", ["a", ""], ["a", 5], ["a", None], [["a"]]]
_NO_IDS: list[Any] = [5, "1", {"1": 1}, [True], [1.5], ["1"], [None], [[1]], [-1], [2**31]]
_BY_CHECK: dict[Check, list[Any]] = {
    boolean: [0, 1, "yes", "true", [], {}, 1.0],
    string: [5, True, ["a"], {"a": 1}],
    nonempty_string: [5, True, ["a"], {"a": 1}, ""],
    strings: _NO_STRINGS,
    field_checks.choice: [*_NO_STRINGS, [], "yes"],
    field_checks.bad_words: [5, "a", {"a": 1}, [5], [True], [[]], [""], [["a"]], [[-1]], [[2**31]], ["a", None]],
    ids: _NO_IDS,
    nonempty_ids: [*_NO_IDS, []],
    mapping: [5, True, [], [1]],
    string_or_mapping: [5, True, [], "", [{}]],
    field_checks.logit_bias: [
        5, "1=2", [1], [[1]], {"a": 1}, {"1": 101}, {"1": -101}, {"1": True}, {"1": "2"}, {"-1": 1},
        {"1.5": 1}, {"٣": 1}, {"99999999999": 1}, {"4294967296": 1}, {"1": 1, "01": 2},
    ],
    hidden_states: [
        5, 1, "all", [], {"layers": "all"}, {"layers": [True]}, {"layers": []}, {"layers": [-2]}, {"layers": [1, 1]},
        {"tokens": "some"}, {"pool": "max"}, {"where": 1}, {"layers": 5}, {"tokens": ["all"]},
    ],
    field_checks.response_format: [
        "json", [], {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_object", "schema": {"type": "object"}},
        {"type": "text", "json_schema": {}}, {"type": "json_schema", "json_schema": {"name": "x", "type": "integer"}},
    ],
    field_checks.structured_outputs: [
        5, "json", [], {}, {"xml": "a"}, {"json": {"type": "integer"}, "regex": "a"}, {"json": 5}, {"regex": ""},
        {"choice": "a"}, {"json_object": "yes"}, {"regex": "a", "whitespace_pattern": " "}, {"json_object": False},
    ],
    field_checks.boolean_or_count: [-1, "all", 1.5, [], {}, 2**21],
    field_checks.python_type: [5, True, "list", "", "Int", ["int"], {"a": 1}],
    field_checks.stream_options: [5, "all", [], {"include_usage": 1}, {"usage": True}, {"include_usage": "true"}],
}  # fmt: skip


def wrong_values(field: Field) -> list[Any]:
    """Values that the field's check refuses, of every other type and just outside its range.

    Raises:
        KeyError: the check is new; add its wrong values to `_BY_CHECK`.
    """
    check = field.check
    if isinstance(check, Integer):
        far = [True, 1.5, 2.0**60, "8", [1], {"a": 1}, 2**63, -(2**63) - 1, 10**400, 10**5000]
        return [*far, check.low - 1, check.high + 1]
    if isinstance(check, Number):
        ends = [check.low if check.low_open else check.low - 0.01, check.high + 0.01]
        return [True, "hot", "0.5", [0.5], {"a": 1}, math.nan, math.inf, -math.inf, 10**400, *ends]
    return _BY_CHECK[check]


def wrong_texts(field: Field) -> list[str]:
    """Texts that the field's option refuses; none for a text or pattern that only a run can judge."""
    check = field.check
    if isinstance(check, Integer):
        return ["", "x", "1.5", "true", "1e3", str(check.low - 1), str(check.high + 1), "9" * 400]
    if isinstance(check, Number):
        return ["", "x", "nan", "inf", "-inf", "1e999", "true", *[str(end) for end in wrong_values(field)[-2:]]]
    if check is boolean:
        return ["", "2", "truth", "on off"]
    if check in (ids, nonempty_ids):
        return ["", "x", "1,", "-1", "1;2", "1.5", str(2**31)]
    if check in (mapping, string_or_mapping):
        return ["", "x", "[1]", "5", "{", "@no such file"]
    if check is field_checks.logit_bias:
        return ["", "13", "a=1", "13=much", "13=101", "13=1,013=2", "-1=1", "4294967296=1"]
    if check is hidden_states:
        return ["", "first", "{", '{"layer": 1}', '{"layers": [-2]}', '{"tokens": "some"}']
    assert check in _BY_CHECK
    return [""]
