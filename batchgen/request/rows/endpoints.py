"""The endpoint of a batch line: by its `url`, or by its body in formats without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import check_unicode, error_at, invalid, show
from batchgen.request.completion import Dialect
from batchgen.request.fields.field import Place

ENVELOPE = ("method", "url", "body")
"""Keys of a batch line in addition to `custom_id`."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that batch lines may name."""

    url: str
    """The path in OpenAI's API."""
    place: Place
    dialect: Dialect
    defaults: Mapping[str, Any]
    """Defaults of sampling fields that differ from those of native rows."""


COMPLETIONS = Endpoint("/v1/completions", "completions", "openai-completions", MappingProxyType({"max_new_tokens": 16}))
CHAT = Endpoint("/v1/chat/completions", "chat", "openai-chat", MappingProxyType({"max_new_tokens": None}))
EMBEDDINGS = Endpoint("/v1/embeddings", "embeddings", "openai-embeddings", MappingProxyType({}))
RERANK = Endpoint("/v1/rerank", "rerank", "rerank", MappingProxyType({}))
ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS, RERANK)
_BY_URL = {endpoint.url: endpoint for endpoint in ENDPOINTS}
_BY_END = {endpoint.url.removeprefix("/v1/"): endpoint for endpoint in ENDPOINTS}

_PREFIX = re.compile(r"v\d\w*|openai|api|inference")
"""Path segments that servers put directly before `chat/completions` and the like."""
_KNOWN = (
    "responses", "score", "classify", "classifications", "pooling", "moderations", "messages",
    "fim/completions", "agents/completions", "conversations", "ocr", "generate", "audio/transcriptions",
    "audio/translations", "audio/speech", "images/generations", "images/edits", "videos",
)  # fmt: skip
"""Endpoints of batch files elsewhere, by the end of their path."""


def endpoint_of(line: Mapping[str, Any]) -> tuple[Endpoint, str | None]:
    """The endpoint of a batch line, and the model that its `url` names as an Azure deployment.

    A line without `url` gets the endpoint that its body's prompt belongs to.

    Raises:
        RowError: `invalid_field` for a wrong `method` or `url`, `unsupported_field` for an endpoint of another kind.
    """
    method, url = line.get("method"), line.get("url")
    if method == "POST" and type(url) is str and url in _BY_URL:
        return _BY_URL[url], None  # most lines
    check_unicode((method, url), "url")
    if method is not None and not (type(method) is str and method.upper() == "POST"):
        raise invalid("method", f"must be POST in a batch line, or left out, got {show(method)}")
    if url is None:
        return _by_body(line.get("body")), None
    if type(url) is not str:
        raise invalid("url", f"must be {_supported('or')}, got {show(url)}")
    segments = [part for part in url.partition("?")[0].rpartition("://")[2].split("/") if part]
    if "://" in url:
        del segments[:1]  # the host
    found = _BY_END.get("/".join(segments[-2:])) or _BY_END.get("/".join(segments[-1:]))
    before = segments[: -2 if found is CHAT else -1]
    deployment = before[-1] if before[-2:-1] == ["deployments"] else None
    prefixed = not before or deployment is not None or _PREFIX.fullmatch(before[-1])
    if not prefixed or found is None:
        raise _refused(url, segments)
    return found, None if deployment is None else unquote(deployment)


def _by_body(body: Any) -> Endpoint:
    names = ("messages", "prompt", "input", "documents") if isinstance(body, Mapping) else ()
    sources = [name for name in names if body.get(name) is not None]
    if sources == ["input"]:
        problem = f"must be given with `input` in `body`, which several endpoints have; {_supported('and')} run"
        raise invalid("url", problem)
    return {"prompt": COMPLETIONS, "documents": RERANK}.get("".join(sources), CHAT)


def _refused(url: str, segments: list[str]) -> RowError:
    ends = ("/".join(segments[-1:]), "/".join(segments[-2:]))
    if any(end in _KNOWN for end in ends):
        problem = f"is {show(url)}, which this version does not run; {_supported('and')} run"
        return error_at(ErrorCode.UNSUPPORTED_FIELD, "url", problem)
    return invalid("url", f"must be {_supported('or')}, got {show(url)}")


def _supported(word: str) -> str:
    *first, last = (endpoint.url for endpoint in ENDPOINTS)
    return f"{', '.join(first)} {word} {last}"
