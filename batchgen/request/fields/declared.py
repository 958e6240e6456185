"""Table of all row fields: those of prompts, of OpenAI bodies, and the sampling fields that `SamplingParams` declares.

An unsupported field is refused by name (`unsupported_field`) unless its value requests nothing.
Its value is checked first, so a wrong value is always `invalid_field`.
"""

from __future__ import annotations

from functools import partial
from operator import not_
from typing import Any

from batchgen.request.checks import (
    Integer,
    boolean,
    mapping,
    nonempty_string,
    one_of,
    string,
    string_or_mapping,
    strings,
    token_id_lists,
)
from batchgen.request.fields import field_checks
from batchgen.request.fields.constraint import CONSTRAINT_KINDS
from batchgen.request.fields.field import ALL_BODIES, BODIES, EVERYWHERE, Field, NoOpTest, Place
from batchgen.request.fields.media import MEDIA_FIELDS, MediaField
from batchgen.request.fields.named_columns import ID_NAMES
from batchgen.request.fields.params import PARAMETERS, SAMPLING_FIELDS
from batchgen.request.fields.prompts import embeddings
from batchgen.request.fields.tool_choice import tool_choice

__all__ = ["CONSTRAINTS", "FIELDS", "ID_NAMES", "LOOKUP", "SOURCES", "Field", "Place"]

_ROW: tuple[Place, ...] = ("row", "pairs")
_CHAT: tuple[Place, ...] = (*_ROW, "chat")
_PAIRS: tuple[Place, ...] = ("pairs", "rerank")
_IN_CHAT: tuple[Place, ...] = ("chat",)
_NATIVE: tuple[Place, ...] = (*_ROW, "params")
_TOP = Integer(0, 1 << 20)


def _noop_if(*values: Any) -> NoOpTest:
    return lambda value: value in values


_unsupported = partial(Field, supported=False)

HANDLING = (
    "store", "service_tier", "timeout", "request_timeout", "max_retries", "num_retries", "extra_headers",
    "extra_query", "api_key", "api_base", "base_url", "api_version", "organization", "priority", "cache_salt",
    "request_id",
)  # fmt: skip
"""Fields of bodies that tell a client or a server how to handle a request, and nothing about the text."""

_PROMPTS = (
    Field("id", field_checks.row_id, _ROW, aliases=ID_NAMES[1:]),
    Field("text", field_checks.texts, _ROW, aliases=("prompt",), json_text="text"),
    Field("input_ids", token_id_lists, _ROW, ids=True),
    Field("input_embeds", embeddings, _ROW, json_text="value"),
    Field("prompt", field_checks.prompts, ("completions",), ids=True, json_text="text"),
    Field("input", field_checks.prompts, ("embeddings",), ids=True, json_text="text"),
    Field("query", string, _PAIRS, json_text="text"),
    Field("documents", field_checks.documents, _PAIRS),
    Field("messages", field_checks.messages, _CHAT),
    Field("tools", field_checks.tools, _CHAT),
    Field("tool_choice", tool_choice, _CHAT),
    Field("parallel_tool_calls", boolean, _CHAT),
    Field("chat_template_kwargs", field_checks.template_kwargs, _CHAT),
    Field("add_generation_prompt", boolean, _CHAT),
    Field("continue_final_message", boolean, _CHAT),
    Field("completion", field_checks.completion, _ROW, json_text="text"),
    Field("completions", field_checks.completions, _ROW),
    *(Field(name, MediaField(kind), _ROW, json_text="value") for kind, name in MEDIA_FIELDS.items()),
    Field("model", string, (*_ROW, *ALL_BODIES)),
)

# OpenAI's names of sampling parameters, which are translated.
_TRANSLATED = (
    Field("response_format", field_checks.response_format),
    Field("logprobs", field_checks.boolean_or_count, _NATIVE),
    Field("logprobs", _TOP, ("completions",)),
    Field("logprobs", boolean, _IN_CHAT),
    Field("top_logprobs", _TOP, (*_NATIVE, "chat")),
)

# Forms of a constraint: the oldest, and those of vLLM.
_CONSTRAINT_FORMS = (
    Field("dtype", field_checks.python_type),
    Field("structured_outputs", field_checks.structured_outputs, aliases=("guided_decoding",)),
    Field("guided_json_object", boolean),
)

_CALLER = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")

# Fields that exist only in the bodies of the two endpoints. The first six describe the caller.
_OPENAI = (
    *(Field(name, string, ALL_BODIES, carried=True) for name in _CALLER),
    *(Field(name, mapping, ALL_BODIES, carried=True) for name in ("metadata", "prompt_cache_options")),
    *(Field(name, field_checks.anything, ALL_BODIES, json_text="text") for name in HANDLING),
    Field("encoding_format", one_of("float", "base64"), ("embeddings",), carried=True),
    Field("top_n", Integer(1, 1 << 20), ("rerank",), carried=True),
    _unsupported("return_documents", boolean, ("rerank",), requests_nothing=not_, remedy="join them by `index`"),
    _unsupported("extra_body", mapping, BODIES, requests_nothing=not_, remedy="write its fields in `body` itself"),
    _unsupported("functions", field_checks.functions, _IN_CHAT, requests_nothing=not_, remedy="use `tools`"),
    _unsupported("function_call", string_or_mapping, _IN_CHAT, requests_nothing=_noop_if("none"), remedy="use `tools`"),
    _unsupported(
        "modalities",
        strings,
        _IN_CHAT,
        requests_nothing=_noop_if(("text",), ()),
        remedy='only ["text"] can be generated',
    ),
    Field("reasoning_effort", nonempty_string, _CHAT, to_template=True),
    Field("verbosity", nonempty_string, _IN_CHAT, to_template=True, requests_nothing=_noop_if("medium")),
    *(_unsupported(name, mapping, _IN_CHAT) for name in ("audio", "prediction", "web_search_options", "moderation")),
)

FIELDS: tuple[Field, ...] = (*_PROMPTS, *SAMPLING_FIELDS, *_TRANSLATED, *_CONSTRAINT_FORMS, *_OPENAI)
"""All row fields. A name is listed twice if its values differ by place."""

SOURCES = ("text", "input_ids", "input_embeds", "messages", "prompt")
"""Canonical names of the prompt fields; a row has exactly one."""

CONSTRAINTS = (
    *(kind for kind in CONSTRAINT_KINDS if kind in PARAMETERS),
    *("response_format", "dtype", "structured_outputs", "guided_json_object"),
)
"""Canonical names of the constraint fields; a row has at most one."""


LOOKUP: dict[Place, dict[str, Field]] = {
    place: {spelling: field for field in FIELDS if place in field.places for spelling in field.spellings}
    for place in (*EVERYWHERE, "embeddings", "rerank")
}
"""Fields by place and spelling."""
