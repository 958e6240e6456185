"""Parser of OpenAI batch lines: `custom_id`, `method`, `url` and a `body` with the fields of that endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import check_unicode, invalid, mapping, show
from batchgen.request.completion import Dialect
from batchgen.request.fields import SOURCES, Place
from batchgen.request.layout import Layout, params_key
from batchgen.request.prompts import Prompt, TextPrompt, TokenPrompt
from batchgen.request.row_values import RowDefaults, RowValues, chat_prompt
from batchgen.request.table import ParsedRow

__all__ = ["is_openai_line", "parse_openai_line", "place_of"]

_ENDPOINTS: dict[str, tuple[Place, Dialect]] = {
    "/v1/completions": ("completions", "openai-completions"),
    "/v1/chat/completions": ("chat", "openai-chat"),
}
_DEFAULTS: dict[Dialect, Mapping[str, Any]] = {
    "openai-completions": {"max_new_tokens": 16},
    "openai-chat": {"max_new_tokens": None},
}
_NATIVE_SOURCES = ("text", "prompt", "input_ids", "input_embeds", "messages")


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


def parse_openai_line(value: Mapping[str, Any], row_index: int, defaults: RowDefaults) -> ParsedRow:
    """Parse one batch line. `user`, `metadata` and similar fields are carried to the output under `body`.

    Raises:
        RowError: as for native rows, and for a `method` or `url` that the format does not have.
    """
    place, dialect = _endpoint(value)
    row = RowValues()
    row.collect(defaults.layout("line", value), value)
    if len(row.spelled) > ("id" in row.spelled) or "sampling_params" in row.extra:
        _refuse_outside_body(row)
    body = mapping("body", value.get("body"))
    layout = defaults.layout(place, body)
    key = params_key(layout, body)
    params = defaults.cached_params(key)
    row.collect(layout, body, params is not None)
    prompts = _prompts(row, layout, body, defaults)
    if params is None:
        if place == "completions" and row.values.get("echo") and "logprobs" in row.values:
            row.imply("logprob_start_len", 0, "echo")  # the endpoint's echo includes the prompt's logprobs
        params = row.params(defaults, _DEFAULTS[dialect])
        row.check_model(defaults, params)
        params = defaults.share(key, params)
    if layout.unsupported:
        row.reject_unsupported(layout)
    given = row.values
    name = given["id"] if "id" in given else f"row-{row_index}"  # noqa: SIM401 most rows need no text
    return ParsedRow(
        row_index, name, prompts, params, row.carried(layout), dialect, (), given.get("seed", defaults.seed)
    )


def place_of(url: Any) -> Place | None:
    """Place of the body fields of an endpoint; None for a URL that the format does not have."""
    return _ENDPOINTS[url][0] if type(url) is str and url in _ENDPOINTS else None


def _endpoint(value: Mapping[str, Any]) -> tuple[Place, Dialect]:
    method, url = value.get("method"), value.get("url")
    if method == "POST" and type(url) is str and url in _ENDPOINTS:
        return _ENDPOINTS[url]
    check_unicode((method, url), "url")
    if method != "POST":
        raise invalid("method", f"must be POST in a batch line, got {show(method)}")
    raise invalid("url", f"must be {' or '.join(_ENDPOINTS)}, got {show(url)}")


def _refuse_outside_body(row: RowValues) -> None:
    """Refuse known fields outside `body`, which a server would ignore."""
    for name in SOURCES:
        if name in row.values:
            spelled = row.spelled[name]
            message = f"the row has a prompt in `{spelled}` and one in `body`; keep one of them"
            raise RowError(ErrorCode.AMBIGUOUS_PROMPT, message, spelled)
    odd = next((spelled for name, spelled in row.spelled.items() if name != "id"), "sampling_params")
    raise invalid(odd, "is outside `body`; in a batch line it must be inside")


def _prompts(row: RowValues, layout: Layout, body: Mapping[str, Any], defaults: RowDefaults) -> tuple[Prompt, ...]:
    needed, other = ("messages", "prompt") if layout.place == "chat" else ("prompt", "messages")
    if needed not in row.values or (layout.containers and body[other] is not None):
        raise _source_error(row, [name for name in ("prompt", "messages") if body.get(name) is not None], needed)
    found = row.values[needed]
    if not found or () in found:
        what = "at least one message" if needed == "messages" else "text or token ids"
        raise RowError(ErrorCode.EMPTY_PROMPT, f"`{needed}` is empty; give {what}", needed)
    if needed == "messages":
        return (chat_prompt(row, layout, found, defaults),)
    return tuple([TextPrompt(item) if type(item) is str else TokenPrompt(item) for item in found])


def _source_error(row: RowValues, sources: list[str], needed: str) -> RowError:
    if len(sources) == 1:
        other = "/v1/chat/completions" if needed == "prompt" else "/v1/completions"
        message = f"`body` has `{sources[0]}`, but its endpoint needs `{needed}`; set `url` to {other}"
        return RowError(ErrorCode.MISSING_PROMPT, message, sources[0])
    return row.prompt_error(sources, f"`{needed}` in `body`")
