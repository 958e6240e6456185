"""Fuzzer of chat templates: `{"template": TEXT, "row": {...}}`. A conversation is a prompt, or its row has an error."""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from functools import cache
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerFast

from batchgen.errors import ErrorInfo, RowError
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults
from batchgen.text.encode import Encoder
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.fuzz.fuzzer import MAX_BYTES, Fuzzer
from tests.fuzz.jobs import CONTEXT, model_folder
from tests.fuzz.mutations import any_value, dump, load, mutate_bytes, mutate_value
from tests.fuzz.parsing import check_error, require
from tests.text.chat_families import FAMILIES

_TOKENS = tuple(
    word.encode()
    for word in (
        "{{ ", " }}", "{% ", " %}", "{#", "#}", "messages", "message", "m.content", "m['role']", "tools", "loop",
        "loop.index",
        "for m in messages", "for a in range(9)", "for a in range(10**9)", "endfor", "if ", "elif", "else", "endif",
        "set x = ", "set ns.x = ",
        "namespace()", "macro f(a)", "endmacro", "f(1)", "f(f)", "call", "filter upper", "endfilter", "| tojson",
        "| trim", "| length",
        "| join(',')", "| map(attribute='content')", "| list", "| selectattr('role', 'equalto', 'user')",
        "| replace('a', 'b' * 9)",
        "| center(99999999)", "| indent(9999)", "| batch(2)", "| random", "| safe", "| e", "| int", "| string",
        "| first", "| last", "| sort",
        "raise_exception('no')", "strftime_now('%d')", "strftime_now('%9999d')", "add_generation_prompt", "bos_token",
        "is defined", "is string",
        "is mapping", "not in", "~", "*", "**", "//", "%", "x", "''", "'a'", "'\\ud800'", "10**99", "[0] * 999999999",
        "'a' * 999999999",
        "x.__class__", "x.format", "'%99999999d' % 1", "'{:99999999}'.format(1)", "cycler", "joiner", "lipsum()",
        "dict(a=1)", "recursive",
        "loop(messages)", "break", "continue", "generation", "endgeneration", "caller()", "self", "varargs",
        "include 'x'", "import 'x'",
    )
)  # fmt: skip
_KEYS = (
    "messages", "role", "content", "name", "tool_calls", "function", "arguments", "tool_call_id", "reasoning_content",
    "type", "text",
    "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "parameters", "user",
    "assistant", "system",
    "tool", "id", "enable_thinking", "documents", "description", "properties", "developer",
)  # fmt: skip
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}},
}
_ROWS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hello"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ]
    },
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "continue_final_message": True,
    },
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "1"},
        ],
        "tools": [_TOOL],
    },
    {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": False}},
)


@cache
def _library() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_folder())


_encoders: dict[str, Encoder] = {}


def _encoder(template: str) -> Encoder:
    """An encoder of a tokenizer with this template; a few are kept, as conversations are judged by those before."""
    found = _encoders.get(template)
    if found is None:
        if len(_encoders) > 50:
            _encoders.clear()
        library = copy(_library())
        library.chat_template = template
        tokenizer = Tokenizer(library, model_folder())
        found = _encoders[template] = Encoder(tokenizer, tokenizer.vocab_size, CONTEXT)
    return found


def _parts(data: bytes) -> tuple[str, dict[str, Any]] | None:
    try:
        value = load(data)
    except ValueError:
        return None
    if type(value) is not dict or type(value.get("template")) is not str or type(value.get("row")) is not dict:
        return None
    return value["template"] or " ", value["row"]


def _check(data: bytes) -> Hashable:
    found = _parts(data)
    if found is None:
        return None
    template, values = found
    try:
        row = parse_row(values, 0, RowDefaults())
    except RowError as error:
        check_error(error.info)
        return error.info.code
    encoder = _encoder(template)
    ((_, first), (_, second)) = encoder.encode_rows([(0, row), (1, row)])
    require(_comparable(first) == _comparable(second), "a conversation is the same prompt twice:", (template, values))
    if isinstance(first, ErrorInfo):
        check_error(first)
        return first.code, first.param, first.message[:30]
    assert first is not None
    require(all(0 < len(prompt.ids) < CONTEXT for prompt in first), "a prompt fits the context:", values)
    return "prompt", len(first)


def _comparable(result: Any) -> Any:
    return result if isinstance(result, ErrorInfo) else [prompt.ids for prompt in result]


def _make(rng: Random) -> bytes:
    return dump({"template": rng.choice(list(FAMILIES.values())), "row": rng.choice(_ROWS)})


def _mutate(data: bytes, rng: Random) -> bytes:
    """Change the row, and one time in three the template."""
    found = _parts(data)
    if found is None:
        return _make(rng)
    template, row = found
    if rng.random() < 0.33:
        template = mutate_bytes(template.encode("utf-8", "replace"), rng, _TOKENS).decode("utf-8", "replace")
    else:
        row = mutate_value(row, rng, _KEYS)
        if type(row) is not dict or "messages" not in row:
            row = rng.choice(_ROWS) | {rng.choice(_KEYS): any_value(rng, _KEYS)}
    return dump({"template": template[:4000], "row": row})[:MAX_BYTES]


FUZZERS = (Fuzzer("templates", _check, _make, _mutate),)
