"""What of a conversation a chat template leaves out, found in the rendered text.

Every text that a row gives a template is replaced by a label of digits, and the labels are looked for in what the
template makes of the conversation. The template and the kinds of values decide the result, not the texts, so it holds
for all conversations of one `shape`.

A template may leave out parts of earlier turns, as many do with old thoughts. What it writes while a message is the
last one, or is followed by results of tools only, is therefore not lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from batchgen.request.prompts import ChatPrompt
from batchgen.text.chat_forms import REASONING_KEYS, Form, apply_form, call_function, forms, parse_arguments
from batchgen.text.chat_template import ChatTemplate

IGNORED_KEYS: Final = frozenset(
    {"role", "id", "tool_call_id", "type", "index", "weight", "annotations", "cache_control"}
)
"""Keys of a message that ask for nothing in its text: links between messages, and notes for other programs."""
_RESULT_ROLES: Final = ("tool", "function")
_FIRST_LABEL: Final = 805_730_000_000
_LABEL: Final = re.compile(r"80573\d{7}")


class Loss(NamedTuple):
    """Something of a row that does not reach the prompt."""

    path: str
    """Its place in the row, such as `messages[1].name`."""
    message: int
    """Index of the message; -1 for `tools`."""
    key: str
    """Key of the message, or `tools`."""


class Verdict(NamedTuple):
    """How conversations of one shape are given to the template, and what it then leaves out."""

    form: Form
    lost: tuple[Loss, ...]
    misspelt: bool = False
    """Whether the template writes arguments of calls in a spelling that they cannot be converted from."""


class _Labelled(NamedTuple):
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


class _Labels:
    """Labels of one conversation, in order."""

    def __init__(self) -> None:
        self.places: dict[str, Loss] = {}
        self._count = 0

    def new(self, loss: Loss | None) -> str:
        """A label; `loss` if the prompt must hold it."""
        label = str(_FIRST_LABEL + self._count)
        self._count += 1
        if loss is not None:
            self.places[label] = loss
        return label

    def json(self, value: Any, loss: Loss) -> Any:
        """A JSON value with labels for its keys, texts and integers."""
        if isinstance(value, Mapping):
            return {self.new(loss): self.json(item, loss) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(item, loss) for item in value]
        if isinstance(value, str) and value.strip():
            return self.new(loss)
        return int(self.new(loss)) if type(value) is int else value


class _Labeller:
    """Replaces the texts of one conversation by labels."""

    def __init__(self, prompt: ChatPrompt) -> None:
        self._prompt = prompt
        self._labels = _Labels()
        self._names: dict[str, str] = {}
        """Name of a called tool -> its label."""
        self._ids: dict[str, str] = {}
        """Id of a call that holds the tool's name -> the same with the label."""
        self._parts: list[str] = []
        self._arguments: list[str] = []
        self._switches: list[Loss] = []

    def run(self) -> _Labelled:
        prompt = self._prompt
        messages = tuple(self._message(index, message) for index, message in enumerate(prompt.messages))
        tools = None if prompt.tools is None else tuple(self._tool(i, tool) for i, tool in enumerate(prompt.tools))
        labelled = prompt._replace(messages=messages, tools=tools)
        found = tuple(self._parts), tuple(self._arguments), tuple(self._switches)
        return _Labelled(labelled, self._labels.places, *found)

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
            elif key == "name" and message.get("role") in _RESULT_ROLES and value in self._names:
                copy[key] = self._names[value]  # the call before it says the same
            elif value.strip():
                label = thoughts.get(value) or self._labels.new(loss)
                copy[key] = label
                if key in REASONING_KEYS:  # spelled twice, one of them is enough
                    thoughts[value] = label
        return copy

    def _content(self, content: Any, loss: Loss) -> Any:
        if isinstance(content, str):
            return self._labels.new(loss) if content.strip() else content
        if not isinstance(content, list | tuple):
            return content
        parts = []
        for number, part in enumerate(content):
            text = part.get("text")
            if isinstance(text, str) and text.strip():
                label = self._labels.new(loss._replace(path=f"{loss.path}[{number}]"))
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
        label = changed["name"] = self._names[name] = self._labels.new(loss._replace(path=f"{place}.name"))
        if "arguments" in function:
            loss = loss._replace(path=f"{place}.arguments")
            changed["arguments"] = self._call_arguments(function["arguments"], loss)
        copy = {**call, "function": changed} if "function" in call else changed
        if isinstance(call.get("id"), str) and name in call["id"]:  # some families write the id in place of the name
            copy["id"] = self._ids[call["id"]] = call["id"].replace(name, label)
        return copy

    def _call_arguments(self, given: Any, loss: Loss) -> Any:
        if isinstance(given, str) and parse_arguments(given) is None:
            self._arguments.append(label := self._labels.new(loss))
            return f'{label}"'  # the quotation mark shows whether a template writes it as JSON
        value = parse_arguments(given) if isinstance(given, str) else given
        if not isinstance(value, Mapping):
            return given
        # Without arguments, a key that need not reach the prompt still shows how the template writes them.
        found = self._labels.json(value, loss) if value else {self._labels.new(None): True}
        self._arguments += found
        return json.dumps(found) if isinstance(given, str) else found

    def _tool(self, number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
        loss = Loss(f"tools[{number}]", -1, "tools")
        function = call_function(tool)
        if function is None or not isinstance(function.get("name"), str) or not function["name"].strip():
            self._switches.append(Loss("tools", -1, "tools"))
            return dict(tool)
        changed = {**function, "name": self._labels.new(loss)}
        return {**tool, "function": changed} if "function" in tool else changed


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
    found = parse_arguments(arguments) if isinstance(arguments, str) else arguments
    kinds = type(arguments).__name__, found is None, bool(found)
    return called.setdefault(name, len(called)), name in str(call.get("id")), "function" in call, kinds


def _tool_shape(tool: Mapping[str, Any]) -> Hashable:
    function = call_function(tool)
    return tuple(tool), None if function is None else (tuple(function), isinstance(function.get("name"), str))


def _json_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def assess(template: ChatTemplate, prompt: ChatPrompt) -> Verdict:
    """The form in which the template writes most of a conversation, and what it leaves out then.

    Raises:
        Exception: the template refuses every form; the error is that of the row's own form.
    """
    labelled = _Labeller(prompt).run()
    found: list[Verdict] = []
    refusal: Exception | None = None
    for form in forms(prompt.messages):
        try:
            verdict = _assess_form(template, labelled, form)
        except Exception as error:  # a template may raise anything
            refusal = refusal or error
            continue
        if not verdict.lost and not verdict.misspelt:
            return verdict
        found.append(verdict)
    if not found:
        assert refusal is not None, "there is always a form"
        raise refusal
    return min(found, key=lambda verdict: (bool(verdict.lost), verdict.misspelt, len(verdict.lost)))


def _assess_form(template: ChatTemplate, labelled: _Labelled, form: Form) -> Verdict:
    prompt = labelled.prompt
    messages = apply_form(prompt.messages, form)
    text = template.render(prompt, messages)
    written = set(_LABEL.findall(text))
    absent = [(label, loss) for label, loss in labelled.places.items() if label not in written]
    lost = _without_old_turns(template, prompt, messages, absent)
    lost += [switch for switch in labelled.switches if _without(template, prompt, messages, switch) == text]
    misspelt = _misspelt(text, labelled) or _writes_none(template, prompt, form, text)
    return Verdict(form, tuple(dict.fromkeys(lost)), misspelt)


def _without_old_turns(
    template: ChatTemplate, prompt: ChatPrompt, messages: list[dict[str, Any]], absent: Iterable[tuple[str, Loss]]
) -> list[Loss]:
    """The losses whose label the template does not write either while their message is at the end."""
    written: dict[int, set[str]] = {}
    lost = []
    for label, loss in absent:
        if loss.message not in written:
            written[loss.message] = _labels_at_end(template, prompt, messages, loss.message)
        if label not in written[loss.message]:
            lost.append(loss)
    return lost


def _labels_at_end(template: ChatTemplate, prompt: ChatPrompt, messages: list[dict[str, Any]], index: int) -> set[str]:
    """The labels that the template writes for a conversation that ends with message `index`, or with its results."""
    if index < 0:
        return set()
    end = next(
        (i for i in range(index + 1, len(messages)) if messages[i].get("role") not in _RESULT_ROLES), len(messages)
    )
    found: set[str] = set()
    for last in {index + 1, end} - {len(messages)}:
        try:
            begun = prompt._replace(add_generation_prompt=False, continue_final_message=False)
            found.update(_LABEL.findall(template.render(begun, messages[:last])))
        except Exception:  # conversations may not end here
            continue
    return found


def _without(template: ChatTemplate, prompt: ChatPrompt, messages: list[dict[str, Any]], switch: Loss) -> str | None:
    """The text without a key; None if the template then raises an error, which is an effect, too."""
    try:
        if switch.message < 0:
            return template.render(prompt._replace(tools=None), messages)
        changed = {key: value for key, value in messages[switch.message].items() if key != switch.key}
        return template.render(prompt, [*messages[: switch.message], changed, *messages[switch.message + 1 :]])
    except Exception:
        return None


def _misspelt(text: str, labelled: _Labelled) -> bool:
    """Whether the template writes a list of parts or an object in Python's spelling, or JSON text as a JSON string."""
    marks = [form % label for label in labelled.parts for form in ("'text': '%s", '"text": "%s')]
    marks += [form % label for label in labelled.arguments for form in ("'%s':", '%s\\"')]
    return any(mark in text for mark in marks)


def _writes_none(template: ChatTemplate, prompt: ChatPrompt, form: Form, text: str) -> bool:
    """Whether the template writes a null content as the word None."""
    if "None" not in text or form.content not in ("own", "null"):
        return False
    for other in ("missing", "empty"):
        try:
            without = template.render(prompt, apply_form(prompt.messages, form._replace(content=other)))
        except Exception:
            continue
        return text.count("None") > without.count("None")
    return False


def is_written(text: str, rendered: str) -> bool:
    """Whether a rendered text holds another one, as it is or as JSON writes it."""
    return text in rendered or any(json.dumps(text, ensure_ascii=ascii_)[1:-1] in rendered for ascii_ in (True, False))


def names(prompt: ChatPrompt) -> Sequence[tuple[str, Loss]]:
    """Names of all called and described tools, which every prompt must hold."""
    found = []
    for index, message in enumerate(prompt.messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call_function(call)
            if function is not None and isinstance(function.get("name"), str):
                loss = Loss(f"messages[{index}].tool_calls[{number}]", index, "tool_calls")
                found.append((function["name"], loss))
    for number, tool in enumerate(prompt.tools or ()):
        function = call_function(tool)
        if function is not None and isinstance(function.get("name"), str):
            found.append((function["name"], Loss(f"tools[{number}]", -1, "tools")))
    return found
