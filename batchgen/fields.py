"""The vocabulary of a row: every field batchgen knows, where it may stand, what values it takes, and whether this
version does what it asks.

A field that is not built yet is refused by name (`unsupported_field`) unless its value asks for nothing, such as
`echo: false`. Its value is checked first either way, so a wrong value is `invalid_field` today as it will be later.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchgen import checks
from batchgen import field_checks as special
from batchgen.checks import Check, boolean, floating, integer, mapping, string, strings
from batchgen.errors import ErrorCode, RowError
from batchgen.messages import messages, template_kwargs, tools
from batchgen.printable import printable

__all__ = ["CONSTRAINTS", "FIELDS", "LOOKUP", "SOURCES", "Field", "Place", "unknown_field"]

Place = Literal["row", "params", "completions", "chat"]
"""Flat on a native row, in its `sampling_params`, or in the body of an OpenAI batch line of either endpoint."""

_EVERYWHERE: tuple[Place, ...] = ("row", "params", "completions", "chat")
_ROW: tuple[Place, ...] = ("row",)
_CHAT: tuple[Place, ...] = ("row", "chat")
_BODY: tuple[Place, ...] = ("completions", "chat")

Neutral = Callable[[Any, Mapping[str, Any]], bool]
"""(value, all values of the row by canonical name) -> whether the value asks for nothing."""


def _never(value: Any, given: Mapping[str, Any]) -> bool:
    return False


def _when(*neutral: Any) -> Neutral:
    return lambda value, given: value in neutral


def _when_empty(value: Any, given: Mapping[str, Any]) -> bool:
    return not value


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the vocabulary."""

    name: str
    check: Check
    """(name as spelled, value) -> normalised value; raises `invalid_field`."""
    places: tuple[Place, ...] = _EVERYWHERE
    aliases: tuple[str, ...] = ()
    built: bool = True
    neutral: Neutral = _never
    """For fields not built: whether a value asks for nothing and can be accepted."""
    carried: bool = False
    """The field says nothing about generation and is carried to the output."""
    remedy: str = "remove it"
    """What to do instead, for fields not built."""


def _later(
    name: str, check: Check, places: tuple[Place, ...] = _EVERYWHERE, *, neutral: Neutral = _never, remedy: str = ""
) -> Field:
    return Field(name, check, places, built=False, neutral=neutral, remedy=remedy or "remove it")


_PROMPTS = (
    Field("id", special.row_id, _ROW, aliases=("rid", "custom_id")),
    Field("text", special.texts, _ROW, aliases=("prompt",)),
    Field("input_ids", checks.lists_of_ids, _ROW),
    Field("input_embeds", special.embeddings, _ROW),
    Field("prompt", special.prompts, ("completions",)),
    Field("messages", messages, _CHAT),
    Field("tools", tools, _CHAT),
    Field("chat_template_kwargs", template_kwargs, _CHAT),
    Field("add_generation_prompt", boolean, _CHAT),
    Field("continue_final_message", boolean, _CHAT),
    Field("completion", special.completion, _ROW),
    Field("completions", special.completions, _ROW),
    _later("image_data", special.media, _ROW, neutral=_when_empty),
    _later("audio_data", special.media, _ROW, neutral=_when_empty),
    Field("model", string, ("row", "completions", "chat")),
)

_SAMPLING = (
    Field("max_new_tokens", integer(0), aliases=("max_tokens", "max_completion_tokens")),
    Field("min_new_tokens", integer(0), aliases=("min_tokens",)),
    Field("stop", strings),
    Field("stop_token_ids", checks.ids),
    Field("stop_regex", strings),
    Field("ignore_eos", boolean),
    Field("no_stop_trim", boolean),
    Field("temperature", floating(0.0), ("row", "params")),
    Field("temperature", floating(0.0, 2.0), _BODY),
    Field("top_p", floating(0.0, 1.0, low_open=True)),
    Field("top_k", integer(-1)),
    Field("min_p", floating(0.0, 1.0)),
    Field("seed", integer()),
    Field("n", integer(1)),
    Field("best_of", integer(1)),
    Field("frequency_penalty", floating(-2.0, 2.0)),
    Field("presence_penalty", floating(-2.0, 2.0)),
    Field("repetition_penalty", floating(0.0, 2.0, low_open=True)),
    Field("logit_bias", special.logit_bias),
    Field("bad_words", special.bad_words),
    Field("allowed_token_ids", special.some_ids),
    Field("json_schema", checks.string_or_mapping),
    Field("regex", special.some_string),
    Field("ebnf", special.some_string),
    Field("structural_tag", checks.string_or_mapping),
    Field("choice", special.choice),
    Field("response_format", special.response_format),
    Field("skip_special_tokens", boolean),
    Field("spaces_between_special_tokens", boolean),
    Field("echo", boolean),
    Field("suffix", string),
    Field("return_logprob", boolean),
    Field("logprob_start_len", integer(-1)),
    Field("top_logprobs_num", integer(0, 1 << 20)),
    Field("logprobs", special.boolean_or_count, ("row", "params")),
    Field("logprobs", integer(0, 1 << 20), ("completions",)),
    Field("logprobs", boolean, ("chat",)),
    Field("top_logprobs", integer(0, 1 << 20), ("row", "params", "chat")),
    Field("token_ids_logprob", checks.ids),
    Field("return_text_in_logprobs", boolean),
    Field("return_hidden_states", special.hidden_states),
    Field("return_routed_experts", boolean),
    Field("lora_path", special.some_string),
    Field("custom_logit_processor", special.some_string),
    Field("custom_params", mapping),
    Field("stream", boolean),
)

# Fields of the two endpoints that mean nothing outside them. The first six describe the caller, not the work.
_OPENAI = (
    Field("user", string, _BODY, carried=True),
    Field("metadata", mapping, _BODY, carried=True),
    Field("safety_identifier", string, _BODY, carried=True),
    Field("prompt_cache_key", string, _BODY, carried=True),
    Field("prompt_cache_retention", string, _BODY, carried=True),
    Field("prompt_cache_options", mapping, _BODY, carried=True),
    _later("store", boolean, _BODY, neutral=_when(False)),
    _later("service_tier", string, _BODY, neutral=_when("auto", "default")),
    _later("stream_options", mapping, _BODY, neutral=_when_empty),
    _later("parallel_tool_calls", boolean, ("chat",), neutral=_when(True)),
    _later(
        "tool_choice",
        checks.string_or_mapping,
        ("chat",),
        neutral=lambda value, given: value == "auto" or (value == "none" and not given.get("tools")),
        remedy="leave it at auto, or leave `tools` out",
    ),
    _later("functions", special.media, ("chat",), neutral=_when_empty, remedy="use `tools`"),
    _later("function_call", checks.string_or_mapping, ("chat",), neutral=_when("none"), remedy="use `tools`"),
    _later("modalities", strings, ("chat",), neutral=_when(("text",))),
    _later("audio", mapping, ("chat",)),
    _later("prediction", mapping, ("chat",)),
    _later(
        "reasoning_effort",
        special.some_string,
        ("chat",),
        remedy="give it in `chat_template_kwargs` if the model's template reads it",
    ),
    _later("verbosity", special.some_string, ("chat",), neutral=_when("medium")),
    _later("web_search_options", mapping, ("chat",)),
    _later("moderation", mapping, ("chat",)),
)

FIELDS: tuple[Field, ...] = (*_PROMPTS, *_SAMPLING, *_OPENAI)
"""The whole vocabulary. A name stands twice where its values differ by place."""

SOURCES = ("text", "input_ids", "input_embeds", "messages", "prompt")
"""Canonical names of the prompt sources; a row has exactly one."""

CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag", "choice", "response_format")
"""Canonical names of the constraints; a row has at most one."""


def _spellings(place: Place) -> dict[str, Field]:
    return {spelling: field for field in FIELDS if place in field.places for spelling in (field.name, *field.aliases)}


LOOKUP: dict[Place, dict[str, Field]] = {
    "row": _spellings("row"),
    "params": _spellings("params"),
    "completions": _spellings("completions"),
    "chat": _spellings("chat"),
}
"""Fields by place and spelling."""

_WHERE: dict[Place, str] = {
    "row": "a row",
    "params": "`sampling_params`",
    "completions": "a /v1/completions body",
    "chat": "a /v1/chat/completions body",
}


def unknown_field(key: str, place: Place, further: Iterable[str] = ()) -> RowError:
    """The error for a key that `place` does not have, with the nearest known name."""
    message = f"`{printable(key[:80])[:80]}` is not a field of {_WHERE[place]}"
    close = difflib.get_close_matches(key[:80], [*LOOKUP[place], *further], n=1)
    if close:
        message += f"; did you mean `{close[0]}`?"
    elif key in LOOKUP["row"] and place == "params":
        message += "; it stands on the row itself"
    else:
        message += "; remove it or correct its name"
    return RowError(ErrorCode.UNKNOWN_FIELD, message, key)
