"""From a row's tools to its parameters: how its calls are found in an answer, and the grammar of calls it requires.

The format in which a model calls tools is found by the call that its chat template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from batchgen.errors import ErrorCode, RowError, UsageError
from batchgen.request.checks import invalid, show
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.request.fields.tool_choice import ToolChoice
from batchgen.text.calls import Function, Schemas, ToolCall, ToolFormat, functions_of
from batchgen.text.chat.template_probe import CALL, Written
from batchgen.text.families import AUTO, FROM_TEMPLATE, OFF
from batchgen.text.tokens.tokenizer import Tokenizer
from batchgen.text.tools.formats import DESCRIBED, FORMATS, TemplateCalls, has_calls, known_format
from batchgen.text.tools.values import property_schemas

_MAX_KNOWN: Final = 256
"""Most parameter sets of rows with tools that are remembered."""
_ENOUGH: Final = 0.5
"""Share of a format's markers from which on it is the model's."""
_SCHEMAS: Final = {CALL.name: {name: {"type": "string"} for name in CALL.arguments}}


class ToolParser:
    """The format in which one model calls tools.

    Attributes:
        name: name of the format.
    """

    def __init__(self, name: str, template: Mapping[str, Any] | None, tokenizer: Tokenizer) -> None:
        """`template`: the response template that gives the format, if no name does."""
        self.name = name
        self._template = template
        self._format = FORMATS[name] if template is None else TemplateCalls(template=json.dumps(template))
        ends = (tokenizer.token_to_id(text) for text in self._format.ends)
        self._end_ids = tuple(i for i in ends if i is not None and i in tokenizer.added_ids - tokenizer.eos_ids)
        self._with = lru_cache(_MAX_KNOWN)(_with_calls)

    def params(self, params: SamplingParams, prompt: ChatPrompt) -> SamplingParams:
        """A row's parameters with what follows from its tools.

        Raises:
            RowError: `invalid_field` or `unsupported_field`: the calls that it requires cannot be had.
        """
        functions, choice = functions_of(prompt.tools or ()), prompt.tool_choice
        required = choice.mode == "required"
        if params.constraint is not None:
            if required:
                kind = params.constraint.kind
                raise invalid("tool_choice", f"cannot be combined with `{kind}`: a row has one constraint")
            return params  # it holds for the whole answer
        calls = {"format": self.name, "functions": self._known(functions), "parallel": prompt.parallel_tool_calls}
        if self._template is not None:
            calls["template"] = self._template
        needed = self._required(functions, choice, parallel=prompt.parallel_tool_calls) if required else None
        ends = () if params.ignore_eos else tuple(i for i in self._end_ids if i not in params.stop_token_ids)
        return self._with(params, json.dumps(calls, ensure_ascii=False), needed, ends)

    def _known(self, functions: Sequence[Function]) -> Schemas:
        """What the parser must know of the functions; little, so that rows with other tools share parameters."""
        needs = self._format.needs
        if needs == "nothing":
            return {}
        return {each.name: property_schemas(each.parameters) if needs == "arguments" else {} for each in functions}

    def _required(self, functions: Sequence[Function], choice: ToolChoice, *, parallel: bool) -> str:
        """The text of the constraint `tool_choice`."""
        named = [each for each in functions if each.name in choice.names] if choice.names else list(functions)
        missing = [name for name in choice.names if name not in {each.name for each in functions}]
        if missing or not named:
            names = ", ".join(show(each.name) for each in functions[:8]) or "none"
            what = f"names the function {show(missing[0])}" if missing else "needs a function"
            raise invalid("tool_choice", f"{what}, and the functions in `tools` are: {names}")
        if self._template is not None:
            message = (
                "`tool_choice` cannot be enforced: the tokenizer's response template says how calls are read, and not "
                "how they are written; leave it at auto, or name the format with --tool-parser"
            )
            raise RowError(ErrorCode.UNSUPPORTED_FIELD, message, "tool_choice")
        listed = [{"name": each.name, "parameters": each.parameters} for each in named]
        calls = {"format": self.name, "functions": listed, "parallel": parallel and not choice.once}
        return json.dumps(calls, ensure_ascii=False)


def _with_calls(params: SamplingParams, calls: str, needed: str | None, ends: tuple[int, ...]) -> SamplingParams:
    return replace(params, tool_calls=calls, tool_choice=needed, stop_token_ids=(*params.stop_token_ids, *ends))


def tool_parser_of(tokenizer: Tokenizer, wanted: str) -> ToolParser | None:
    """The format in which a model calls tools; None if none is known. `wanted`: the option `--tool-parser`.

    Raises:
        UsageError: no format has the wanted name.
    """
    if wanted == OFF:
        return None
    if wanted != AUTO:
        if wanted not in FORMATS:
            raise UsageError(f"`--tool-parser` must be {AUTO}, {OFF} or one of {', '.join(FORMATS)}, got {wanted!r}")
        return ToolParser(wanted, None, tokenizer)
    template = tokenizer.template
    response = None if template is None else template.response_template
    if response is not None and has_calls(response):
        name = known_format(response)
        return ToolParser(name or FROM_TEMPLATE, None if name else response, tokenizer)
    special = [text for token in sorted(tokenizer.special_ids) if (text := tokenizer.id_to_token(token))]
    detected = None if tokenizer.written is None else format_of(tokenizer.written, special)
    return None if detected is None else ToolParser(detected, None, tokenizer)


def params_with_tools(params: SamplingParams, prompt: ChatPrompt, parser: ToolParser | None) -> SamplingParams:
    """A row's parameters with what follows from its tools and its `tool_choice`.

    Raises:
        RowError: `invalid_field` or `unsupported_field`: the calls that it requires cannot be had.
    """
    if parser is not None:
        return parser.params(params, prompt)
    if prompt.tool_choice.mode == "required":
        message = (
            "`tool_choice` needs a model whose format of calls is known, and neither the tokenizer nor the chat "
            "template of this one names it; name the format with --tool-parser, or leave it at auto"
        )
        raise RowError(ErrorCode.UNSUPPORTED_FIELD, message, "tool_choice")
    return params


def format_of(written: Written, special: Sequence[str]) -> str | None:
    """Name of the format in which a model calls tools; None if its template writes calls in no known one.

    A format is the model's if it reads the call that the template writes. Of several, it is the one that writes the
    same text, or most of it. Where no call can be read, it is the one whose example or markers the template writes.

    Args:
        written: what the template writes.
        special: special tokens, one of which may end an output.
    """
    call, text = written.call or "", written.tools + (written.call or "")
    readers = [name for name, form in FORMATS.items() if _reads(form, written, special)]
    if readers:
        return max(readers, key=lambda name: _likeness(FORMATS[name], call, CALL))
    shown = [name for name, form in FORMATS.items() if _shows(form, text)]
    marked = max(FORMATS, key=lambda name: _markers(FORMATS[name], text))
    if shown or _markers(FORMATS[marked], text) >= _ENOUGH:
        return next(iter(shown), marked)
    return next((name for words, name in DESCRIBED.items() if words in text), None)


def _markers(form: ToolFormat, text: str) -> float:
    """The share of a format's texts around names and values that is in a text; 0 without the first of them."""
    around = re.split("|".join((CALL.name, *CALL.arguments, *CALL.arguments.values())), form.write([CALL]))
    bare, *pieces = (re.sub(r"[\s\"']", "", each) for each in (text, *around))  # examples have names without quotes
    return 0 if form.whole or pieces[0] not in bare else sum(piece in bare for piece in pieces) / len(pieces)


def _shows(form: ToolFormat, text: str) -> bool:
    """Whether a text has a call as the format writes it, which is an example where nothing is called."""
    calls = [] if form.whole else [call for span in form.own_spans(text, {}) for call in span.calls]
    return any(_likeness(form, text, call)[1] for call in calls)


def _reads(form: ToolFormat, written: Written, special: Sequence[str]) -> bool:
    if written.call is None:
        return False
    texts = _outputs(written, special) if form.whole else [written.call]
    calls = [call for text in texts for span in form.own_spans(text, _SCHEMAS) for call in span.calls]
    return any(call._replace(id=None) == CALL for call in calls)


def _outputs(written: Written, special: Sequence[str]) -> Iterator[str]:
    """What may be the whole output of the model in a turn with a call."""
    assert written.call is not None
    before, after = written.answer
    if not written.call.startswith(before.rstrip()):
        return
    output = written.call[len(before.rstrip()) :]
    ends = [text for text in (after.strip(), *special) if text]
    yield output
    for end in re.finditer("|".join(map(re.escape, ends)) or "(?!)", output):
        yield output[: end.start()]


def _likeness(form: ToolFormat, text: str, call: ToolCall) -> tuple[bool, bool, int]:
    """How much of a text a format writes for a call in it: with the same blanks, or with others."""
    own = form.write([call]).strip()
    bare = "".join(own.split())
    same = bare in "".join(text.split())
    return own in text, same, len(bare) if same else -form.whole
