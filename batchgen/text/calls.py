"""`ToolCall`, and the interface of formats in which models write calls."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.field_checks import standard_tool

Format = dict[str, Any]
"""A part of a structural tag."""
Schemas = Mapping[str, Any]
"""Name of a function -> the schemas of its arguments by their names; a format may need none, or only the functions."""

_NAME: Final = re.compile(r"[\w.:/-]+", re.ASCII)
_TAG: Final = re.compile(r"[<\[\]](?:\[>|[^{>])+>?")
"""A first tag, up to a name in it."""
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a function without parameters."""


class ToolCall(NamedTuple):
    """One call of a function."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    """The id that the model has written; None: the format has none."""


class Function(NamedTuple):
    """A function that a row describes."""

    name: str
    parameters: Any
    """JSON Schema of its arguments."""


class Span(NamedTuple):
    """A stretch of an output with one call or several, or one that only begins like a call."""

    begin: int
    end: int
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    """Why it cannot be read as a call; it is left in the text then."""


class CallError(ValueError):
    """A text is not a call."""


@dataclass(frozen=True)
class ToolFormat:
    """How models of a family write calls.

    A format reads calls by `_starts` and `_read`, or by its own `_find`, and writes them by `_text_of` and `_tag`.

    Attributes:
        begin: text in front of a call, in some formats with `{}` for the name.
        mark: regular expression of what is in front of calls only, an error where no call follows; none: the first tags
            of `around` and `begin`.
        ends: special tokens that end an output behind its calls.
        needs: what `spans` must know of the row's functions.
        around: texts in front of all calls and behind them, which the row's text does not have.
        separator: between two calls.
        id_length: length of the ids that the family's templates expect; None: any.
        whole: whether calls in their usual form are the whole output.
        others: formats of the family that are read, too, and that its models do not write.
        pattern: regular expression of what is in front of a call, or of all calls, where no other text says it.
    """

    begin: str = ""
    mark: str = ""
    ends: tuple[str, ...] = ()
    needs: Literal["nothing", "functions", "arguments"] = "nothing"
    around: tuple[str, str] = ("", "")
    separator: str = ""
    id_length: int | None = None
    whole: bool = False
    others: tuple[ToolFormat, ...] = ()
    pattern: str = ""

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        """Pattern of what a call, or several, begin with."""
        return re.compile(self.pattern)

    def _read(self, text: str, match: re.Match[str], schemas: Schemas) -> tuple[tuple[ToolCall, ...], int]:
        """The calls behind a match of `_starts`, and where they end; raises `CallError`."""
        raise NotImplementedError

    def _at_starts(self, text: str, schemas: Schemas) -> Iterator[Span]:
        """Calls at each match of `_starts`, or why there are none."""
        at = 0
        while (match := self._starts.search(text, at)) is not None:
            try:
                calls, end = self._read(text, match, schemas)
                span = Span(match.start(), end, calls)
            except (CallError, RecursionError) as error:
                span = Span(match.start(), match.end(), error=str(error))
            yield span
            at = max(span.end, match.start() + 1)

    def _find(self, text: str, schemas: Schemas) -> list[Span]:
        """Calls in a text with special tokens shown, and what begins like one, in order."""
        return list(self._at_starts(text, schemas))

    def spans(self, text: str, schemas: Schemas) -> list[Span]:
        """As `own_spans`, by the first of the family's formats that finds calls, else by the first that finds any."""
        by_format = [self.own_spans(text, schemas), *(each.own_spans(text, schemas) for each in self.others)]
        with_calls = (spans for spans in by_format if any(span.calls for span in spans))
        return next(with_calls, next(filter(None, by_format), []))

    def own_spans(self, text: str, schemas: Schemas) -> list[Span]:
        """Calls that this format finds, what begins like one, and marks that no call follows, in order."""
        spans = self._find(text, schemas)
        pattern = self.mark or "|".join(
            re.escape(each[0]) for each in map(_TAG.match, (self.around[0], self.begin)) if each
        )
        marks = list(re.finditer(pattern, text)) if pattern else []
        ends, alone = [span.end for span in spans], []
        for mark, following in zip(marks, [*(each.start() for each in marks[1:]), len(text)], strict=False):
            at = bisect_right(ends, mark.start())
            if at == len(ends) or spans[at].begin > following:
                alone.append(Span(mark.start(), mark.end(), error=f"no call that can be read follows {mark[0][:60]!r}"))
        return sorted([*spans, *alone], key=lambda span: span.begin) if alone else spans

    def _text_of(self, call: ToolCall, number: int) -> str:
        """The text of one call; `number`: how many are in front of it."""
        raise NotImplementedError

    def _tag(self, function: Function) -> tuple[str, Format, str]:
        """What a call of a function begins with, holds and ends with.

        Raises:
            RowError: `unsupported_schema_keyword`: the format has no text for a schema.
        """
        raise NotImplementedError

    @property
    def _joined(self) -> tuple[str, str, str]:
        """Texts in front of all calls, between two of them, and behind all."""
        return self.around[0], self.separator, self.around[1]

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The text of calls, as the family's models write it."""
        before, between, after = self._joined
        return before + between.join(self._text_of(call, number) for number, call in enumerate(calls)) + after

    def grammar(self, functions: Sequence[Function], *, parallel: bool) -> Format:
        """The structural tag's format of texts that call these functions, at least once.

        `parallel`: whether there may be several calls.
        """
        before, between, after = self._joined
        calls = {
            "type": "tags_with_separator",
            "tags": [
                {"type": "tag", "begin": begin, "content": content, "end": end}
                for begin, content, end in map(self._tag, functions)
            ],
            "separator": between,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        blanks = {"type": "regex", "pattern": "\\n{0,2}"}
        return sequence(blanks, constant(before), calls, constant(after))


def constant(text: str) -> Format | None:
    """A part of exactly this text; None for none."""
    return {"type": "const_string", "value": text} if text else None


def sequence(*parts: Format | None) -> Format:
    """Parts one behind the other; None is left out."""
    elements = [part for part in parts if part is not None]
    return {"type": "sequence", "elements": elements} if elements else {"type": "const_string", "value": ""}


def optional(part: Format) -> Format:
    """A part that may be missing."""
    return {"type": "optional", "content": part}


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[Function]:
    """The functions among a row's `tools`."""
    functions = []
    for tool in tools:
        tool = standard_tool("tools", tool)
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            functions.append(Function(function["name"], function.get("parameters") or _NOTHING))
    return functions


def check_name(name: str) -> str:
    """A name that can be written without quotes.

    Raises:
        RowError: `invalid_field`.
    """
    if not _NAME.fullmatch(name):
        message = f"`tools` has the name {name[:60]!r}, which the model's format of calls cannot hold; use letters, "
        raise RowError(ErrorCode.INVALID_FIELD, f"{message}digits, _ and -", "tools")
    return name


def json_part(schema: Any) -> Format:
    """A part that is a JSON value of a schema."""
    return {"type": "json_schema", "json_schema": schema}


def dumps(value: Any) -> str:
    """JSON text of a value as models write it, in one line."""
    return json.dumps(value, ensure_ascii=False)


def read_json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a position of a text, and where it ends.

    Raises:
        CallError: there is none.
    """
    at = skip_blanks(text, at)
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise CallError("the JSON is nested too deeply") from None
    except CallError:
        raise
    except ValueError as error:
        raise CallError(f"the JSON cannot be read: {getattr(error, 'msg', 'a number is too long')}") from None


def _no_constant(name: str) -> Any:
    raise CallError(f"the JSON has {name}")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise CallError("the JSON has a number that is too large")
    return number


_DECODER: Final = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite)


def skip_blanks(text: str, at: int) -> int:
    """The position of the first character from `at` on that is not blank."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def behind(text: str, at: int, ends: Sequence[str]) -> int:
    """The position behind one of `ends`, which may be missing at the end of the text only.

    Raises:
        CallError: something else follows.
    """
    at = skip_blanks(text, at) if any(ends) else at
    for end in ends:
        if text.startswith(end, at):
            return at + len(end)
    if at < len(text):
        raise CallError(f"{ends[0]!r} does not follow the arguments")
    return at


def arguments_of(value: Any) -> Mapping[str, Any]:
    """The arguments of a call as an object; their JSON text is accepted, too.

    Raises:
        CallError: they are something else.
    """
    if isinstance(value, str):
        text = value.strip()
        value, end = read_json_at(text, 0) if text else ({}, 0)
        if end < len(text):
            raise CallError("text follows the arguments")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CallError("the arguments are not an object")
    return value
