"""Parser of input rows: detects the format, checks every field, applies defaults and returns a `ParsedRow`.

A field is never ignored: it is used, carried to the output, or an error.

A row with `completion` or `completions` is scored and generates nothing. Such a row is refused if it sets a sampling or
output field, which would have no effect. Run-wide sampling defaults do not apply to it. Likewise a row with a task:
`embed`, `classify`, or `query` and `documents`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Literal

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import error_at, invalid, json_type, mapping
from batchgen.request.fields.declared import CONSTRAINTS, SOURCES
from batchgen.request.fields.media import MediaMessages
from batchgen.request.fields.params import SamplingParams, Task
from batchgen.request.fields.prompts import EmbedsPrompt, Prompt, TextPrompt, TokenPrompt, with_media
from batchgen.request.fields.tool_choice import AUTO
from batchgen.request.json_text import text_remedy
from batchgen.request.rows.endpoints import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, Endpoint, endpoint_of
from batchgen.request.rows.layout import Layout, new_layout, params_key
from batchgen.request.rows.other_rows import missing_prompt
from batchgen.request.rows.values import RowDefaults, RowValues, chat_prompt
from batchgen.request.table.request_table import ParsedRow
from batchgen.request.tasks import refuse_with_task

MAX_ROW_PROMPTS = 1 << 17
"""Most prompts of a row, and most pairs of a prompt and a text to score."""
_EMPTY: Mapping[str, Any] = MappingProxyType({})
_NESTED = "sampling_params"
_SCORING_FIELDS = frozenset({"lora_path"})
_TASK_FIELDS = frozenset({"lora_path", "embed", "classify", "dimensions", "prompt_name"})
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(CONSTRAINTS),
    **{item.name: item.default for item in fields(SamplingParams)},
    "max_new_tokens": 0,
    "logprobs": False,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "tool_choice": AUTO,
    "parallel_tool_calls": True,
}
_NATIVE_SOURCES = ("text", "prompt", "input_ids", "input_embeds", "messages")


def derive_seed(run_seed: int, row_id: str) -> int:
    """Seed of a row without `seed`: 63 bits, the same on every machine and in every version."""
    text = f"{run_seed}\n{row_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def row_extra(value: Any) -> dict[str, Any]:
    """Fields to carry to the output, also for an invalid input row: the same as for a valid one."""
    if not isinstance(value, Mapping):
        return {}
    row, line = RowValues(), is_openai_line(value)
    layout = new_layout("line" if line else "row", tuple(value))
    row.carry(layout, value)
    body = value.get("body")
    if line and isinstance(body, Mapping):
        with suppress(RowError):
            layout = new_layout(endpoint_of(value)[0].place, tuple(body))
            row.carry(layout, body)
    return row.carried(layout)


def parse_row(value: Any, row_index: int, defaults: RowDefaults, displaced: Mapping[str, Any] = _EMPTY) -> ParsedRow:
    """Parse one row: `value` is the decoded JSON line or Parquet row, `row_index` its index in the whole input.

    Fields in `displaced` are not parsed; a row without a prompt names them in its error.

    The parameter set of a row, and the checks that it has passed, are reused for later rows with the same options.

    Raises:
        RowError: names the field and the remedy. Wrong values are reported before a missing prompt, and a missing
            prompt before unsupported fields.
    """
    if type(value) is not dict and not isinstance(value, Mapping):
        raise RowError(ErrorCode.INVALID_JSON, f"a row must be a JSON object, got {json_type(value)}")
    layout = defaults.layout("row", value)
    if layout.may_be_line and is_openai_line(value):
        return _parse_openai_line(value, row_index, defaults, displaced)
    if "documents" in value and _has_pairs(value):
        layout = defaults.layout("pairs", value)
    nested: Any = value[_NESTED] if layout.containers else None
    inner = defaults.layout("params", nested) if type(nested) is dict else None
    key = params_key(layout, value, inner, nested)
    params = defaults.cached_params(key)
    row = RowValues()
    row.collect(layout, value, params is not None)
    if inner is not None:
        row.collect(inner, nested, params is not None)
    elif nested is not None:
        _object(_NESTED, nested)
    new = row.params(defaults, {}) if params is None else None
    prompts = _prompts(row, layout, defaults, displaced)
    if layout.has_media_fields or type(row.values.get("messages")) is MediaMessages:
        prompts = with_media(prompts, row.values)
    if new is not None:
        row.check_model(defaults, new)
    texts = _completions_to_score(row) if layout.scoring else ()
    if layout.unsupported:
        row.reject_unsupported(layout)
    if new is not None:
        if new.task is not None:
            _refuse_unused(row, new.task, _TASK_FIELDS)
        if texts:  # only the adapter counts
            new = SamplingParams(max_new_tokens=0, temperature=0.0, lora_path=new.lora_path)
        params = defaults.share(key, new)
    assert params is not None
    if layout.suspects or row.extra or displaced:
        defaults.carried_options.add(layout.suspects, value, {**displaced, **row.extra})
    values = row.values
    name = values["id"] if "id" in values else f"row-{row_index}"  # noqa: SIM401 most rows need no text
    return ParsedRow(row_index, name, prompts, params, row.extra, "native", texts, values.get("seed", defaults.seed))


def _completions_to_score(row: RowValues) -> tuple[str | tuple[int, ...], ...]:
    """The row's texts to score, with no field that has no effect on them; empty for a row that generates."""
    if not row.is_scoring:
        return ()
    if "completions" in row.values and "completion" in row.values:
        raise invalid("completions", "is given together with `completion`; keep one of them")
    source: Literal["completion", "completions"] = "completion" if "completion" in row.values else "completions"
    _refuse_unused(row, source, _SCORING_FIELDS)
    texts: Any = row.values[source]
    return texts if source == "completions" else (texts,)


def _refuse_unused(row: RowValues, source: Task | Literal["completion", "completions"], used: Set[str]) -> None:
    """Refuse a field that has no effect next to what the row asks for."""
    for name, spelled in row.spelled.items():
        if name in _DEFAULTS and name not in used and not _is_default(name, row.values[name]):
            raise refuse_with_task(spelled, source)


def _has_pairs(value: Mapping[str, Any]) -> bool:
    """Whether a native row scores documents for a query: other rows may have columns of these names."""
    given = value.get("query") is not None and value["documents"] is not None
    return given and all(value.get(name) is None for name in _NATIVE_SOURCES)


def _pairs(row: RowValues) -> tuple[Prompt, ...]:
    """The row's documents, each with its query."""
    query, given = row.values.get("query"), row.values["documents"]
    if query is None:
        raise RowError(ErrorCode.MISSING_PROMPT, "the row has `documents` and no `query`; give it one", "query")
    if not given:
        raise error_at(ErrorCode.EMPTY_PROMPT, "documents", "is empty; give at least one")
    _check_count(row, "documents", len(given))
    return tuple([TextPrompt(text, (), query) for text in given])


def _is_default(name: str, value: Any) -> bool:
    default = _DEFAULTS[name]
    if type(value) is bool or type(default) is bool:
        return value is default or (value is False and default is None)
    return bool(value == default) or value in ((), {}, "")


def _prompts(row: RowValues, layout: Layout, defaults: RowDefaults, displaced: Mapping[str, Any]) -> tuple[Prompt, ...]:
    """The row's prompts, as conversations if the run or the row uses chat."""
    if "documents" in row.values:
        return _pairs(row)
    sources: Sequence[str] = layout.sources
    if len(sources) != 1 or sources[0] not in row.values:  # null is absent
        sources = [name for name in sources if name in row.values]
        if not sources:
            others = [key for key, field in layout.fields if field is not None and field.name not in SOURCES]
            raise missing_prompt({**displaced, **row.extra}, others, defaults.prompt_column)
        if len(sources) != 1:
            raise row.prompt_error(sources, "`text`, `input_ids`, `input_embeds` or `messages`")
    source = sources[0]
    values = row.values[source]
    if not values or (source == "input_ids" and not all(values)):
        raise error_at(ErrorCode.EMPTY_PROMPT, row.spelled[source], "is empty; give at least one prompt")
    _check_count(row, source, len(values))
    if source == "messages":
        return (chat_prompt(row, layout, values, defaults),)
    if source == "text" and defaults.chat:
        return tuple(chat_prompt(row, layout, ({"role": "user", "content": text},), defaults) for text in values)
    if layout.has_chat_fields:
        row.refuse_chat_fields(row.spelled[source])
    if source == "text":
        return tuple(map(TextPrompt, values))
    if source == "input_embeds":
        return tuple(map(EmbedsPrompt, values))
    return tuple(map(TokenPrompt, values))


def _object(name: str, value: Any) -> dict[str, Any]:
    """A container of fields; `invalid_field` unless it is an object."""
    try:
        return mapping(name, value)
    except RowError as error:
        raise text_remedy(error, mapping, name, value) from None


def _check_count(row: RowValues, source: str, prompts: int) -> None:
    texts: Any = row.values.get("completions")
    if prompts > MAX_ROW_PROMPTS and source != "messages":
        problem = f"has {prompts} prompts; a row may have {MAX_ROW_PROMPTS}: give them in several rows"
        raise invalid(row.spelled[source], problem)
    if texts is not None and (pairs := prompts * len(texts)) > MAX_ROW_PROMPTS:
        problem = f"make {pairs} pairs; a row may have {MAX_ROW_PROMPTS}: give them in several rows"
        raise invalid("completions", f"and the row's prompts {problem}")


def is_openai_line(value: Mapping[str, Any]) -> bool:
    """Whether a row is an OpenAI batch line and not a native row that happens to have such columns.

    A batch line has a `body` object and a `method` or `url`, or any of the three and no native prompt.
    """
    if "body" not in value and "url" not in value and "method" not in value:
        return False  # most native rows
    routed = value.get("method") is not None or value.get("url") is not None
    if routed and type(value.get("body")) is dict:
        return True
    native = any(value.get(name) is not None for name in _NATIVE_SOURCES)
    return not native and (type(value.get("body")) is dict or (routed and "custom_id" in value))


def _parse_openai_line(
    value: Mapping[str, Any], row_index: int, defaults: RowDefaults, displaced: Mapping[str, Any]
) -> ParsedRow:
    """Parse one batch line. `user`, `metadata` and similar fields are carried to the output under `body`."""
    endpoint, deployment = endpoint_of(value)
    if deployment is not None and not defaults.names.split(deployment)[0]:
        raise defaults.names.refusal(deployment, "url")
    row = RowValues()
    envelope = defaults.layout("line", value)
    row.collect(envelope, value)
    if len(row.spelled) > ("id" in row.spelled) or row.extra.get(_NESTED) is not None:
        _refuse_outside_body(row)
    body = _object("body", value.get("body"))
    layout = defaults.layout(endpoint.place, body)
    key = params_key(layout, body)
    params = defaults.cached_params(key)
    row.collect(layout, body, params is not None)
    prompts = _body_prompts(row, layout, body, defaults, endpoint)
    if type(row.values.get("messages")) is MediaMessages:
        prompts = with_media(prompts, row.values)
    if endpoint is EMBEDDINGS:
        row.imply("embed", True, "input")
    if params is None:
        if endpoint is COMPLETIONS and row.values.get("echo") and "logprobs" in row.values:
            row.imply("logprob_start_len", 0, "echo")  # the endpoint's echo includes the prompt's logprobs
        params = row.params(defaults, endpoint.defaults)
        row.check_model(defaults, params)
        params = defaults.share(key, params)
    if layout.unsupported:
        row.reject_unsupported(layout)
    if envelope.suspects or row.extra or displaced:
        defaults.carried_options.add(envelope.suspects, value, {**displaced, **row.extra})
    values = row.values
    name = values["id"] if "id" in values else f"row-{row_index}"  # noqa: SIM401 most rows need no text
    return ParsedRow(
        row_index, name, prompts, params, row.carried(layout), endpoint.dialect, (), values.get("seed", defaults.seed)
    )


def _refuse_outside_body(row: RowValues) -> None:
    """Refuse known fields outside `body`, which a server would ignore."""
    for name in SOURCES:
        if name in row.values:
            spelled = row.spelled[name]
            message = f"the row has a prompt in `{spelled}` and one in `body`; keep one of them"
            raise RowError(ErrorCode.AMBIGUOUS_PROMPT, message, spelled)
    odd = next((spelled for name, spelled in row.spelled.items() if name != "id"), "sampling_params")
    raise invalid(odd, "is outside `body`; in a batch line it must be inside")


def _body_prompts(
    row: RowValues, layout: Layout, body: Mapping[str, Any], defaults: RowDefaults, endpoint: Endpoint
) -> tuple[Prompt, ...]:
    if endpoint is RERANK and "documents" in row.values:
        return _pairs(row)
    if endpoint in (EMBEDDINGS, RERANK):
        needed, other = ("input", "") if endpoint is EMBEDDINGS else ("documents", "")
    else:
        needed, other = ("messages", "prompt") if layout.place == "chat" else ("prompt", "messages")
    if needed not in row.values or (layout.containers and body[other] is not None):
        raise _source_error(row, [name for name in ("prompt", "messages") if body.get(name) is not None], needed)
    prompts = row.values[needed]
    if not prompts or not all(item or type(item) is str for item in prompts):
        what = "at least one message" if needed == "messages" else "text or token ids"
        raise error_at(ErrorCode.EMPTY_PROMPT, needed, f"is empty; give {what}")
    if needed == "messages":
        return (chat_prompt(row, layout, prompts, defaults),)
    _check_count(row, needed, len(prompts))
    return tuple([TextPrompt(item) if type(item) is str else TokenPrompt(item) for item in prompts])


def _source_error(row: RowValues, sources: list[str], needed: str) -> RowError:
    if len(sources) == 1 and needed in ("messages", "prompt"):
        other = CHAT if needed == "prompt" else COMPLETIONS
        message = f"`body` has `{sources[0]}`, but its endpoint needs `{needed}`; set `url` to {other.url}"
        return RowError(ErrorCode.MISSING_PROMPT, message, sources[0])
    return row.prompt_error(sources, f"`{needed}` in `body`")
