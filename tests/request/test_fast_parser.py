"""The fast parser returns the same as the full parser."""

from __future__ import annotations

from itertools import permutations, product
from random import Random
from typing import Any

import pytest

from batchgen.errors import RowError
from batchgen.request import fast_parser as fast_parser
from batchgen.request import parser as full_parser
from batchgen.request.parser import RowDefaults, parse_row
from batchgen.request.row_values import PARAM_FIELDS
from tests.request.test_hostile_rows import HOSTILE
from tests.rows import CHAT, HELLO, line, text

DEFAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "chat": {"chat": True},
    "no chat": {"chat": False},
    "system": {"system": "Be brief."},
    "flags": {"flags": {"temperature": 0.5, "max_new_tokens": 9}, "model": {"top_k": 5}},
}
PROMPTS: list[dict[str, Any]] = [
    {"text": "a"}, {"prompt": "é"}, {"text": ""}, {"text": "\ud800"}, {"text": ["a", "b"]}, {"text": None},
    {"messages": HELLO}, {"messages": []}, {"messages": [{"role": "user", "content": "\udc00"}]},
    {"messages": [{"role": "user"}]}, {"messages": "a"}, {"input_ids": [1]}, {"text": "a", "messages": HELLO}, {},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Ann"}]},
    {"prompt": "a", "text": None}, {"text": 5},
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.0}, {"temperature": False}, {"temperature": 1.5}, {"temperature": 3},
    {"max_tokens": 4}, {"max_new_tokens": 4}, {"max_new_tokens": 4, "max_tokens": 4}, {"max_tokens": None},
    {"logprobs": True}, {"logprobs": 1}, {"top_logprobs": 2, "logprobs": True}, {"stop": ["a"]}, {"stop": "a"},
    {"seed": 3}, {"seed": None}, {"top_k": -1}, {"top_p": 0.0}, {"n": 2, "best_of": 1}, {"model": "*"},
    {"model": "other"}, {"lora_path": "x"}, {"echo": True}, {"logit_bias": {"1": 2}}, {"regex": "a\ud800"},
    {"image_data": []}, {"tools": []}, {"add_generation_prompt": False}, {"user": "u"}, {"store": False},
    {"unknown": 1}, {"stream": True}, {"completion": "a"}, {"response_format": {"type": "text"}},
]  # fmt: skip
OTHER_FIELDS: list[dict[str, Any]] = [
    {"id": "a"}, {"rid": "é"}, {"custom_id": "b"}, {"id": None}, {"id": 5}, {"id": "\ud800"}, {"id": "a", "rid": "b"},
    {"label": 1}, {"label": None}, {"label": {"a": ["\ud800"]}}, {"é": 1}, {"\ud800": 1}, {"task": "é", "x": 0.5},
    {"method": "POST"}, {"url": "/v1/completions"}, {"body": {}}, {"body": 5},
]  # fmt: skip


def random_row(rng: Random) -> dict[str, Any]:
    """A random row of mostly common fields, with keys in random order."""
    row: dict[str, Any] = dict(rng.choice([*PROMPTS[: rng.choice([2, len(PROMPTS)])], {"messages": HELLO}]))
    options: dict[str, Any] = {}
    for _ in range(rng.randint(0, 2)):
        options |= rng.choice(OPTIONS)
    place = rng.choice(["flat", "nested", "body", "both"])
    if place in ("flat", "both", "body"):
        row |= options
    if place == "body":
        row = {
            "method": "POST",
            "url": rng.choice(["/v1/chat/completions"] * 5 + ["/v1/completions", "/x"]),
            "body": row,
        }
    if place in ("nested", "both"):
        row["sampling_params"] = rng.choice([options] * 9 + [None, "a"])
    for _ in range(rng.randint(0, 2)):
        row |= rng.choice(OTHER_FIELDS)
    items = list(row.items())
    rng.shuffle(items)
    return dict(items)


def outcome(parse: Any, value: Any, defaults: RowDefaults) -> Any:
    try:
        row = parse(value, 7, defaults)
    except RowError as error:
        return error.info
    return row, list(row.extra.items()), repr(row.params)


@pytest.mark.parametrize("name", DEFAULTS)
def test_random_rows_are_parsed_like_by_the_full_parser(name: str) -> None:
    rng, warm = Random(name), RowDefaults(**DEFAULTS[name])
    parsed_fast = 0
    for _ in range(4000):
        value = random_row(rng)
        expected = outcome(full_parser._parse_fully, value, RowDefaults(**DEFAULTS[name]))
        # Twice, because its options may be cached the second time even if the row is wrong.
        assert outcome(parse_row, value, warm) == expected, value
        assert outcome(parse_row, value, warm) == expected, value
        result = fast_parser.parse_fast(value, 7, warm)
        parsed_fast += result is not None and result.row is not None
    assert parsed_fast > 150, "too few rows were parsed by the fast parser"


def test_cached_parameters_are_not_reused_for_other_formats() -> None:
    """Options valid for text may be invalid for messages, and options of a row may be invalid in a body."""
    known = 0
    for name, value in product(sorted(PARAM_FIELDS), (True, False, 0, 1, 2, 0.5, -1, "a", "json", None)):
        option = {name: value}
        rows = [text(**option), {"messages": HELLO, **option}, {"text": "a", "sampling_params": option}]
        rows += [{"messages": HELLO, "sampling_params": option}, line(CHAT, messages=HELLO, **option)]
        expected = [outcome(full_parser._parse_fully, row, RowDefaults()) for row in rows]
        for first, second in permutations(range(len(rows)), 2):
            defaults = RowDefaults()
            for number in (first, second):
                assert outcome(parse_row, rows[number], defaults) == expected[number], (rows[first], rows[second])
            result = fast_parser.parse_fast(rows[second], 7, defaults)
            known += result is not None and result.row is not None
    assert known > 300


@pytest.mark.parametrize("number", [i for i, case in enumerate(HOSTILE) if isinstance(case[0], dict)])
def test_hostile_rows_are_parsed_like_by_the_full_parser(number: int) -> None:
    value, defaults = HOSTILE[number][0], RowDefaults()
    for other in (text(), {"messages": HELLO}, line(CHAT)):
        parse_row(other, 0, defaults)
    for _ in range(2):
        assert outcome(parse_row, value, defaults) == outcome(full_parser._parse_fully, value, RowDefaults())


def test_common_rows_share_parameters_and_are_parsed_fully_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fully_parsed, defaults = [], RowDefaults()
    parse_fully = full_parser._parse_fully
    monkeypatch.setattr(full_parser, "_parse_fully", lambda *given: fully_parsed.append(given) or parse_fully(*given))
    values = [{"id": str(i), "messages": HELLO, "sampling_params": {"temperature": 0}, "x": i} for i in range(9)]
    bodies = [{**line(CHAT), "custom_id": str(i)} for i in range(9)]
    for rows in (values, bodies):
        parsed = [parse_row(value, index, defaults) for index, value in enumerate(rows)]
        assert len({id(row.params) for row in parsed}) == 1
        assert [row.id for row in parsed] == [str(i) for i in range(9)]
    assert len(fully_parsed) == 2


def test_caches_are_bounded() -> None:
    defaults = RowDefaults()
    for number in range(2000):
        parse_row({"text": "a", f"{'long' * 300}{number}": 1, "sampling_params": {"seed": number}}, 0, defaults)
        parse_row({"text": "a", f"field{number}": 1, "sampling_params": {"max_new_tokens": number}}, 0, defaults)
    assert len(fast_parser._layouts) <= 256
    assert all(sum(map(len, names)) <= 512 for _, names in fast_parser._layouts)
    assert len(defaults._params_cache) <= 258
    assert not any(params.seed is not None for params in defaults._params_cache.values())
