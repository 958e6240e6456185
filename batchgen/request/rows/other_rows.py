"""Rows without a prompt: the format of another system that such a row looks like, and how to run it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.declared import LOOKUP, SOURCES
from batchgen.request.fields.other_systems import snake_case, words
from batchgen.request.printable import printable
from batchgen.request.rows.unknown_keys import close_name

Row = Mapping[str, Any]
"""The keys of a row that are not fields, with their values."""

_GIVE = "give it `text`, `input_ids`, `input_embeds` or `messages`"
_SHOWN_FIELDS = 12
_COLUMNS = words(
    """question query content input inputs instruction problem user_prompt user_input input_text prompt_text text_input
    instructions user human request message sentence passage document article code source_text premise goal"""
)
"""Names of columns that usually hold a prompt, the likeliest first."""
_SOURCE_NAMES = frozenset(name for name, field in LOOKUP["row"].items() if field.name in SOURCES)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of rows that is not read, and how to turn it into one that is."""

    name: str
    matches: Callable[[Row], bool]
    remedy: str


def _holds(value: Any, *keys: str) -> bool:
    return isinstance(value, Mapping) and all(key in value for key in keys)


def _list_of(value: Any, *keys: str) -> bool:
    """Whether a value is a list whose first item is an object with these keys."""
    return _is_list(value) and _holds(value[0], *keys)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value)


FORMATS = (
    RowFormat(
        "an Anthropic batch line",
        lambda row: _holds(row.get("params"), "messages"),
        "rename `params` to `body`, add `method` POST and `url` /v1/chat/completions, and in the body set `model` to "
        "*, rename `stop_sequences` to `stop` and make `system` the first message",
    ),
    RowFormat(
        "a Gemini request",
        lambda row: "contents" in row or _holds(row.get("request"), "contents"),
        "write `contents` as `messages` (`parts` are the `content`, the role model is assistant), "
        "`systemInstruction` as the first message and `generationConfig` as `sampling_params`",
    ),
    RowFormat(
        "a Bedrock record",
        lambda row: isinstance(row.get("modelInput"), Mapping),
        "rename `recordId` to `id`, and move the keys of `modelInput` to the row itself (`inputText` is `text`, "
        "`stop_sequences` is `stop`, `system` is the first message)",
    ),
    RowFormat(
        "a ShareGPT conversation",
        lambda row: any(_list_of(value, "from", "value") for value in row.values()),
        "write the turns as `messages`: `from` is `role` (human is user, gpt is assistant), `value` is `content`",
    ),
    RowFormat(
        "an Alpaca instruction",
        lambda row: "instruction" in row and ("output" in row or "input" in row),
        "run with --prompt-column instruction, or with --prompt-template '{{ instruction }} {{ input or \"\" }}'",
    ),
    RowFormat(
        "a logged request of lm-eval",
        lambda row: _holds(row.get("arguments"), "gen_args_0") or ("arguments" in row and "doc_id" in row),
        "write `arg_0` of `gen_args_0` as `text`, and of `arg_1` `until` as `stop`, `max_gen_toks` as `max_new_tokens` "
        "and `do_sample: false` as `temperature: 0`",
    ),
    RowFormat(
        "a request to TGI",
        lambda row: "inputs" in row and isinstance(row.get("parameters"), Mapping),
        "run with --prompt-column inputs, and rename `parameters` to `sampling_params`",
    ),
    RowFormat(
        "a request with token ids",
        lambda row: any(
            isinstance(row.get(name), list | tuple) for name in ("prompt_token_ids", "token_ids", "tokens")
        ),
        "rename the list of token ids to `input_ids`",
    ),
)


def missing_prompt(row: Row, fields: Sequence[str], column: str | None) -> RowError:
    """`missing_prompt` error of a native row.

    Args:
        row: the keys that are not fields, with their values.
        fields: the names of its fields.
        column: the value of `--prompt-column`.
    """
    if column is not None:
        message = f"`{_shown(column)}`, which --prompt-column names, is null"
        if column not in row:
            there = fields_there([*row, *fields], column)
            message = f"the row has no field `{_shown(column)}`, which --prompt-column names; {there}"
        return RowError(ErrorCode.MISSING_PROMPT, message, column)
    known = next((known for known in FORMATS if known.matches(row)), None)
    if known is None:
        remedy = _remedy(row, fields)
    else:
        remedy = f"it looks like {known.name}: {known.remedy}; see `batchgen help other-systems`"
    return RowError(ErrorCode.MISSING_PROMPT, f"the row has no prompt; {remedy}")


def _remedy(row: Row, fields: Sequence[str]) -> str:
    if not row:
        return _GIVE
    named = fields_there([*row, *fields])
    for key, value in row.items():
        close = snake_case(key) if snake_case(key) in _SOURCE_NAMES else close_name(key, _SOURCE_NAMES)
        if close is not None and not (close == "messages" and isinstance(value, str)):
            return f"{named}: did you mean `{close}` by `{_shown(key)}`?"
    column = _likely_prompt(row)
    return f"{named}: {_GIVE}, or name the field that holds it: --prompt-column {_shown(column) if column else 'NAME'}"


def _likely_prompt(row: Row) -> str | None:
    """The key that most likely holds the prompt: messages, a usual name, or the only text."""
    messages = [key for key, value in row.items() if _list_of(value, "role", "content")]
    texts = [key for key, value in row.items() if isinstance(value[0] if _is_list(value) else value, str)]
    usual = [name for name in _COLUMNS if name in texts]
    likely = messages or usual or (texts if len(texts) == 1 else [])
    return likely[0] if likely else None


def fields_there(names: Sequence[str], wanted: str = "") -> str:
    """Fields of a row or a file, as part of a message: `it has `a`, `b`; did you mean `b`?` for a `wanted` name."""
    if not names:
        return "it has no fields"
    more = len(names) - _SHOWN_FIELDS
    shown = ", ".join(f"`{_shown(name)}`" for name in names[:_SHOWN_FIELDS])
    close = close_name(wanted, names)
    hint = "" if close is None else f"; did you mean `{_shown(close)}`?"
    return f"it has {shown}{f' and {more} more' if more > 0 else ''}{hint}"


def _shown(key: object) -> str:
    return printable(str(key)[:60])[:60]
