"""Conversations to prompts: each is rendered by the chat template, and what the template leaves out is refused.

A template may ignore anything that a row gives it. So each kind of conversation is looked at once: its texts are
replaced by labels, and the labels are looked for in what the template makes of them. It is given in the form in which
the template writes all of it, and what the template leaves out in every form is refused.

A template may leave out parts of earlier turns, as many do with old thoughts. What it writes while a message is the
last one, or is followed by results of tools only, is therefore not lost.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from batchgen.errors import BatchgenError, ErrorCode, ErrorInfo, RowError
from batchgen.request.checks import show
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.chat.forms import (
    LABEL,
    RESULT_ROLES,
    Form,
    Labelled,
    Loss,
    apply_form,
    forms,
    labelled,
    names,
    shape,
)
from batchgen.text.chat.template import ChatTemplate
from batchgen.text.chat.template_process import OverLimit, TemplateFailure

_MAX_SHAPES: Final = 4096
"""Most kinds of conversations that are remembered."""
_HELLO: Final = {"role": "user", "content": "Hello"}
_THOUGHT: Final = {"role": "assistant", "content": "Hi", "reasoning_content": "Greet."}
_FUNCTION: Final = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
_CALL: Final = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
_RESULT: Final = {"role": "tool", "content": "1", "tool_call_id": "abcdefghi", "name": "add"}
_PROBES: Final = (
    ChatPrompt((_HELLO,)),
    ChatPrompt(({"role": "system", "content": "Be brief."}, _HELLO, _THOUGHT, _HELLO)),
    ChatPrompt(
        (_HELLO, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _RESULT),
        ({"type": "function", "function": _FUNCTION},),
    ),
)
"""Conversations on which a variable of the template may have an effect if it has none on a row's own."""

_AS_SYSTEM: Final = "messages of the role developer, which the model's chat template does not have, are given as system"


class Verdict(NamedTuple):
    """How conversations of one shape are given to the template, and what it then leaves out."""

    form: Form
    lost: tuple[Loss, ...]
    misspelt: bool = False
    """Whether the template writes arguments of calls in a spelling that they cannot be converted from."""


class ChatRenderer:
    """Renders conversations with one model's chat template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._verdicts: dict[Hashable, Verdict] = {}
        self.keep_unread = False
        """Whether variables that the template does not read are accepted."""
        self.notes: set[str] = set()
        """What users should know of the conversations so far."""

    def render_all(self, prompts: Sequence[ChatPrompt]) -> list[str | ErrorInfo]:
        """Text of each conversation, with everything that the row gives, or its error.

        The error is `invalid_field` if the template refuses the conversation, and `unsupported_field` if it leaves out
        a part of it.
        """
        formed = [self._given(prompt) for prompt in prompts]
        asked = [
            (prompt, each) for prompt, each in zip(prompts, formed, strict=True) if not isinstance(each, ErrorInfo)
        ]
        texts = iter(self._template.render_all(asked))
        return [
            each if isinstance(each, ErrorInfo) else _finished(prompt, next(texts))
            for prompt, each in zip(prompts, formed, strict=True)
        ]

    def _given(self, prompt: ChatPrompt) -> list[dict[str, Any]] | ErrorInfo:
        """The messages in the form in which the template writes all of them, or the row's error."""
        try:
            return apply_form(prompt.messages, self._verdict(prompt).form)
        except (Exception, OverLimit) as error:  # a template may raise anything about any message
            return _refused(error)

    def _verdict(self, prompt: ChatPrompt) -> Verdict:
        key = shape(prompt)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = assess(self._template, prompt)
            if not self.keep_unread:
                self._check_settings(prompt, verdict)
            if len(self._verdicts) >= _MAX_SHAPES:
                self._verdicts.clear()
            self._verdicts[key] = verdict
            if verdict.form.developer == "system":
                self.notes.add(_AS_SYSTEM)
        if verdict.lost:
            raise _lost(prompt, verdict.lost)
        if verdict.misspelt:
            raise _not_an_object(prompt)
        return verdict

    def _check_settings(self, prompt: ChatPrompt, verdict: Verdict) -> None:
        """Refuse an entry of `chat_template_kwargs` that changes nothing although it asks for something.

        Raises:
            RowError: `unsupported_field`.
        """
        asked = {name: value for name, value in prompt.template_kwargs.items() if value is not None}
        messages = apply_form(prompt.messages, verdict.form) if asked else []
        if asked:
            self._template.render(prompt, messages)  # what it refuses has that error
        for name, value in asked.items():
            if self._has_effect(prompt, messages, name, value) or self._is_default(prompt, messages, name, value):
                continue
            reason = "the model's chat template does not read it;"
            if name in self._template.reads(prompt).variables:
                reason = f"{show(value)} changes nothing in it; give a value that the model's chat template reads, or"
            field = "chat_template_kwargs"
            message = f"`{field}` gives {name!r}, which cannot reach the prompt: {reason} leave it out"
            raise RowError(ErrorCode.UNSUPPORTED_FIELD, message, field)

    def _has_effect(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]], name: str, value: Any) -> bool:
        """Whether a variable with this value changes the text, or whether there is one."""
        others = {key: other for key, other in prompt.template_kwargs.items() if key != name}

        def text(settings: Mapping[str, Any]) -> str | None:
            try:
                return self._template.render(prompt._replace(template_kwargs=settings), messages)
            except (Exception, OverLimit):  # the template may refuse a value, or have no end with it
                return None

        return text({**others, name: value}) != text(others)

    def _is_default(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]], name: str, value: Any) -> bool:
        """Whether the template reads a variable, and this value of it asks for what happens without it."""
        reads = self._template.reads(prompt)
        if name not in reads.variables:
            return False
        if not isinstance(value, bool) and value not in ("", [], {}):
            return str(value) in reads.constants
        return any(
            self._has_effect(probe, probe_messages, name, other)
            for probe, probe_messages in ((prompt, messages), *self._probes)
            for other in (True, False, "text")
        )

    @cached_property
    def _probes(self) -> list[tuple[ChatPrompt, list[dict[str, Any]]]]:
        """The conversations of `_PROBES` that the template takes, in the form that it needs."""
        accepted = []
        for probe in _PROBES:
            try:
                accepted.append((probe, apply_form(probe.messages, assess(self._template, probe).form)))
            except (Exception, OverLimit):  # the template has no such conversations
                continue
        return accepted


def _finished(prompt: ChatPrompt, text: str | Exception | OverLimit) -> str | ErrorInfo:
    """The text, or the row's error: also of a text without the name of a tool."""
    if isinstance(text, BaseException):
        return _refused(text)
    absent = [loss for name, loss in names(prompt).items() if not _is_written(name, text)]
    return _lost(prompt, absent).info if absent else text


def _refused(error: Exception | OverLimit) -> ErrorInfo:
    """The row's error.

    Raises:
        BatchgenError: the error is not the row's.
    """
    if isinstance(error, RowError):
        return error.info
    if isinstance(error, BatchgenError):
        raise error
    lines = str(error).strip().splitlines()
    kind = error.kind if isinstance(error, TemplateFailure) else type(error).__name__
    reason = f"{kind}: {lines[0][:200]}" if lines else kind
    reason = str(error) if isinstance(error, OverLimit) else reason
    message = f"`messages` cannot be rendered by the model's chat template: {reason}"
    return ErrorInfo(ErrorCode.INVALID_FIELD, message, "messages")


def _not_an_object(prompt: ChatPrompt) -> RowError:
    """Error for arguments of a call that the template needs as an object, and that are text of something else."""
    index = next((i for i, message in enumerate(prompt.messages) if message.get("tool_calls")), 0)
    message = (
        f"`messages[{index}].tool_calls` has arguments that are not a JSON object, which the model's chat template "
        "needs; give them as an object, or as its JSON text"
    )
    return RowError(ErrorCode.INVALID_FIELD, message, "messages")


_REMEDIES: Final = {
    "tools": "leave it out, or describe the tools in a system message",
    "tool_calls": "write the call into the content as the model does, or use a model whose template has tool calls",
    "content": "write its text into a message of another role, or leave it out",
}


def _lost(prompt: ChatPrompt, lost: Sequence[Loss]) -> RowError:
    """Error that names what the template leaves out, of the first message or of `tools`."""
    first = lost[0]
    paths = [f"`{loss.path}`" for loss in lost if loss.message == first.message]
    listed = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    if first.message >= 0:
        listed += f" (role {show(prompt.messages[first.message].get('role'))})"
    does = "leaves it out of this conversation" if first.key in ("content", "tool_calls") else "does not read it"
    remedy = _REMEDIES.get(first.key, "leave it out, or write it into the content")
    message = f"{listed} cannot reach the prompt: the model's chat template {does}; {remedy}"
    return RowError(ErrorCode.UNSUPPORTED_FIELD, message, "tools" if first.message < 0 else "messages")


def assess(template: ChatTemplate, prompt: ChatPrompt) -> Verdict:
    """The form in which the template writes most of a conversation, and what it leaves out then.

    Raises:
        Exception: the template refuses every form; the error is the template's own, or that of the row's own form.
    """
    marked = labelled(prompt)
    verdicts: list[Verdict] = []
    refusal: Exception | None = None
    for form in forms(prompt.messages):
        try:
            verdict = _assess_form(template, marked, form)
        except Exception as error:  # a template may raise anything
            if refusal is None or (_is_own_refusal(error) and not _is_own_refusal(refusal)):
                refusal = error
            continue
        if not verdict.lost and not verdict.misspelt:
            return verdict
        verdicts.append(verdict)
    if not verdicts:
        assert refusal is not None, "there is always a form"
        raise refusal
    return min(verdicts, key=lambda verdict: (bool(verdict.lost), verdict.misspelt, len(verdict.lost)))


def _is_own_refusal(error: Exception) -> bool:
    """Whether the template itself refuses a conversation, by `raise_exception`, in words that say why."""
    return isinstance(error, TemplateFailure) and error.kind == "TemplateError"


def _assess_form(template: ChatTemplate, marked: Labelled, form: Form) -> Verdict:
    prompt = marked.prompt
    messages = apply_form(prompt.messages, form)
    text = template.render(prompt, messages)
    written = set(LABEL.findall(text))
    absent = [(label, loss) for label, loss in marked.places.items() if label not in written]
    lost = _without_old_turns(template, prompt, messages, absent)
    switches = {_kind(messages, switch): switch for switch in reversed(marked.switches)}
    lost += [switch for switch in switches.values() if _without(template, prompt, messages, switch) == text]
    misspelt = _misspelt(text, marked) or _writes_none(template, prompt, form, text)
    return Verdict(form, tuple(dict.fromkeys(lost)), misspelt)


def _without_old_turns(
    template: ChatTemplate, prompt: ChatPrompt, messages: list[dict[str, Any]], absent: Iterable[tuple[str, Loss]]
) -> list[Loss]:
    """The losses whose label the template does not write either while their message is at the end."""
    is_written: dict[Hashable, bool] = {}  # by kind of message: a long conversation has few
    lost = []
    for label, loss in absent:
        kind = _kind(messages, loss)
        if kind not in is_written:
            is_written[kind] = label in _labels_at_end(template, prompt, messages, loss.message)
        if not is_written[kind]:
            lost.append(loss)
    return lost


def _kind(messages: list[dict[str, Any]], loss: Loss) -> Hashable:
    """What the templates' treatment of a key depends on: the message's role and its other keys."""
    return (loss.key, *(() if loss.message < 0 else (messages[loss.message].get("role"), *messages[loss.message])))


def _labels_at_end(template: ChatTemplate, prompt: ChatPrompt, messages: list[dict[str, Any]], index: int) -> set[str]:
    """The labels that the template writes for a conversation that ends with message `index`, or with its results."""
    if index < 0:
        return set()
    end = next(
        (i for i in range(index + 1, len(messages)) if messages[i].get("role") not in RESULT_ROLES), len(messages)
    )
    labels: set[str] = set()
    for last in {index + 1, end} - {len(messages)}:
        try:
            begun = prompt._replace(add_generation_prompt=False, continue_final_message=False)
            labels.update(LABEL.findall(template.render(begun, messages[:last])))
        except (Exception, OverLimit):  # conversations may not end here
            continue
    return labels


def _without(template: ChatTemplate, prompt: ChatPrompt, messages: list[dict[str, Any]], switch: Loss) -> str | None:
    """The text without a key; None if the template then raises an error, which is an effect, too."""
    try:
        if switch.message < 0:
            return template.render(prompt._replace(tools=None), messages)
        changed = {key: value for key, value in messages[switch.message].items() if key != switch.key}
        return template.render(prompt, [*messages[: switch.message], changed, *messages[switch.message + 1 :]])
    except (Exception, OverLimit):
        return None


def _misspelt(text: str, marked: Labelled) -> bool:
    """Whether the template writes a list of parts or an object in Python's spelling, or JSON text as a JSON string."""
    marks = [form % label for label in marked.parts for form in ("'text': '%s", '"text": "%s')]
    marks += [form % label for label in marked.arguments for form in ("'%s':", '%s\\"')]
    return any(mark in text for mark in marks)


def _writes_none(template: ChatTemplate, prompt: ChatPrompt, form: Form, text: str) -> bool:
    """Whether the template writes a null content as the word None."""
    if "None" not in text or form.content not in ("own", "null"):
        return False
    for other in ("missing", "empty"):
        try:
            without = template.render(prompt, apply_form(prompt.messages, form._replace(content=other)))
        except (Exception, OverLimit):
            continue
        return text.count("None") > without.count("None")
    return False


def _is_written(text: str, rendered: str) -> bool:
    """Whether a rendered text holds another one, as it is or as JSON writes it."""
    return text in rendered or any(json.dumps(text, ensure_ascii=ascii_)[1:-1] in rendered for ascii_ in (True, False))
