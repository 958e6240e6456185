"""Rows to parse, for the tests of row parsing."""

from __future__ import annotations

from typing import Any

from batchgen.request.rows.model_names import ModelNames
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults
from batchgen.request.table.request_table import ParsedRow

PLAIN = RowDefaults(names=ModelNames(frozenset({"llama", "models/llama"})))
HELLO = [{"role": "user", "content": "Hello"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def line(url: str = COMPLETIONS, /, **body: Any) -> dict[str, Any]:
    if "prompt" not in body and "messages" not in body:
        body |= {"prompt": "Hello"} if url == COMPLETIONS else {"messages": HELLO}
    return {"custom_id": "request-1", "method": "POST", "url": url, "body": body}


def text(**fields: Any) -> dict[str, Any]:
    return {"text": "Hello", **fields}


def parse(value: Any, defaults: RowDefaults = PLAIN) -> ParsedRow:
    return parse_row(value, 7, defaults)
