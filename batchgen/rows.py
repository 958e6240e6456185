"""From one JSON object to a `ParsedRow`: the shape is detected, every field checked, defaults filled in.

Nothing here tokenises or opens a file. A field is never accepted and ignored: it is used, carried, or an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from batchgen.checks import invalid, kind_of, mapping
from batchgen.errors import ErrorCode, RowError
from batchgen.openai_rows import ENVELOPE, is_openai_line, parse_openai_line, place_of
from batchgen.prompts import ChatPrompt, EmbedsPrompt, Prompt, TextPrompt, TokenPrompt
from batchgen.request import ParsedRow
from batchgen.row_values import RowDefaults, RowValues, chat_prompt
from batchgen.score_rows import scoring_params, texts_to_score
from batchgen.usual_rows import usual_row

__all__ = ["RowDefaults", "derive_seed", "parse_row", "row_extra", "row_id"]

_ID_NAMES = ("id", "rid", "custom_id")
_CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def derive_seed(run_seed: int, row_id: str) -> int:
    """The seed of a row that names none: 63 bits, the same on every machine and in every version."""
    text = f"{run_seed}\n{row_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def row_id(value: Any, row_index: int) -> str:
    """The id an output row gets even when its input row is bad: its own if it has a valid one, else `row-<index>`."""
    found = [value[name] for name in _ID_NAMES if value.get(name) is not None] if isinstance(value, Mapping) else []
    if len(found) == 1 and type(found[0]) is str and not _has_surrogate(found[0]):
        return str(found[0])
    return f"row-{row_index}"


def row_extra(value: Any) -> dict[str, Any]:
    """The keys that an output row carries even when its input row is bad: those that a good one would."""
    if not isinstance(value, Mapping):
        return {}
    row = RowValues()
    if is_openai_line(value):
        row.carry({key: item for key, item in value.items() if key not in ENVELOPE}, "row")
        body, place = value.get("body"), place_of(value.get("url"))
        if isinstance(body, Mapping) and place is not None:
            row.carry(body, place)
    else:
        row.carry({key: item for key, item in value.items() if key != "sampling_params"}, "row")
    return {**row.extra, "body": row.carried} if row.carried else row.extra


def parse_row(value: Any, row_index: int, defaults: RowDefaults) -> ParsedRow:
    """Parse one row: `value` is what the line or the Parquet row holds, `row_index` its place in the whole input.

    Raises:
        RowError: everything that is wrong with the row, naming the field and the remedy. The order is fixed: values
            that are wrong come before a missing prompt, that before fields that are not supported.
    """
    if type(value) is not dict and not isinstance(value, Mapping):
        raise RowError(ErrorCode.INVALID_JSON, f"a row must be a JSON object, got {kind_of(value)}")
    usual = usual_row(value, row_index, defaults)
    if usual is None:
        return _parse_fully(value, row_index, defaults)
    if usual.row is not None:
        return usual.row
    row = _parse_fully(value, row_index, defaults)
    if row.params.seed is None:  # one with a seed would be known for this row alone
        defaults.share(usual.key, row.params)
    return row


def _parse_fully(value: Mapping[str, Any], row_index: int, defaults: RowDefaults) -> ParsedRow:
    parse = parse_openai_line if is_openai_line(value) else _parse_native
    return parse(value, row_id(value, row_index), row_index, defaults)


def _parse_native(value: Mapping[str, Any], name: str, row_index: int, defaults: RowDefaults) -> ParsedRow:
    row = RowValues()
    nested = value.get("sampling_params")
    if "sampling_params" in value:
        value = {key: item for key, item in value.items() if key != "sampling_params"}
    row.collect(value, "row")
    if nested is not None:
        row.collect(mapping("sampling_params", nested), "params")
    params = row.params(defaults, {})
    prompts = _prompts(row, defaults)
    row.check_model(defaults, params)
    texts = texts_to_score(row)
    row.refuse_unbuilt()
    if texts:
        params = scoring_params(params)
    return ParsedRow(row_index, name, prompts, params, row.extra, completions=texts)


def _prompts(row: RowValues, defaults: RowDefaults) -> tuple[Prompt, ...]:
    """The row's prompts, conversations where chat is asked for."""
    found = row.sources()
    if len(found) != 1:
        raise row.prompt_error(found, "`text`, `input_ids`, `input_embeds` or `messages`")
    source = found[0]
    values = row.values[source]
    spelled = row.spelled[source]
    if not values or (source == "input_ids" and () in values):
        raise RowError(ErrorCode.EMPTY_PROMPT, f"`{spelled}` holds nothing; give at least one prompt", spelled)
    if source == "messages":
        return (chat_prompt(row, values, defaults),)
    if source == "text" and defaults.chat:
        return tuple(_wrapped(row, text, defaults) for text in values)
    lost = next((row.spelled[name] for name in _CHAT_FIELDS if name in row.spelled), None)
    if lost is not None:
        raise invalid(lost, f"needs `messages`; it says nothing about a prompt in `{spelled}`")
    if source == "text":
        return tuple(TextPrompt(text) for text in values)
    if source == "input_embeds":
        return tuple(EmbedsPrompt(found) for found in values)
    return tuple(TokenPrompt(ids) for ids in values)


def _wrapped(row: RowValues, text: str, defaults: RowDefaults) -> ChatPrompt:
    return chat_prompt(row, ({"role": "user", "content": text},), defaults)


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text) if not text.isascii() else False
