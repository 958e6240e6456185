"""Calls of tools in a finished answer, and the text around them.

Rules:

- Calls are looked for in the text with special tokens shown, since markers of calls often are such tokens.
- A call that does not parse stays in the text, and the error says why. What is not written like a call is text.
- Blanks next to a call are removed. Texts in front of calls and behind them are joined by a line break.
- An id that the model writes is kept. Any other depends on the prompt, the sample and the call's number alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from batchgen.request.fields.params import SamplingParams
from batchgen.request.foreign_text import read_json
from batchgen.request.printable import encodable
from batchgen.text.calls import Schemas, Span, ToolCall, ToolFormat
from batchgen.text.tokens.detokenize import Detokenizer
from batchgen.text.tokens.tokenizer import Tokenizer
from batchgen.text.tools.formats import FORMATS, TemplateCalls

_LETTERS: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ID_LENGTH: Final = 24


class ParsedAnswer(NamedTuple):
    """The answer of a row that describes tools."""

    text: str
    """The text around the calls."""
    calls: tuple[ToolCall, ...]
    error: str | None
    """Why something that begins like a call is none; None if nothing does."""


class CallParser(NamedTuple):
    """How the calls of a row are found; `SamplingParams.tool_calls` is its JSON text."""

    format: ToolFormat
    schemas: Schemas
    parallel: bool

    @staticmethod
    @lru_cache(maxsize=64)
    def of(text: str) -> CallParser:
        """The parser of a row's `tool_calls`."""
        value = read_json(text, unwritable=True)
        template = value.get("template")
        known = FORMATS[value["format"]] if template is None else TemplateCalls(template=json.dumps(template))
        return CallParser(known, value["functions"], value["parallel"])

    def may_call(self, text: str) -> bool:
        """Whether there is a call in a text with special tokens shown, or what begins like one."""
        return bool(self.format.spans(text, self.schemas))

    def parse(self, shown: ShownText, text: str) -> ParsedAnswer:
        """The calls of an answer whose text, calls included, is `text`."""
        spans = self.format.spans(shown.text, self.schemas)
        error = next((encodable(span.error) for span in spans if span.error), None)
        placed = [_with_surroundings(shown.text, span, self.format.around) for span in spans if span.calls]
        if not placed:
            return ParsedAnswer(text, (), error)
        calls = [call for span in placed for call in span.calls]
        ends = [0, *(span.end for span in placed)]
        begins = [*(span.begin for span in placed), len(shown.text)]
        pieces = [shown.visible(begin, end).strip() for begin, end in zip(ends, begins, strict=True)]
        return ParsedAnswer("\n".join(filter(None, pieces)), tuple(calls if self.parallel else calls[:1]), error)


def _with_surroundings(text: str, span: Span, around: tuple[str, str]) -> Span:
    """The span with what a format writes in front of all calls and behind them."""
    before, after = (each.strip() for each in around)
    begin, end = len(text[: span.begin].rstrip()), len(text) - len(text[span.end :].lstrip())
    if before and text.endswith(before, 0, begin):
        span = span._replace(begin=begin - len(before))
    if after and text.startswith(after, end):
        span = span._replace(end=end + len(after))
    return span


class ShownText(NamedTuple):
    """A text with special tokens shown, and which characters the row's own text has."""

    text: str
    hidden: tuple[tuple[int, int], ...]
    """(begin, end) of the characters that the row's text does not have."""

    def visible(self, begin: int, end: int) -> str:
        """The part of a stretch that the row's text has, too."""
        pieces, at = [], begin
        for first, last in self.hidden:
            if first < end and last > at:
                pieces.append(self.text[at : max(at, first)])
                at = max(at, min(last, end))
        return "".join([*pieces, self.text[at:end]])


def shown_text(
    tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams, around: tuple[str, str], length: int | None
) -> ShownText:
    """The text of an answer with special tokens shown.

    Args:
        tokenizer: the model's tokenizer.
        ids: the answer's tokens.
        params: the row's parameters.
        around: characters of the answer in front of its tokens and behind them.
        length: number of visible characters to keep; None: all.
    """
    detokenizer = Detokenizer(tokenizer, False, False)
    hidden: list[tuple[int, int]] = []
    text = around[0]
    for token in ids:
        text += detokenizer.append(token)
        spelled = tokenizer.id_to_token(token) or ""
        if params.skip_special_tokens and token in tokenizer.special_ids and text.endswith(spelled):
            hidden.append((len(text) - len(spelled), len(text)))
    text += detokenizer.flush()
    if length is None:
        return ShownText(text + around[1], tuple(hidden))
    end = length + len(around[0])
    for first, last in hidden:
        if first < end:
            end += last - first
    return ShownText(text[:end], tuple(place for place in hidden if place[1] <= end))


def calls_json(calls: Sequence[ToolCall], prompt_ids: Any, sample_index: int, id_length: int | None) -> str:
    """Calls as the JSON list of `message.tool_calls` of OpenAI.

    Args:
        calls: the calls, in order.
        prompt_ids: [P] ids of the prompt.
        sample_index: index of the sample.
        id_length: length of ids that the model has not written; None: OpenAI's.
    """
    digest = hashlib.blake2b(np.asarray(prompt_ids, np.int32).tobytes(), digest_size=16)
    listed: list[dict[str, Any]] = []
    taken: set[str] = set()
    for number, call in enumerate(calls):
        name = call.id
        if not name or name in taken:
            name = _id(digest.digest(), sample_index, number, id_length)
        taken.add(name)
        arguments = _dumps(call.arguments)
        listed.append({"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    return _dumps(listed)


def _id(prompt: bytes, sample_index: int, number: int, length: int | None) -> str:
    value = int.from_bytes(
        hashlib.blake2b(prompt + f"{sample_index}/{number}".encode(), digest_size=24).digest(), "big"
    )
    letters = []
    for _ in range(length or _ID_LENGTH):
        value, letter = divmod(value, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters) if length else f"call_{''.join(letters)}"


def _dumps(value: Any) -> str:
    """JSON text with characters as they are, if all of them can be written as UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    return text if encodable(text) == text else json.dumps(value)
