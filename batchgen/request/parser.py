"""Parser of input rows: detects the format, checks every field, applies defaults and returns a `ParsedRow`.

A field is never ignored: it is used, carried to the output, or an error.

A row with `completion` or `completions` is scored and generates nothing. Such a row is refused if it sets a sampling or
output field, which would have no effect. Run-wide sampling defaults do not apply to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import invalid, json_type, mapping
from batchgen.request.fast_parser import parse_fast
from batchgen.request.openai_lines import ENVELOPE, is_openai_line, parse_openai_line, place_of
from batchgen.request.params import SamplingParams
from batchgen.request.prompts import ChatPrompt, EmbedsPrompt, Prompt, TextPrompt, TokenPrompt
from batchgen.request.row_values import RowDefaults, RowValues, chat_prompt
from batchgen.request.table import ParsedRow

__all__ = ["RowDefaults", "completions_to_score", "derive_seed", "parse_row", "row_extra", "row_id", "scoring_params"]

_SCORING_FIELDS = frozenset({"lora_path"})
_DEFAULTS: dict[str, Any] = {
    **{item.name: item.default for item in fields(SamplingParams)},
    "max_new_tokens": 0,
    "logprobs": False,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
}


def completions_to_score(row: RowValues) -> tuple[str | tuple[int, ...], ...]:
    """The row's texts to score; empty for a row that generates.

    Raises:
        RowError: `invalid_field` if the row has both fields, or a field that has no effect on scoring.
    """
    if "completions" in row.values and "completion" in row.values:
        raise invalid("completions", "is given together with `completion`; keep one of them")
    one, several = row.values.get("completion"), row.values.get("completions")
    texts: tuple[str | tuple[int, ...], ...] = several or (() if one is None else (one,))
    if not texts:
        return ()
    source = "completion" if one is not None else "completions"
    for name, spelled in row.spelled.items():
        if name in _DEFAULTS and name not in _SCORING_FIELDS and not _is_default(name, row.values[name]):
            raise invalid(spelled, f"has no effect with `{source}`, which is scored without sampling; remove it")
    return texts


def scoring_params(params: SamplingParams) -> SamplingParams:
    """Sampling parameters of a scoring row: only the adapter of `params` is kept."""
    return _scoring(params.lora_path)


@cache  # so that all scoring rows of an adapter share one object
def _scoring(lora_path: str | None) -> SamplingParams:
    return SamplingParams(max_new_tokens=0, temperature=0.0, lora_path=lora_path)


def _is_default(name: str, value: Any) -> bool:
    default = _DEFAULTS[name]
    if type(value) is bool or type(default) is bool:
        return value is default or (value is False and default is None)
    return bool(value == default) or value in ((), {}, "")


_ID_NAMES = ("id", "rid", "custom_id")
_CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def derive_seed(run_seed: int, row_id: str) -> int:
    """Seed of a row without `seed`: 63 bits, the same on every machine and in every version."""
    text = f"{run_seed}\n{row_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def row_id(value: Any, row_index: int) -> str:
    """Id of an output row, also for an invalid input row: the row's id if valid, otherwise `row-<index>`."""
    found = [value[name] for name in _ID_NAMES if value.get(name) is not None] if isinstance(value, Mapping) else []
    if len(found) == 1 and type(found[0]) is str and not _has_surrogate(found[0]):
        return str(found[0])
    return f"row-{row_index}"


def row_extra(value: Any) -> dict[str, Any]:
    """Fields to carry to the output, also for an invalid input row: the same as for a valid one."""
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
    """Parse one row: `value` is the decoded JSON line or Parquet row, `row_index` its index in the whole input.

    Raises:
        RowError: names the field and the remedy. Wrong values are reported before a missing prompt, and a missing
            prompt before unsupported fields.
    """
    if type(value) is not dict and not isinstance(value, Mapping):
        raise RowError(ErrorCode.INVALID_JSON, f"a row must be a JSON object, got {json_type(value)}")
    fast = parse_fast(value, row_index, defaults)
    if fast is None:
        return _parse_fully(value, row_index, defaults)
    if fast.row is not None:
        return fast.row
    row = _parse_fully(value, row_index, defaults)
    if row.params.seed is None:  # parameters with a seed fit this row only
        defaults.cache_params(fast.key, row.params)
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
    texts = completions_to_score(row)
    row.reject_unsupported()
    if texts:
        params = scoring_params(params)
    return ParsedRow(row_index, name, prompts, params, row.extra, completions=texts)


def _prompts(row: RowValues, defaults: RowDefaults) -> tuple[Prompt, ...]:
    """The row's prompts, as conversations if the run or the row uses chat."""
    found = row.sources()
    if len(found) != 1:
        raise row.prompt_error(found, "`text`, `input_ids`, `input_embeds` or `messages`")
    source = found[0]
    values = row.values[source]
    spelled = row.spelled[source]
    if not values or (source == "input_ids" and () in values):
        raise RowError(ErrorCode.EMPTY_PROMPT, f"`{spelled}` is empty; give at least one prompt", spelled)
    if source == "messages":
        return (chat_prompt(row, values, defaults),)
    if source == "text" and defaults.chat:
        return tuple(_as_user_message(row, text, defaults) for text in values)
    unused = next((row.spelled[name] for name in _CHAT_FIELDS if name in row.spelled), None)
    if unused is not None:
        raise invalid(unused, f"needs `messages`; it has no effect on a prompt in `{spelled}`, remove it")
    if source == "text":
        return tuple(TextPrompt(text) for text in values)
    if source == "input_embeds":
        return tuple(EmbedsPrompt(found) for found in values)
    return tuple(TokenPrompt(ids) for ids in values)


def _as_user_message(row: RowValues, text: str, defaults: RowDefaults) -> ChatPrompt:
    return chat_prompt(row, ({"role": "user", "content": text},), defaults)


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text) if not text.isascii() else False
