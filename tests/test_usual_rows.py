"""The shorter way through usual rows comes out where the long way does."""

from __future__ import annotations

from itertools import permutations, product
from random import Random
from typing import Any

import pytest

from batchgen import rows as long_way
from batchgen import usual_rows
from batchgen.errors import RowError
from batchgen.row_values import DECIDING
from batchgen.rows import RowDefaults, parse_row
from tests.rows import CHAT, HELLO, line, text
from tests.test_rows_hostile import HOSTILE

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
BESIDE: list[dict[str, Any]] = [
    {"id": "a"}, {"rid": "é"}, {"custom_id": "b"}, {"id": None}, {"id": 5}, {"id": "\ud800"}, {"id": "a", "rid": "b"},
    {"label": 1}, {"label": None}, {"label": {"a": ["\ud800"]}}, {"é": 1}, {"\ud800": 1}, {"task": "é", "x": 0.5},
    {"method": "POST"}, {"url": "/v1/completions"}, {"body": {}}, {"body": 5},
]  # fmt: skip


def draw(rng: Random) -> dict[str, Any]:
    """A row of parts that are mostly usual; keys in any order."""
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
        row |= rng.choice(BESIDE)
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
def test_random_rows_are_parsed_as_by_the_long_way(name: str) -> None:
    rng, warm = Random(name), RowDefaults(**DEFAULTS[name])
    short = 0
    for _ in range(4000):
        value = draw(rng)
        expected = outcome(long_way._parse_fully, value, RowDefaults(**DEFAULTS[name]))
        # Twice: its own options are known the second time, whatever else is wrong with it.
        assert outcome(parse_row, value, warm) == expected, value
        assert outcome(parse_row, value, warm) == expected, value
        usual = usual_rows.usual_row(value, 7, warm)
        short += usual is not None and usual.row is not None
    assert short > 150, "the short way was hardly tried"


def test_options_of_one_kind_of_row_are_not_taken_over_to_another() -> None:
    """What text takes, messages may not; and what stands beside the prompt may not stand in a body."""
    known = 0
    for name, value in product(sorted(DECIDING), (True, False, 0, 1, 2, 0.5, -1, "a", "json", None)):
        option = {name: value}
        rows = [text(**option), {"messages": HELLO, **option}, {"text": "a", "sampling_params": option}]
        rows += [{"messages": HELLO, "sampling_params": option}, line(CHAT, messages=HELLO, **option)]
        expected = [outcome(long_way._parse_fully, row, RowDefaults()) for row in rows]
        for first, second in permutations(range(len(rows)), 2):
            defaults = RowDefaults()
            for number in (first, second):
                assert outcome(parse_row, rows[number], defaults) == expected[number], (rows[first], rows[second])
            usual = usual_rows.usual_row(rows[second], 7, defaults)
            known += usual is not None and usual.row is not None
    assert known > 300


@pytest.mark.parametrize("number", [i for i, case in enumerate(HOSTILE) if isinstance(case[0], dict)])
def test_no_hostile_row_takes_the_short_way(number: int) -> None:
    value, defaults = HOSTILE[number][0], RowDefaults()
    for other in (text(), {"messages": HELLO}, line(CHAT)):
        parse_row(other, 0, defaults)
    for _ in range(2):
        assert outcome(parse_row, value, defaults) == outcome(long_way._parse_fully, value, RowDefaults())


def test_usual_rows_share_parameters_and_are_parsed_fully_once(monkeypatch: pytest.MonkeyPatch) -> None:
    long, defaults = [], RowDefaults()
    fully = long_way._parse_fully
    monkeypatch.setattr(long_way, "_parse_fully", lambda *given: long.append(given) or fully(*given))
    values = [{"id": str(i), "messages": HELLO, "sampling_params": {"temperature": 0}, "x": i} for i in range(9)]
    bodies = [{**line(CHAT), "custom_id": str(i)} for i in range(9)]
    for rows in (values, bodies):
        parsed = [parse_row(value, index, defaults) for index, value in enumerate(rows)]
        assert len({id(row.params) for row in parsed}) == 1
        assert [row.id for row in parsed] == [str(i) for i in range(9)]
    assert len(long) == 2


def test_what_is_kept_of_rows_is_bounded() -> None:
    defaults = RowDefaults()
    for number in range(2000):
        parse_row({"text": "a", f"{'long' * 300}{number}": 1, "sampling_params": {"seed": number}}, 0, defaults)
        parse_row({"text": "a", f"field{number}": 1, "sampling_params": {"max_new_tokens": number}}, 0, defaults)
    assert len(usual_rows._shapes) <= 256
    assert all(sum(map(len, names)) <= 512 for _, names in usual_rows._shapes)
    assert len(defaults._known) <= 258
    assert not any(params.seed is not None for params in defaults._known.values())
