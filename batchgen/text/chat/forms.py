"""Forms of a conversation: the same messages, spelled as different chat templates need them, or with labels as texts.

Templates differ in what they expect of a message with tool calls and no text (a null content, none at all, or an empty
one), of a call's arguments (an object or JSON text) and of content parts (a list or one string). A form says which
spelling is used where the row's own is not.

In a labelled conversation every text is a label of digits, which shows whether a template writes it. The template and
the kinds of values decide the result, not the texts, so it holds for all conversations of one `shape`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, Literal, NamedTuple

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.request.foreign_text import ForeignTextError, read_json

REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates and APIs know the thoughts of a message; a message gets all that it has under each."""
IGNORED_KEYS: Final = frozenset(
    {"role", "id", "tool_call_id", "type", "index", "weight", "annotations", "cache_control"}
)
"""Keys of a message that ask for nothing in its text: links between messages, and notes for other programs."""
_DEVELOPER: Final = "developer"
RESULT_ROLES: Final = ("tool", "function")
_FIRST_LABEL: Final = 805_730_000_000
LABEL: Final = re.compile(r"80573\d{7}")
"""A label in a rendered text."""


class Form(NamedTuple):
    """A spelling of a conversation."""

    parts: Literal["own", "text"] = "own"
    """Content parts as given, or their texts joined by line feeds."""
    content: Literal["own", "null", "missing", "empty"] = "own"
    """Content of messages that have no text."""
    arguments: Literal["own", "object", "text"] = "own"
    """Arguments of tool calls; what cannot be converted keeps its form."""
    developer: Literal["own", "system"] = "own"
    """Role of messages of the role developer, which OpenAI's newer models have in place of system."""


def forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[Form]:
    """Forms in which these messages can be given, the row's own first."""
    parts = any(isinstance(message.get("content"), list | tuple) for message in messages)
    calls = any(message.get("tool_calls") for message in messages)
    blank = any(_may_vary(message) for message in messages)
    developer = any(message.get("role") == _DEVELOPER for message in messages)
    for role, *spelling in product(
        ("own", "system") if developer else ("own",),
        ("own", "text") if parts else ("own",),
        ("own", "null", "missing", "empty") if blank else ("own",),
        ("own", "object", "text") if calls else ("own",),
    ):
        yield Form._make((*spelling, role))


def apply_form(messages: Sequence[Mapping[str, Any]], form: Form) -> list[dict[str, Any]]:
    """Copies of the messages in a form, of plain lists and dicts; keys with a null value are left out.

    Raises:
        RowError: `invalid_field`: a message holds a value that JSON does not have, or is nested too deeply.
    """
    try:
        return [_apply(message, index, form) for index, message in enumerate(messages)]
    except RecursionError:
        raise RowError(
            ErrorCode.INVALID_FIELD, "`messages` cannot be rendered: nested too deeply", "messages"
        ) from None


def _apply(message: Mapping[str, Any], index: int, form: Form) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    copy = {key: plain_json(value, f"messages[{index}]") for key, value in kept.items()}
    if form.developer == "system" and copy.get("role") == _DEVELOPER:
        copy["role"] = "system"
    content = copy.get("content")
    if isinstance(content, list) and form.parts == "text":
        copy["content"] = "\n".join(str(part["text"]) for part in content)
    if form.content != "own" and _may_vary(message):
        copy.pop("content", None)
        if form.content != "missing":
            copy["content"] = None if form.content == "null" else ""
    if isinstance(copy.get("tool_calls"), list):
        copy["tool_calls"] = [_with_arguments(call, form.arguments) for call in copy["tool_calls"]]
    thoughts = next((copy[key] for key in REASONING_KEYS if copy.get(key)), None)
    return copy if thoughts is None else {**dict.fromkeys(REASONING_KEYS[:2], thoughts), **copy}


def _may_vary(message: Mapping[str, Any]) -> bool:
    """Whether a message has no text, which templates expect in different spellings."""
    content = message.get("content")
    return content is None or (not content and bool(message.get("tool_calls")))


def call_function(call: Any) -> dict[str, Any] | None:
    """The part of a tool call that holds its name and arguments; None if it has no such part."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else None


def _with_arguments(call: Any, form: Literal["own", "object", "text"]) -> Any:
    function = call_function(call)
    if function is None or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if isinstance(arguments, str):
        parsed = parse_arguments(arguments)
        if not arguments.strip():  # no arguments: an empty text would leave a hole in a template's JSON
            arguments = "{}"
        arguments = parsed if form == "object" and parsed is not None else arguments
    elif form == "text":
        arguments = json.dumps(arguments, ensure_ascii=False)
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The object that the JSON text of a call's arguments holds; None if it is not one."""
    try:
        value = read_json(text) if text.strip() else {}
    except ForeignTextError:
        return None
    return value if isinstance(value, dict) else None


def plain_json(value: Any, field: str) -> Any:
    """A copy of plain JSON types: nothing else may reach a template, whose sandbox knows no other methods.

    Raises:
        RowError: `invalid_field`: a value in `field` is of a type that JSON does not have.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(item, field) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, field) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):  # of a subclass, such as an enumeration
            return kind(value)
    what = f"`{field}` holds a {type(value).__name__}, which JSON does not have"
    raise RowError(ErrorCode.INVALID_FIELD, f"{what}; give text, numbers, lists and objects", field.partition("[")[0])


class Loss(NamedTuple):
    """Something of a row that does not reach the prompt."""

    path: str
    """Its place in the row, such as `messages[1].name`."""
    message: int
    """Index of the message; -1 for `tools`."""
    key: str
    """Key of the message, or `tools`."""


class Labelled(NamedTuple):
    """A conversation whose texts are labels."""

    prompt: ChatPrompt
    places: Mapping[str, Loss]
    """Label -> what is lost if the prompt does not hold it."""
    parts: tuple[str, ...]
    """Labels of content parts."""
    arguments: tuple[str, ...]
    """Labels of keys in the arguments of calls, or of arguments that are not an object."""
    switches: tuple[Loss, ...]
    """Keys whose values are not text: whether they have an effect is seen by leaving them out."""


class _Labeller:
    """Replaces the texts of one conversation by labels."""

    def __init__(self, prompt: ChatPrompt) -> None:
        self._prompt = prompt
        self._places: dict[str, Loss] = {}
        self._count = 0
        self._names: dict[str, str] = {}
        """Name of a called tool -> its label."""
        self._ids: dict[str, str] = {}
        """Id of a call that holds the tool's name -> the same with the label."""
        self._parts: list[str] = []
        self._arguments: list[str] = []
        self._switches: list[Loss] = []

    def run(self) -> Labelled:
        prompt = self._prompt
        messages = tuple(self._message(index, message) for index, message in enumerate(prompt.messages))
        tools = None if prompt.tools is None else tuple(self._tool(i, tool) for i, tool in enumerate(prompt.tools))
        labelled = prompt._replace(messages=messages, tools=tools)
        seen = tuple(self._parts), tuple(self._arguments), tuple(self._switches)
        return Labelled(labelled, self._places, *seen)

    def _new(self, loss: Loss | None) -> str:
        """A label; `loss` if the prompt must hold it."""
        label = str(_FIRST_LABEL + self._count)
        self._count += 1
        if loss is not None:
            self._places[label] = loss
        return label

    def _json(self, value: Any, loss: Loss) -> Any:
        """A JSON value with labels for its keys, texts and integers."""
        if isinstance(value, Mapping):
            return {self._new(loss): self._json(item, loss) for item in value.values()}
        if isinstance(value, list | tuple):
            return [self._json(item, loss) for item in value]
        if isinstance(value, str) and value.strip():
            return self._new(loss)
        return int(self._new(loss)) if type(value) is int else value

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        copy, thoughts = dict(message), dict[str, str]()
        for key, value in message.items():
            loss = Loss(f"messages[{index}].{key}", index, key)
            if key == "content":
                copy[key] = self._content(value, loss)
            elif key == "tool_calls" and isinstance(value, list | tuple):
                copy[key] = [self._call(call, number, loss) for number, call in enumerate(value)]
            elif isinstance(value, str) and key in ("id", "tool_call_id"):
                copy[key] = self._ids.get(value, value)
            elif key in IGNORED_KEYS or not value:
                continue
            elif not isinstance(value, str):
                self._switches.append(loss)
            elif key == "name" and message.get("role") in RESULT_ROLES and value in self._names:
                copy[key] = self._names[value]  # the call before it says the same
            elif value.strip():
                label = thoughts.get(value) or self._new(loss)
                copy[key] = label
                if key in REASONING_KEYS:  # spelled twice, one of them is enough
                    thoughts[value] = label
        return copy

    def _content(self, content: Any, loss: Loss) -> Any:
        if isinstance(content, str):
            return self._new(loss) if content.strip() else content
        if not isinstance(content, list | tuple):
            return content
        parts = []
        for number, part in enumerate(content):
            text = part.get("text")
            if isinstance(text, str) and text.strip():
                label = self._new(loss._replace(path=f"{loss.path}[{number}]"))
                self._parts.append(label)
                part = {**part, "text": label}
            parts.append(part)
        return parts

    def _call(self, call: Any, number: int, loss: Loss) -> Any:
        loss = loss._replace(path=f"{loss.path}[{number}]")
        function = call_function(call)
        if function is None or not isinstance(function.get("name"), str) or not function["name"].strip():
            self._switches.append(loss)
            return call
        changed, name = dict(function), function["name"]
        place = loss.path + (".function" if "function" in call else "")
        label = changed["name"] = self._names[name] = self._new(loss._replace(path=f"{place}.name"))
        if "arguments" in function:
            loss = loss._replace(path=f"{place}.arguments")
            changed["arguments"] = self._call_arguments(function["arguments"], loss)
        copy = {**call, "function": changed} if "function" in call else changed
        if isinstance(call.get("id"), str) and name in call["id"]:  # some families write the id in place of the name
            copy["id"] = self._ids[call["id"]] = call["id"].replace(name, label)
        return copy

    def _call_arguments(self, arguments: Any, loss: Loss) -> Any:
        if isinstance(arguments, str) and parse_arguments(arguments) is None:
            self._arguments.append(label := self._new(loss))
            return f'{label}"'  # the quotation mark shows whether a template writes it as JSON
        value = parse_arguments(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(value, Mapping):
            return arguments
        # Without arguments, a key that need not reach the prompt still shows how the template writes them.
        marked = self._json(value, loss) if value else {self._new(None): True}
        self._arguments += marked
        return json.dumps(marked) if isinstance(arguments, str) else marked

    def _tool(self, number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
        loss = Loss(f"tools[{number}]", -1, "tools")
        function = call_function(tool)
        if function is None or not isinstance(function.get("name"), str) or not function["name"].strip():
            self._switches.append(Loss("tools", -1, "tools"))
            return dict(tool)
        changed = {**function, "name": self._new(loss)}
        return {**tool, "function": changed} if "function" in tool else changed


def labelled(prompt: ChatPrompt) -> Labelled:
    """The conversation with a label for each of its texts."""
    return _Labeller(prompt).run()


def shape(prompt: ChatPrompt) -> Hashable:
    """What a template's choices depend on: conversations with equal values have equal verdicts."""
    called: dict[Any, int] = {}  # name of a called tool -> its number
    messages = tuple(_message_shape(message, called) for message in prompt.messages)
    tools = None if prompt.tools is None else tuple(_tool_shape(tool) for tool in prompt.tools)
    settings = tuple((name, _json_text(value)) for name, value in prompt.template_kwargs.items())
    return messages, tools, settings, prompt.add_generation_prompt, prompt.continue_final_message


def _message_shape(message: Mapping[str, Any], called: dict[Any, int]) -> Hashable:
    kept = [(key, value) for key, value in message.items() if value is not None or key == "content"]
    return tuple((key, None if value is None else _value_shape(key, value, called)) for key, value in kept)


def _value_shape(key: str, value: Any, called: dict[Any, int]) -> Hashable:
    if isinstance(value, str):
        if key == "role":
            return value
        return called[value] if key == "name" and value in called else bool(value.strip())
    if key == "content" and isinstance(value, list | tuple):
        return tuple((part.get("type"), bool(str(part.get("text") or "").strip())) for part in value)
    if key == "tool_calls" and isinstance(value, list | tuple):
        return tuple(_call_shape(call, called) for call in value)
    return _json_text(value)


def _call_shape(call: Any, called: dict[Any, int]) -> Hashable:
    function = call_function(call)
    name = function.get("name") if function is not None else None
    if function is None or not isinstance(name, str):
        return _json_text(call)
    arguments = function.get("arguments")
    value = parse_arguments(arguments) if isinstance(arguments, str) else arguments
    kinds = type(arguments).__name__, value is None, bool(value)
    return called.setdefault(name, len(called)), name in str(call.get("id")), "function" in call, kinds


def _tool_shape(tool: Mapping[str, Any]) -> Hashable:
    function = call_function(tool)
    return tuple(tool), None if function is None else (tuple(function), isinstance(function.get("name"), str))


def _json_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def names(prompt: ChatPrompt) -> dict[str, Loss]:
    """Names of all called and described tools, which every prompt must hold, and where they are first given."""
    losses: dict[str, Loss] = {}
    named = [
        (call, Loss(f"messages[{index}].tool_calls[{number}]", index, "tool_calls"))
        for index, message in enumerate(prompt.messages)
        for number, call in enumerate(message.get("tool_calls") or ())
    ]
    named += [(tool, Loss(f"tools[{number}]", -1, "tools")) for number, tool in enumerate(prompt.tools or ())]
    for described, loss in named:
        function = call_function(described)
        if function is not None and isinstance(function.get("name"), str):
            losses.setdefault(function["name"], loss)
    return losses
