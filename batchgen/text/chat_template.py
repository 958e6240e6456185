"""`ChatTemplate`: a tokenizer's chat template, rendered in the library's sandbox.

A template sees the conversation, the tokenizer's special tokens, and one more input: the time, by `strftime_now`. The
time is that of the job, so that equal conversations are equal texts whenever they are rendered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from batchgen.request.foreign_text import read_json_file, typed
from batchgen.request.prompts import ChatPrompt
from batchgen.text.chat_forms import plain_json
from batchgen.text.template_budget import Budget, OverBudget, budgeted

_CLOCK = "strftime_now"
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Text appended to a message that the model continues; the prompt ends where it is found."""
_PROBES = (
    [{"role": "user", "content": "One {{ 1 }} <two>\n"}],
    [{"role": "user", "content": " One"}, {"role": "assistant", "content": "Two"}, {"role": "user", "content": ""}],
)
"""Conversations on which the direct call of a template is compared with the library."""


class TemplateReads(NamedTuple):
    """What the source of a template names."""

    variables: frozenset[str]
    """Variables that it reads and does not set."""
    constants: frozenset[str]
    """Texts, and numbers as text, that it names."""
    clock_formats: frozenset[str] | None
    """Formats in which it prints the time; None if one of them is computed."""


class ChatTemplate:
    """The chat template of a transformers tokenizer."""

    def __init__(self, hf: Any, clock: Callable[[], datetime]) -> None:
        """`hf`: the tokenizer, which must have a template. `clock`: gives the time that the template sees."""
        self._hf = hf
        self._clock = clock
        self._special_tokens = dict(hf.special_tokens_map)
        self._templates: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.budget = Budget()
        """What the renderings may still do until it is renewed."""

    def render(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
        """Text of `messages` with the settings of `prompt`, whose own messages are not used.

        Raises:
            ValueError: a message cannot be continued.
            OverBudget: the template does more than `budget` allows.
            Exception: whatever the template or the library raises.
        """
        if self._reads_parts:
            messages = [_in_parts(message) for message in messages]
        if prompt.continue_final_message:
            return self._render_open(prompt, messages)
        return self._render(prompt, messages)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template leaves out content that is text, and renders it as a list of parts.

        Templates of models that read images do so.
        """
        message = {"role": "user", "content": _END_MARK}
        source = next(iter(self.sources))
        if "type" not in source:  # which is how a part is known
            return False
        shown: list[bool] = []
        for given in (message, _in_parts(message)):
            with suppress(Exception):  # a template may refuse either form, or a lone message
                context = {"tools": None, "documents": None, "add_generation_prompt": False, "messages": [given]}
                shown.append(_END_MARK in self._call(source, {**self._special_tokens, **context}))
        return shown == [False, True]

    def _render(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
        if not messages:
            raise ValueError("the conversation is empty")
        tools = plain_json(prompt.tools, "tools") if prompt.tools else None
        settings = plain_json(prompt.template_kwargs, "chat_template_kwargs")
        if not self._direct:
            if any(_CLOCK in source for source in self.sources):
                raise ValueError("the template reads the time, and the tokenizer's class renders it in its own way")
            options = {"add_generation_prompt": prompt.add_generation_prompt, "tokenize": False}
            with suppress(Exception):  # the library counts nothing, so the work is measured first
                self._call(
                    self.source(prompt), {**self._special_tokens, **settings, "tools": tools, "messages": messages}
                )
            return str(self._hf.apply_chat_template(messages, tools=tools, **options, **settings))
        given = {"tools": tools, "add_generation_prompt": prompt.add_generation_prompt, "messages": messages}
        return self._call(self.source(prompt), {"documents": None, **self._special_tokens, **settings, **given})

    def _render_open(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
        """Text that ends with the content of the last message, as the library does it."""
        content = messages[-1].get("content") if messages else None
        if isinstance(content, list) and content:
            part = {**content[-1], "text": content[-1]["text"] + _END_MARK}
            content = [*content[:-1], part]
        elif isinstance(content, str):
            content += _END_MARK
        else:
            raise ValueError("the last message has no content that could be continued")
        text = self._render(prompt, [*messages[:-1], {**messages[-1], "content": content}])
        end = text.rfind(_END_MARK.rstrip())
        if end < 0:
            raise ValueError("the template leaves out the content of the last message, so it cannot be continued")
        kept = text[:end]
        return kept if text.startswith(_END_MARK, end) else kept.rstrip()  # the template trims the content

    def plain_call(self) -> Any:
        """Function of a list of plain messages that gives their text with default settings; None if there is none.

        It is the same as `render`, with everything but the messages prepared once.
        """
        if not self._direct:
            return None
        source = self.source(ChatPrompt(()))
        given = {"documents": None, **self._special_tokens, "tools": None, "add_generation_prompt": True}

        def call(messages: list[Mapping[str, Any]]) -> str:
            return self._call(source, {**given, "messages": messages})

        return call

    def source(self, prompt: ChatPrompt) -> str:
        """Source of the template that renders `prompt`: a model may have a separate one for tools."""
        return str(self._hf.get_chat_template(tools=list(prompt.tools) if prompt.tools else None))

    @property
    def sources(self) -> Sequence[str]:
        """Sources of all templates of the tokenizer."""
        template = self._hf.chat_template
        return list(map(str, template.values())) if isinstance(template, dict) else [str(template)]

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The tokenizer's own description of the parts of an answer, if it has one."""
        found = getattr(self._hf, "response_template", None)
        return found if isinstance(found, Mapping) else None

    def reads(self, prompt: ChatPrompt) -> TemplateReads:
        """What the template that renders `prompt` names."""
        return _template_reads(self.source(prompt))

    def reads_variable(self, name: str) -> bool:
        """Whether one of the templates reads a variable; false if none can be parsed, which rendering reports."""
        with suppress(Exception):
            return any(name in _template_reads(source).variables for source in self.sources)
        return False

    @property
    def clock_text(self) -> dict[str, str] | None:
        """The time as the templates print it, by format; None if they do not read it.

        Two jobs whose values are equal have the same prompts, although their clocks may differ.
        """
        sources = [source for source in self.sources if _CLOCK in source]
        if not sources:
            return None
        formats: set[str] = set()
        for source in sources:
            found = _template_reads(source).clock_formats
            formats |= {"%Y-%m-%dT%H:%M:%S.%f%z"} if found is None else found
        return {form: self._clock().strftime(form) for form in sorted(formats)} or None

    def _call(self, source: str, variables: Mapping[str, Any]) -> str:
        template, common = self._compiled(source)
        # The same as `Template.render`, with the globals prepared once.
        context = template.environment.context_class(
            template.environment, {**common, **variables}, template.name, template.blocks, globals=common
        )
        return str(template.environment.concat(template.root_render_func(context)))

    def _compiled(self, source: str) -> tuple[Any, dict[str, Any]]:
        """The template as compiled by the library, and its globals with this job's clock."""
        found = self._templates.get(source)
        if found is None:
            if re.search(r"\|\s*random\b", source):
                _refuse_chance()
            template = budgeted(_environment(), source, self.budget)
            own = {_CLOCK: self._strftime_now, "lipsum": _refuse_chance}
            found = self._templates[source] = template, {**template.globals, **own}
        return found

    def _strftime_now(self, form: str) -> str:
        return self._clock().strftime(form)

    @cached_property
    def _direct(self) -> bool:
        """Whether a template is called directly: the tokenizer's class renders as all do, and the texts are equal."""
        from transformers import PreTrainedTokenizerBase  # as in `Tokenizer.load`
        from transformers.utils import chat_template_utils

        usual = type(self._hf).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        if not usual or not hasattr(chat_template_utils, "_compile_jinja_template"):
            return False
        try:
            source, given = self.source(ChatPrompt(())), {"documents": None, **self._special_tokens, "tools": None}
            for messages in _PROBES:
                found = self._call(source, {**given, "add_generation_prompt": True, "messages": messages})
                if not self._same(messages, found):
                    return False
        except (Exception, OverBudget):  # the template refuses the probe
            return True
        return True

    def _same(self, messages: list[dict[str, str]], text: str) -> bool:
        if any(_CLOCK in source for source in self.sources):
            return True  # the library's text has another time
        return bool(self._hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == text)


def _environment() -> Any:
    """The library's sandbox. It is taken from an empty template: to compile another one may compute its constants."""
    from transformers.utils import chat_template_utils  # as in `Tokenizer.load`

    return chat_template_utils._compile_jinja_template("").environment


def _refuse_chance(*_: object) -> NoReturn:
    raise ValueError("the template draws at random, so equal conversations would give different prompts")


@lru_cache(maxsize=8)
def _template_reads(source: str) -> TemplateReads:
    """What a template names, from its syntax tree."""
    from jinja2 import meta, nodes

    tree = _environment().parse(source)
    constants = (node.value for node in tree.find_all(nodes.Const) if not isinstance(node.value, bool))
    named = sum(node.name == _CLOCK for node in tree.find_all(nodes.Name))
    tested = sum(getattr(test.node, "name", None) == _CLOCK for test in tree.find_all(nodes.Test))
    formats = [
        call.args[0].value if len(call.args) == 1 and isinstance(call.args[0], nodes.Const) else None
        for call in tree.find_all(nodes.Call)
        if getattr(call.node, "name", None) == _CLOCK
    ]
    known = None not in formats and len(formats) + tested == named  # else it may be called under another name
    variables = frozenset(meta.find_undeclared_variables(tree))
    return TemplateReads(variables, frozenset(map(str, constants)), frozenset(map(str, formats)) if known else None)


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
