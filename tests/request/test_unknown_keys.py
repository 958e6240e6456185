"""Unknown keys at the top level of a row: misspelt fields and foreign options are counted, ordinary columns are not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from batchgen.data.schema import SCHEMA
from batchgen.errors import RowError
from batchgen.request.fields.declared import LOOKUP
from batchgen.request.fields.other_systems import words
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.unknown_keys import (
    MAX_CARRIED_OPTIONS,
    CarriedOptions,
    carried_hint,
    carried_notes,
    note_line,
)
from batchgen.request.rows.values import RowDefaults
from tests.cases import each
from tests.rows import CHAT, line, parse, text

MISSPELT = {
    "max_new_token": "max_new_tokens",
    "max_new_tokns": "max_new_tokens",
    "temprature": "temperature",
    "tempreature": "temperature",
    "Temperature": "temperature",
    "maxTokens": "max_tokens",
    "max-tokens": "max_tokens",
    "topP": "top_p",
    "stopp": "stop",
    "stops": "stop",
    "ignore_eso": "ignore_eos",
    "repitition_penalty": "repetition_penalty",
    "reponse_format": "response_format",
    "sampling_param": "sampling_params",
    "samplingParams": "sampling_params",
    "lora_pth": "lora_path",
    "guided_jsons": "guided_json",
}


@each("key", MISSPELT)
def test_a_misspelt_field_is_named(key: str) -> None:
    assert carried_hint(key) == f"did you mean `{MISSPELT[key]}`?"


OF_OTHERS = {
    "do_samples": "`do_sample`, an option of Hugging Face and TGI: use `temperature: 0`",
    "doSamples": "`do_sample`, an option of",
    "num_beam": "`num_beams`, an option of",
    "length_penalties": "`length_penalty`, an option of",
    "repeat_penaltys": "`repeat_penalty`, an option of llama.cpp and Ollama: use `repetition_penalty`",
}


@pytest.mark.parametrize("key", OF_OTHERS)
def test_a_misspelt_option_of_another_system_is_named(key: str) -> None:
    hint = f"did you mean {OF_OTHERS[key]}"
    assert (carried_hint(key) or "").startswith(hint)
    with pytest.raises(RowError, match=re.escape(hint)):
        parse(text(sampling_params={key: 1}))


OLD_NAMES = words("penalize_nl penalize_newline mirostat_mode stopping_strings rep_pen banned_tokens runtime_top_k")


@pytest.mark.parametrize("key", OLD_NAMES)
def test_names_of_earlier_or_smaller_systems_are_named(key: str) -> None:
    assert (carried_hint(key) or "").startswith("an option of ")


ORDINARY = words(
    """idx ids index label labels answer answers source score scores split subset category language lang title topic
    question reference references output target context content name date author url tags type status level
    difficulty choices completed tokens num_tokens n_tokens token_ids message user metadata meta query passage
    documents image format system_id model_name prompt_id text_id N n_shots stopwords seed_id top mode
    stop_id rep_id sample_ids num_turns no_answer user_prompt output_text model_size
    store task prefix rationale chosen rejected year price weight step steps batch worker ID Id Text Prompt"""
)


@each("key", [*ORDINARY, "x" * 10_000, "", "\x1b[31m", "ключ", "😀" * 6])
def test_an_ordinary_column_is_not(key: str) -> None:
    assert carried_hint(key) is None


def test_columns_of_an_earlier_output_are_not() -> None:
    """Results are often the input of the next job."""
    assert [name for name in SCHEMA.names if name not in LOOKUP["row"] and carried_hint(name)] == []


def counted(*rows: Any, options: CarriedOptions | None = None) -> dict[str, int]:
    options = options or CarriedOptions()
    defaults = RowDefaults(carried_options=options)
    for row in rows:
        parse(row, defaults)
    return options.rows


def test_rows_are_counted_by_key() -> None:
    rows = [text(temprature=1), text(temprature=2, until="a", idx=3), text(until=["b"]), text(temprature=None)]
    assert counted(*rows) == {"temprature": 2, "until": 2}


CONTAINERS: list[tuple[dict[str, Any], bool]] = [
    ({"generation_kwargs": {"max_new_tokens": 2}}, True),
    ({"generation_kwargs": {"stop": "a"}}, True),
    ({"generationConfig": {"topP": 1}}, True),
    ({"parameters": {"do_sample": True}}, True),
    ({"options": {"num_predict": 3}}, True),
    ({"extra_body": {"prompt_logprobs": 1}}, True),
    ({"config": {"temperature": 0}}, True),
    ({"sampling_param": {"seed": 3}}, True),
    ({"options": ["Paris", "Rome"]}, False),
    ({"options": {"A": "Paris", "B": "Rome"}}, False),
    ({"arguments": {"n": 5, "k": 2, "query": "a"}}, False),
    ({"parameters": "none"}, False),
    ({"generation_config": {}}, False),
    ({"meta": {"temperature": 0.7}}, False),
]


@pytest.mark.parametrize(("keys", "is_counted"), CONTAINERS)
def test_an_object_counts_if_it_holds_options(keys: dict[str, Any], is_counted: bool) -> None:
    assert list(counted(text(**keys))) == (list(keys) if is_counted else [])


@pytest.mark.parametrize("row", [text(), line(CHAT)], ids=["native", "batch line"])
def test_media_that_another_column_takes_the_place_of_are_counted(row: dict[str, Any]) -> None:
    options = CarriedOptions()
    displaced = {"image_data": "data:image/png;base64,aGk=", "text": "Why?"}
    parse_row(row, 0, RowDefaults(carried_options=options), displaced)
    assert options.rows == {"image_data": 1}


def test_keys_next_to_a_body_are_counted_too() -> None:
    assert counted({**line(CHAT), "prompt_logprobs": 1, "idx": 3}) == {"prompt_logprobs": 1}


def test_a_row_with_an_error_is_not_counted() -> None:
    options = CarriedOptions()
    with pytest.raises(RowError):
        counted({"question": "a", "temprature": 0}, options=options)
    assert options.rows == {}


def test_a_key_that_is_carried_on_purpose_is_not_counted() -> None:
    assert counted(text(temprature=1, until="a"), options=CarriedOptions(["until"])) == {"temprature": 1}


def test_strictly_such_a_key_is_an_error() -> None:
    strict = RowDefaults(carried_options=CarriedOptions(["until"], strict=True))
    parse(text(idx=1, until=3, temprature=None), strict)
    for row in (text(temprature=1), {**line(CHAT), "temprature": 1}):
        with pytest.raises(RowError, match=r"did you mean `temperature`\? \(--carry temprature ") as caught:
            parse(row, strict)
        assert (caught.value.info.code, caught.value.info.param) == ("unknown_field", "temprature")
    with pytest.raises(RowError, match="an option of Hugging Face and lm-eval: use `max_new_tokens`"):
        parse(text(max_length=3), strict)


def test_the_number_of_counted_keys_is_bounded() -> None:
    rows = [text(**{f"temprature{'_' * (i % 2)}": 1, f"maxTokens{i}": 1}) for i in range(8)]
    assert set(counted(*rows)) == {"temprature", "temprature_", *(f"maxTokens{i}" for i in range(8))}
    options = CarriedOptions()
    for i in range(2 * MAX_CARRIED_OPTIONS):
        options.add([f"key{i}"], {f"key{i}": 1})
    assert len(options.rows) == MAX_CARRIED_OPTIONS


def test_notes_say_how_many_rows_and_what_happened() -> None:
    rows = {"until": 1, "temprature": 1200}
    assert list(map(note_line, carried_notes(rows, "all"))) == [
        "`temprature` in 1,200 rows: did you mean `temperature`? carried, not obeyed",
        "`until` in 1 row: an option of lm-eval: use `stop`; carried, not obeyed",
    ]
    assert carried_notes(rows, "none")[0]["hint"].endswith("left out, not obeyed")
    assert carried_notes(rows, ("idx",))[0]["hint"].endswith("left out, not obeyed")


HINTS: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": {"prompt_logprobs": 1}}, "use `return_logprob: true` with `logprob_start_len: 0`"),
    ({"sampling_params": {"temprature": 1}}, "did you mean `temperature`?"),
    ({"sampling_params": {"topK": 1}}, "did you mean `top_k`?"),
    ({"sampling_params": {"tools": []}}, "it is a field of the row itself, move it there"),
    ({"sampling_params": {"zzz": 1}}, "remove it or correct its name"),
    ({"sampling_params": {"use_beam_search": True}}, "there is no beam search; `best_of` keeps the likeliest samples"),
    ({"sampling_params": {"priority": 3}}, "it does not change a result; leave it out"),
]


@pytest.mark.parametrize(("row", "hint"), HINTS)
def test_hints_of_unknown_fields(row: dict[str, Any], hint: str) -> None:
    with pytest.raises(RowError) as caught:
        parse(text(**row))
    assert caught.value.info.message.endswith(hint)
    assert caught.value.info.code == "unknown_field"


def test_a_native_field_in_a_body() -> None:
    with pytest.raises(RowError, match="it is a field of native rows"):
        parse(line(CHAT, input_ids=[5]))
