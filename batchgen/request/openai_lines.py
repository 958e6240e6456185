"""Parser of OpenAI batch lines: `custom_id`, `method`, `url` and a `body` with the fields of that endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import check_unicode, invalid, mapping, show
from batchgen.request.completion import Dialect
from batchgen.request.fields import Place
from batchgen.request.prompts import Prompt, TextPrompt, TokenPrompt
from batchgen.request.row_values import RowDefaults, RowValues, chat_prompt
from batchgen.request.table import ParsedRow

__all__ = ["ENVELOPE", "is_openai_line", "parse_openai_line", "place_of"]

_ENDPOINTS: dict[str, tuple[Place, Dialect]] = {
    "/v1/completions": ("completions", "openai-completions"),
    "/v1/chat/completions": ("chat", "openai-chat"),
}
_DEFAULTS: dict[Dialect, Mapping[str, Any]] = {
    "openai-completions": {"max_new_tokens": 16},
    "openai-chat": {"max_new_tokens": None},
}
ENVELOPE = ("method", "url", "body")
"""Keys of a batch line in addition to `custom_id`."""
_NATIVE_SOURCES = ("text", "prompt", "input_ids", "input_embeds", "messages")
_ALL_SOURCES = ("prompt", "messages")


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


def parse_openai_line(value: Mapping[str, Any], row_id: str, row_index: int, defaults: RowDefaults) -> ParsedRow:
    """Parse one batch line. `user`, `metadata` and similar fields are carried to the output under `body`.

    Raises:
        RowError: as for native rows, and for a `method` or `url` that the format does not have.
    """
    place, dialect = _endpoint(value)
    envelope = RowValues()
    envelope.collect({key: item for key, item in value.items() if key not in ENVELOPE}, "row")
    _refuse_outside_body(envelope)
    body = mapping("body", value.get("body"))
    sources = [name for name in _ALL_SOURCES if body.get(name) is not None]
    wrong = "messages" if place == "completions" else "prompt"
    row = RowValues()
    row.collect({key: item for key, item in body.items() if key != wrong}, place)
    if sources == [wrong] or len(sources) != 1:
        raise _source_error(row, sources, place)
    prompts = _prompts(row, place, defaults)
    if place == "completions" and row.values.get("echo") and "logprobs" in row.values:
        row.imply("logprob_start_len", 0, "echo")  # the endpoint's echo includes the prompt's logprobs
    params = row.params(defaults, _DEFAULTS[dialect])
    row.check_model(defaults, params)
    row.reject_unsupported()
    extra = {**envelope.extra, "body": row.carried} if row.carried else envelope.extra
    return ParsedRow(row_index, row_id, prompts, params, extra, dialect)


def place_of(url: Any) -> Place | None:
    """Place of the body fields of an endpoint; None for a URL that the format does not have."""
    return _ENDPOINTS[url][0] if type(url) is str and url in _ENDPOINTS else None


def _endpoint(value: Mapping[str, Any]) -> tuple[Place, Dialect]:
    method, url = value.get("method"), value.get("url")
    check_unicode((method, url), "url")
    if method != "POST":
        raise invalid("method", f"must be POST in a batch line, got {show(method)}")
    if type(url) is not str or url not in _ENDPOINTS:
        raise invalid("url", f"must be {' or '.join(_ENDPOINTS)}, got {show(url)}")
    return _ENDPOINTS[url]


def _refuse_outside_body(envelope: RowValues) -> None:
    """Refuse known fields outside `body`, which a server would ignore."""
    for name in envelope.sources():
        spelled = envelope.spelled[name]
        message = f"the row has a prompt in `{spelled}` and one in `body`; keep one of them"
        raise RowError(ErrorCode.AMBIGUOUS_PROMPT, message, spelled)
    odd = next((spelled for name, spelled in envelope.spelled.items() if name != "id"), None)
    if odd is None and "sampling_params" in envelope.extra:
        odd = "sampling_params"
    if odd is not None:
        raise invalid(odd, "is outside `body`; in a batch line it must be inside")


def _source_error(row: RowValues, sources: list[str], place: Place) -> RowError:
    needed = "prompt" if place == "completions" else "messages"
    if len(sources) == 1:
        other = "/v1/chat/completions" if place == "completions" else "/v1/completions"
        message = f"`body` has `{sources[0]}`, but its endpoint needs `{needed}`; set `url` to {other}"
        return RowError(ErrorCode.MISSING_PROMPT, message, sources[0])
    return row.prompt_error(sources, f"`{needed}` in `body`")


def _prompts(row: RowValues, place: Place, defaults: RowDefaults) -> tuple[Prompt, ...]:
    if place == "chat":
        messages = row.values["messages"]
        if not messages:
            raise RowError(ErrorCode.EMPTY_PROMPT, "`messages` is empty; give at least one message", "messages")
        return (chat_prompt(row, messages, defaults),)
    found = row.values["prompt"]
    if not found or () in found:
        raise RowError(ErrorCode.EMPTY_PROMPT, "`prompt` is empty; give text or token ids", "prompt")
    return tuple(TextPrompt(item) if type(item) is str else TokenPrompt(item) for item in found)
