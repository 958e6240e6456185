"""Table of all row fields: name, aliases, value check, allowed places, and whether this version supports the field.

An unsupported field is refused by name (`unsupported_field`) unless its value requests nothing, such as `store: false`.
Its value is checked first, so a wrong value is always `invalid_field`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchgen.errors import ErrorCode, RowError
from batchgen.request import checks, field_checks
from batchgen.request.chat_checks import messages, template_kwargs, tools
from batchgen.request.checks import Check, boolean, floating, integer, mapping, string, strings
from batchgen.request.params import CONSTRAINT_KINDS
from batchgen.request.printable import printable

__all__ = ["CONSTRAINTS", "FIELDS", "LOOKUP", "SOURCES", "Field", "Place", "unknown_field"]

Place = Literal["row", "params", "completions", "chat"]
"""Where a field is allowed: on a native row, in its `sampling_params`, or in the body of an OpenAI batch line."""

_EVERYWHERE: tuple[Place, ...] = ("row", "params", "completions", "chat")
_ROW: tuple[Place, ...] = ("row",)
_CHAT: tuple[Place, ...] = ("row", "chat")
_BODY: tuple[Place, ...] = ("completions", "chat")

NoOpTest = Callable[[Any, Mapping[str, Any]], bool]
"""(value, all values of the row by canonical name) -> whether the value requests nothing."""


def _never(value: Any, given: Mapping[str, Any]) -> bool:
    return False


def _noop_if(*values: Any) -> NoOpTest:
    return lambda value, given: value in values


def _noop_if_empty(value: Any, given: Mapping[str, Any]) -> bool:
    return not value


@dataclass(frozen=True, slots=True)
class Field:
    """One row field."""

    name: str
    check: Check
    """(name as spelled, value) -> normalised value; raises `invalid_field`."""
    places: tuple[Place, ...] = _EVERYWHERE
    aliases: tuple[str, ...] = ()
    supported: bool = True
    is_noop: NoOpTest = _never
    """For unsupported fields: whether a value requests nothing and is accepted."""
    carried: bool = False
    """Whether the field has no effect on generation and is carried to the output."""
    remedy: str = "remove it"
    """For unsupported fields: what to do instead, for the error message."""


def _unsupported(
    name: str, check: Check, places: tuple[Place, ...] = _EVERYWHERE, *, is_noop: NoOpTest = _never, remedy: str = ""
) -> Field:
    return Field(name, check, places, supported=False, is_noop=is_noop, remedy=remedy or "remove it")


_PROMPTS = (
    Field("id", field_checks.row_id, _ROW, aliases=("rid", "custom_id")),
    Field("text", field_checks.texts, _ROW, aliases=("prompt",)),
    Field("input_ids", checks.token_id_lists, _ROW),
    Field("input_embeds", field_checks.embeddings, _ROW),
    Field("prompt", field_checks.prompts, ("completions",)),
    Field("messages", messages, _CHAT),
    Field("tools", tools, _CHAT),
    Field("chat_template_kwargs", template_kwargs, _CHAT),
    Field("add_generation_prompt", boolean, _CHAT),
    Field("continue_final_message", boolean, _CHAT),
    Field("completion", field_checks.completion, _ROW),
    Field("completions", field_checks.completions, _ROW),
    _unsupported("image_data", field_checks.media, _ROW, is_noop=_noop_if_empty),
    _unsupported("audio_data", field_checks.media, _ROW, is_noop=_noop_if_empty),
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
    Field("logit_bias", field_checks.logit_bias),
    Field("bad_words", field_checks.bad_words),
    Field("allowed_token_ids", field_checks.nonempty_ids),
    Field("json_schema", checks.string_or_mapping),
    Field("regex", field_checks.nonempty_string),
    Field("ebnf", field_checks.nonempty_string),
    Field("structural_tag", checks.string_or_mapping),
    Field("choice", field_checks.choice),
    Field("response_format", field_checks.response_format),
    Field("skip_special_tokens", boolean),
    Field("spaces_between_special_tokens", boolean),
    Field("echo", boolean),
    Field("suffix", string),
    Field("return_logprob", boolean),
    Field("logprob_start_len", integer(-1)),
    Field("top_logprobs_num", integer(0, 1 << 20)),
    Field("logprobs", field_checks.boolean_or_count, ("row", "params")),
    Field("logprobs", integer(0, 1 << 20), ("completions",)),
    Field("logprobs", boolean, ("chat",)),
    Field("top_logprobs", integer(0, 1 << 20), ("row", "params", "chat")),
    Field("token_ids_logprob", checks.ids),
    Field("return_text_in_logprobs", boolean),
    Field("return_hidden_states", field_checks.hidden_states),
    Field("return_routed_experts", boolean),
    Field("lora_path", field_checks.nonempty_string),
    Field("custom_logit_processor", field_checks.nonempty_string),
    Field("custom_params", mapping),
    Field("stream", boolean),
)

# Fields that exist only in the bodies of the two endpoints. The first six describe the caller.
_OPENAI = (
    Field("user", string, _BODY, carried=True),
    Field("metadata", mapping, _BODY, carried=True),
    Field("safety_identifier", string, _BODY, carried=True),
    Field("prompt_cache_key", string, _BODY, carried=True),
    Field("prompt_cache_retention", string, _BODY, carried=True),
    Field("prompt_cache_options", mapping, _BODY, carried=True),
    _unsupported("store", boolean, _BODY, is_noop=_noop_if(False)),
    _unsupported("service_tier", string, _BODY, is_noop=_noop_if("auto", "default")),
    _unsupported("stream_options", mapping, _BODY, is_noop=_noop_if_empty),
    _unsupported("parallel_tool_calls", boolean, ("chat",), is_noop=_noop_if(True)),
    _unsupported(
        "tool_choice",
        checks.string_or_mapping,
        ("chat",),
        is_noop=lambda value, given: value == "auto" or (value == "none" and not given.get("tools")),
        remedy="leave it at auto, or leave `tools` out",
    ),
    _unsupported("functions", field_checks.media, ("chat",), is_noop=_noop_if_empty, remedy="use `tools`"),
    _unsupported("function_call", checks.string_or_mapping, ("chat",), is_noop=_noop_if("none"), remedy="use `tools`"),
    _unsupported("modalities", strings, ("chat",), is_noop=_noop_if(("text",))),
    _unsupported("audio", mapping, ("chat",)),
    _unsupported("prediction", mapping, ("chat",)),
    _unsupported(
        "reasoning_effort",
        field_checks.nonempty_string,
        ("chat",),
        remedy="give it in `chat_template_kwargs` if the model's template reads it",
    ),
    _unsupported("verbosity", field_checks.nonempty_string, ("chat",), is_noop=_noop_if("medium")),
    _unsupported("web_search_options", mapping, ("chat",)),
    _unsupported("moderation", mapping, ("chat",)),
)

FIELDS: tuple[Field, ...] = (*_PROMPTS, *_SAMPLING, *_OPENAI)
"""All row fields. A name is listed twice if its values differ by place."""

SOURCES = ("text", "input_ids", "input_embeds", "messages", "prompt")
"""Canonical names of the prompt fields; a row has exactly one."""

CONSTRAINTS = (*CONSTRAINT_KINDS, "response_format")
"""Canonical names of the constraint fields; a row has at most one."""


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
    """`unknown_field` error for a key that `place` does not have, with the closest known name."""
    message = f"`{printable(key[:80])[:80]}` is not a field of {_WHERE[place]}"
    close = difflib.get_close_matches(key[:80], [*LOOKUP[place], *further], n=1)
    if close:
        message += f"; did you mean `{close[0]}`?"
    elif key in LOOKUP["row"] and place == "params":
        message += "; it is a field of the row itself, move it there"
    else:
        message += "; remove it or correct its name"
    return RowError(ErrorCode.UNKNOWN_FIELD, message, key)
