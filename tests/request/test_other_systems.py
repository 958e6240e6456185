"""The table of other systems' names says what the parser really does with each of them."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.run_config import OPTIONS
from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields import other_systems
from batchgen.request.fields.declared import LOOKUP
from batchgen.request.fields.field import Place
from batchgen.request.fields.other_systems import ANSWERS, NAMES, ORDINARY, snake_case
from batchgen.request.rows.unknown_keys import carried_hint
from batchgen.request.rows.values import RowDefaults
from tests.cases import each
from tests.rows import CHAT, COMPLETIONS, line, parse, text

EVERY_NAME = sorted({name for names in NAMES.values() for name in names})
ROWS: dict[Place, Any] = {
    "params": lambda name, value: text(sampling_params={name: value}),
    "completions": lambda name, value: line(COMPLETIONS, **{name: value}),
    "chat": lambda name, value: line(CHAT, **{name: value}),
}
IN_BACKTICKS = re.compile(r"`([^`]+)`")
OPTION = re.compile(r"--[a-z-]+")
FLAGS = {option.flag for option in OPTIONS}


@each("system", NAMES)
def test_every_name_is_a_field_or_has_an_answer(system: str) -> None:
    fields = {name for place in LOOKUP.values() for name in place}
    known = {*ANSWERS, *LOOKUP["row"], "sampling_params"}
    assert [name for name in NAMES[system] if name not in fields and snake_case(name) not in known] == []


def test_a_name_has_one_answer() -> None:
    data = tomllib.loads(Path(other_systems.__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    names = [
        name for verdict in ("use", "refuse", "idle") for words in data[verdict].values() for name in words.split()
    ]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
    assert [name for name in names if name != snake_case(name)] == []


@each("place", ROWS)
@each("name", EVERY_NAME)
def test_a_name_is_read_as_a_field_or_refused_with_what_to_write_instead(name: str, place: Place) -> None:
    """A value that few fields accept tells the two apart: a field refuses it by its own check, if at all."""
    if name in LOOKUP[place]:
        with suppress(RowError):
            parse(ROWS[place](name, object()))
            return
    with pytest.raises(RowError) as caught:
        parse(ROWS[place](name, object()))
    info = caught.value.info
    assert info.param == name
    if name in LOOKUP[place]:
        assert info.code != ErrorCode.UNKNOWN_FIELD
        return
    if name in ("prompt", "messages") and place in ("completions", "chat"):
        assert info.code == ErrorCode.MISSING_PROMPT  # the prompt of the other endpoint
        return
    assert info.code == ErrorCode.UNKNOWN_FIELD
    written = snake_case(name)
    if written in LOOKUP[place]:
        assert f"did you mean `{written}`?" in info.message
    elif written in ANSWERS:
        assert info.message.endswith(ANSWERS[written].advice)
    else:
        assert "it is a field of" in info.message


@each("name", sorted({answer.text: name for name, answer in ANSWERS.items()}.values()))
def test_an_answer_names_fields_and_options_that_exist(name: str) -> None:
    """A field with a value, such as `temperature: 0`, is accepted as it is written."""
    answer = ANSWERS[name].text
    pairs = [quoted.partition(": ") for quoted in IN_BACKTICKS.findall(answer)]
    assert {field for field, _, _ in pairs} <= {*LOOKUP["row"], "sampling_params"}
    parse(text(**{field: json.loads(value) for field, colon, value in pairs if colon}), RowDefaults(events=True))
    assert set(OPTION.findall(answer)) <= FLAGS | {"--resume"}
    assert ANSWERS[name].verdict != "use" or IN_BACKTICKS.search(answer) or OPTION.search(answer)


@each("name", sorted({*EVERY_NAME} - {"sampling_params"}))
def test_a_name_at_the_top_of_a_row_is_named_unless_it_means_nothing_for_the_text(name: str) -> None:
    hint = None if name in LOOKUP["row"] else carried_hint(name)
    answer = ANSWERS.get(snake_case(name))
    if name in LOOKUP["row"] or snake_case(name) in ORDINARY:
        assert hint is None
    elif snake_case(name) in LOOKUP["row"]:
        assert hint == f"did you mean `{snake_case(name)}`?"
    else:
        assert answer is not None
        assert hint is None if answer.verdict == "idle" else str(hint).endswith(answer.advice)


CONVERTED: list[tuple[str, Any, dict[str, Any]]] = [
    ("until", ["\n"], {"stop": ["\n"]}),
    ("max_gen_toks", 5, {"max_new_tokens": 5}),
    ("n_predict", 5, {"max_new_tokens": 5}),
    ("maxOutputTokens", 5, {"max_new_tokens": 5}),
    ("stopSequences", ["a"], {"stop": ["a"]}),
    ("do_sample", False, {"temperature": 0}),
    ("include_stop_str_in_output", True, {"no_stop_trim": True}),
    ("prompt_logprobs", 1, {"return_logprob": True, "logprob_start_len": 0}),
    ("logprob_token_ids", [5], {"return_logprob": True, "token_ids_logprob": [5]}),
    ("num_return_sequences", 2, {"n": 2}),
    ("sampling_seed", 3, {"seed": 3}),
    ("repeat_penalty", 1.5, {"repetition_penalty": 1.5}),
    ("return_full_text", True, {"echo": True}),
]


@pytest.mark.parametrize(
    ("name", "value", "converted"), CONVERTED, ids=lambda value: value if type(value) is str else ""
)
def test_the_refusal_of_a_name_names_the_fields_to_write(name: str, value: Any, converted: dict[str, Any]) -> None:
    with pytest.raises(RowError) as caught:
        parse(text(sampling_params={name: value}))
    assert all(f"`{field}" in caught.value.info.message for field in converted)
    parse(text(sampling_params=converted))
