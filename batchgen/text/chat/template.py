"""`ChatTemplate`: a tokenizer's chat templates, rendered in the library's sandbox in a process of limited time.

A template sees the conversation, the tokenizer's special tokens, and one more input: the time, by `strftime_now`. The
time is that of the job, so that equal conversations are equal texts whenever they are rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.request.foreign_text import read_json_file, typed
from batchgen.text.chat.forms import plain_json
from batchgen.text.chat.template_process import (
    CLOCK,
    OverLimit,
    Rendering,
    RenderLimits,
    TemplateReads,
    render_templates,
    template_reads,
)

_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Text appended to a message that the model continues; the prompt ends where it is found."""


class ChatTemplate:
    """The chat template of a transformers tokenizer."""

    def __init__(self, hf: Any, clock: Callable[[], datetime]) -> None:
        """`hf`: the tokenizer, which must have a template. `clock`: gives the time that the template sees."""
        self._hf = hf
        self._clock = clock
        self._special_tokens = dict(hf.special_tokens_map)
        template = hf.chat_template
        self.named: Mapping[str, str] = template if isinstance(template, dict) else {"default": template}
        """Name of a template -> its source. A model has a `default`, and may have a `tool_use` for rows with tools."""
        self.name: str | None = None
        """Name of the template that renders every conversation; None: the one that fits it."""
        self._reads_parts: dict[str, bool] = {}
        """Source of a template -> whether it leaves out content that is text, and renders it as a list of parts.

        Templates of models that read images do so.
        """
        self.limits = RenderLimits()
        """Limits of each rendering."""

    def render(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
        """Text of `messages` with the settings of `prompt`, whose own messages are not used.

        Raises:
            ValueError: a message cannot be continued.
            OverLimit: the template exceeds its limits.
            TemplateFailure: whatever the template or the library raises.
        """
        (text,) = self.render_all([(prompt, messages)])
        if isinstance(text, BaseException):
            raise text
        return text

    def render_all(
        self, asked: Sequence[tuple[ChatPrompt, Sequence[Mapping[str, Any]]]]
    ) -> list[str | Exception | OverLimit]:
        """As `render`, for each prompt and its messages: the text, or the error."""
        renderings = [self._rendering(*each) for each in asked]
        made = [each for each in renderings if isinstance(each, Rendering)]
        texts = iter(render_templates(made, self._clock(), self.limits))
        results = [next(texts) if isinstance(each, Rendering) else each for each in renderings]
        is_open = [prompt.continue_final_message for prompt, _ in asked]
        return [
            _cut(text) if each and isinstance(text, str) else text for each, text in zip(is_open, results, strict=True)
        ]

    def _rendering(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> Rendering | Exception:
        try:
            source = self.source(prompt)
            if not messages:
                raise ValueError("the conversation is empty")
            if self._is_of_parts(source):
                messages = [_in_parts(message) for message in messages]
            if prompt.continue_final_message:
                messages = _with_end_mark(messages)
            tools = plain_json(prompt.tools, "tools") if prompt.tools else None
            settings = plain_json(prompt.template_kwargs, "chat_template_kwargs")
        except (RowError, ValueError) as error:
            return error
        conversation = {"tools": tools, "add_generation_prompt": prompt.add_generation_prompt, "messages": messages}
        return Rendering(source, {"documents": None, **self._special_tokens, **settings, **conversation})

    def _is_of_parts(self, source: str) -> bool:
        if "type" not in source:  # which is how a part is known
            return False
        if source not in self._reads_parts:
            message = {"role": "user", "content": _END_MARK}
            context = {"tools": None, "documents": None, "add_generation_prompt": False, **self._special_tokens}
            forms = [Rendering(source, {**context, "messages": [each]}) for each in (message, _in_parts(message))]
            texts = render_templates(
                forms, self._clock(), self.limits
            )  # a template may refuse either form, or a lone message
            self._reads_parts[source] = [_END_MARK in text for text in texts if isinstance(text, str)] == [False, True]
        return self._reads_parts[source]

    def source(self, prompt: ChatPrompt) -> str:
        """Source of the template that renders `prompt`: a model may have a separate one for tools.

        Raises:
            RowError: `invalid_field`: the model has several templates, and none of them is for this conversation.
        """
        wanted = [self.name] if self.name is not None else ["tool_use"] * bool(prompt.tools) + ["default"]
        source = next((self.named[name] for name in wanted if name in self.named), None)
        if source is None:
            known = f"it has {', '.join(map(repr, sorted(self.named)))}; name one with --chat-template-name"
            field = "tools" if prompt.tools else "messages"
            message = f"`{field}` cannot be rendered: the model has no chat template named {wanted[-1]!r}: {known}"
            raise RowError(ErrorCode.INVALID_FIELD, message, field)
        return source

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The tokenizer's own description of the parts of an answer, if it has one."""
        template = getattr(self._hf, "response_template", None)
        return template if isinstance(template, Mapping) else None

    def reads(self, prompt: ChatPrompt) -> TemplateReads:
        """What the template that renders `prompt` names."""
        return template_reads(self.source(prompt))

    def reads_variable(self, name: str) -> bool:
        """Whether one of the templates reads a variable."""
        return any(name in template_reads(source).variables for source in self.named.values())

    @property
    def clock_text(self) -> dict[str, str] | None:
        """The time as the templates print it, by format; None if they do not read it.

        Two jobs whose values are equal have the same prompts, although their clocks may differ.
        """
        sources = [source for source in self.named.values() if CLOCK in source]
        if not sources:
            return None
        formats: set[str] = set()
        for source in sources:
            known = template_reads(source).clock_formats
            formats |= {"%Y-%m-%dT%H:%M:%S.%f%z"} if known is None else known
        return {form: self._clock().strftime(form) for form in sorted(formats)} or None


def _with_end_mark(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Messages whose last content ends with a mark, where the prompt is cut, as the library does it."""
    content = messages[-1].get("content")
    if isinstance(content, list) and content:
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_MARK}]
    elif isinstance(content, str):
        content += _END_MARK
    else:
        raise ValueError("the last message has no content that could be continued")
    return [*messages[:-1], {**messages[-1], "content": content}]


def _cut(text: str) -> str | Exception:
    """The text in front of the mark."""
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        return ValueError("the template leaves out the content of the last message, so it cannot be continued")
    kept = text[:end]
    return kept if text.startswith(_END_MARK, end) else kept.rstrip()  # the template trims the content


def processor_template(folder: Path) -> str | None:
    """The chat template that a model folder keeps with its processor of images and audio; None if there is none.

    Raises:
        ForeignTextError: a file is damaged.
    """
    for name in ("chat_template.json", "processor_config.json"):
        if (folder / name).is_file():
            template = typed(read_json_file(folder / name), {}).get("chat_template")
            if isinstance(template, str):
                return template
    return None


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose text is a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
