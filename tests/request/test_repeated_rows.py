"""What the parser reuses for later rows with the same keys and options changes nothing."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from batchgen.errors import RowError
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults
from tests.rows import CHAT, HELLO, line, text

DEFAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "chat": {"chat": True},
    "no chat": {"chat": False},
    "system": {"system": "Be brief."},
    "flags": {"flags": {"temperature": 0.5, "max_new_tokens": 9, "seed": 7}, "model": {"top_k": 5}},
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
    {"echo": True, "logprobs": 1}, {"stop_token_ids": [1]}, {"stop_token_ids": [True]}, {"stop_token_ids": [1.0]},
    {"max_tokens": 1}, {"max_tokens": True}, {"max_tokens": 1.0}, {"echo": 1}, {"temperature": True},
    {"temperature": 1},
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
        url = rng.choice([CHAT] * 4 + ["/v1/completions"] * 2 + ["/x"])
        row = {"method": "POST", "url": url, "body": row}
    if place in ("nested", "both"):
        row["sampling_params"] = rng.choice([options] * 9 + [None, "a"])
    for _ in range(rng.randint(0, 2)):
        row |= rng.choice(OTHER_FIELDS)
    items = list(row.items())
    rng.shuffle(items)
    return dict(items)


def outcome(value: Any, defaults: RowDefaults) -> Any:
    try:
        row = parse_row(value, 7, defaults)
    except RowError as error:
        return error.info
    return row, list(row.extra.items()), repr(row.params)


@pytest.mark.parametrize("name", DEFAULTS)
def test_random_rows_are_parsed_like_by_a_new_run(name: str) -> None:
    rng, warm = Random(name), RowDefaults(**DEFAULTS[name])
    rows = 0
    for _ in range(1000):
        value = random_row(rng)
        expected = outcome(value, RowDefaults(**DEFAULTS[name]))
        # Twice, because its options may be cached the second time even if the row is wrong.
        assert outcome(value, warm) == expected, value
        assert outcome(value, warm) == expected, value
        rows += type(expected) is tuple
    assert rows > 100, "too few rows are valid"


@pytest.mark.field("seed")
def test_rows_with_equal_options_share_their_parameters() -> None:
    """Also with other seeds, in another place, and with other keys."""
    defaults = RowDefaults()
    asked = {"max_new_tokens": 64, "temperature": 0, "stop": ["a", "b"]}
    rows = [text(**asked), text(sampling_params=asked), text(**{**asked, "temperature": 0.0}), line(**asked)]
    rows += [text(**asked, seed=i, label=i, id=str(i)) for i in range(9)]
    parsed = [parse_row(row, index, defaults) for index, row in enumerate(rows)]
    assert len({id(row.params) for row in parsed}) == 1
    assert [row.seed for row in parsed] == [None] * 4 + list(range(9))
    assert [row.id for row in parsed[4:]] == [str(i) for i in range(9)]
    assert parse_row(text(**{**asked, "temperature": 1}), 0, defaults).params is not parsed[0].params


def test_more_layouts_and_parameter_sets_than_are_cached() -> None:
    defaults = RowDefaults()
    for _ in range(2):
        for size in range(600):
            row = parse_row({"text": "a", f"field{size}": 1, "max_new_tokens": size}, 0, defaults)
            assert (row.params.max_new_tokens, row.extra) == (size, {f"field{size}": 1})
    long = {"text": "a", "long" * 300: 1, "regex": "a" * 1000}
    for _ in range(2):
        assert parse_row(long, 0, defaults) == parse_row(long, 0, RowDefaults())
    for schema in ({"a": [True]}, {"a": [1]}, {"a": [1.0]}):
        found = parse_row(text(json_schema=schema), 0, defaults).params.json_schema
        assert found == str(schema).replace("'", '"').replace(" ", "").replace("True", "true")


MANY: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "keys": (lambda i: text(**{f"field{i}": 1}), 220_000),
    "long keys": (lambda i: text(**{"long" * 300 + str(i): 1}), 8_000),
    "long keys with other parameters": (lambda i: text(**{"long" * 300 + str(i): 1}, max_new_tokens=i), 120_000),
    "parameters": (lambda i: text(sampling_params={"max_new_tokens": i}), 110_000),
    "seeds": (lambda i: text(sampling_params={"seed": i}), 8_000),
}
"""Rows that all differ, and the most bytes that may be kept of them: a few hundred sets of keys and of parameters."""
LONGER = ["long keys", "long keys with other parameters", "parameters"]


@pytest.mark.parametrize("kind", ["keys", "seeds", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LONGER)])
def test_memory_for_rows_that_all_differ_is_bounded(kind: str) -> None:
    row, most = MANY[kind]
    defaults, kept = RowDefaults(), 0
    parse_row(row(0), 0, defaults)
    gc.collect()
    gc.freeze()  # so that collecting takes no time for what was there
    tracemalloc.start()
    try:
        for number in range(1, 2501):
            parse_row(row(number), 0, defaults)
            if number % 50 == 0 and number > 2000:
                gc.collect()
                kept = max(kept, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert kept < most
