"""Chat templates: messages prepared for a template, and a fast renderer for plain conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from batchgen.errors import ErrorCode, RowError
from batchgen.request.prompts import ChatPrompt

PARTS_PROBE = [
    {"role": "user", "content": [{"type": "text", "text": "first-part"}, {"type": "text", "text": "second-part"}]}
]
"""Conversation that shows whether a template reads content parts; see `reads_parts`."""


def reads_parts(rendered: str) -> bool:
    """Whether a template reads content parts instead of printing the list; `rendered` is its text of `PARTS_PROBE`."""
    return "first-part" in rendered and "second-part" in rendered and "'text'" not in rendered.replace('"', "'")


def prepare_messages(messages: tuple[Mapping[str, Any], ...], *, keep_parts: bool) -> list[dict[str, Any]]:
    """Copies of `messages` in the form that chat templates expect.

    Text parts are joined by newlines unless `keep_parts`, a null content becomes an empty string, and the arguments of
    a tool call are parsed from JSON text, since templates write them as JSON themselves.

    Raises:
        RowError: `invalid_field`: arguments are not a JSON object.
    """
    prepared = []
    for index, message in enumerate(messages):
        copy = dict(message)
        content = copy.get("content")
        if content is None:  # as with tool calls; templates would print None
            copy["content"] = ""
        if isinstance(content, list | tuple) and not keep_parts:
            copy["content"] = "\n".join(part["text"] for part in content)
        if isinstance(copy.get("tool_calls"), list):
            copy["tool_calls"] = [_parse_tool_call(call, index) for call in copy["tool_calls"]]
        prepared.append(copy)
    return prepared


def template_inputs(prompt: ChatPrompt) -> list[tuple[str, str]]:
    """(field, variable name) of each input that reaches the prompt only if the template reads that variable."""
    asked = [("tools", "tools")] if prompt.tools else []
    asked += [("chat_template_kwargs", name) for name in prompt.template_kwargs]
    if any(message.get("tool_calls") for message in prompt.messages):
        asked.append(("messages", "tool_calls"))
    return asked


def check_template_reads(template: str, asked: Iterable[tuple[str, str]]) -> None:
    """Reject inputs that the template would silently ignore because it never names them.

    Args:
        template: source of the chat template.
        asked: inputs as `template_inputs` lists them.

    Raises:
        RowError: `unsupported_field`: the template does not name an input.
    """
    for field, name in asked:
        if not names_variable(template, name):
            what = f"`{field}`" if name == field else f"`{field}` gives {name!r}, which"
            message = f"{what} cannot reach the prompt: the model's chat template does not read it; leave it out"
            raise RowError(ErrorCode.UNSUPPORTED_FIELD, message, field)


def names_variable(template: str, name: str) -> bool:
    """Whether the source of a template contains a name; any occurrence of the word counts."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template) is not None


def _parse_tool_call(call: Any, index: int) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        where = f"messages[{index}].tool_calls"
        raise RowError(ErrorCode.INVALID_FIELD, f"`{where}` has arguments that are not a JSON object", "messages")
    return {**call, "function": {**function, "arguments": parsed}}


_PLAIN_KEYS = {"role", "content"}
_PROBES = (
    [{"role": "user", "content": "One {{ 1 }} <two>\n"}],
    [{"role": "user", "content": " One"}, {"role": "assistant", "content": "Two"}, {"role": "user", "content": ""}],
)
"""Conversations on which the fast renderer is compared with the library."""


class PlainRenderer:
    """Renderer of plain conversations that calls the compiled template directly.

    The library copies every message and jinja rebuilds the globals for each conversation; both cost more than most
    templates.
    """

    def __init__(self, template: Any, variables: Mapping[str, Any]) -> None:
        """`template`: template as compiled by the library. `variables`: its variables other than `messages`."""
        self._template = template
        self._globals = dict(template.globals)
        self._variables = {**self._globals, **variables}

    def render(self, prompt: ChatPrompt) -> str | None:
        """Text of a conversation; None if it is not plain or the template raises an error."""
        if not _is_plain_text(prompt):
            return None
        template = self._template
        variables = {**self._variables, "messages": list(prompt.messages)}
        # The same as `Template.render`, with the globals prepared once.
        context = template.environment.context_class(
            template.environment, variables, template.name, template.blocks, globals=self._globals
        )
        try:
            return str(template.environment.concat(template.root_render_func(context)))
        except Exception:  # a template may raise anything; the call through the library reports it
            return None


def _is_plain_text(prompt: ChatPrompt) -> bool:
    """Whether a conversation has default settings and messages of just a role and a string."""
    if prompt.tools or prompt.template_kwargs or not prompt.add_generation_prompt or prompt.continue_final_message:
        return False
    for message in prompt.messages:
        if message.keys() != _PLAIN_KEYS or type(message["role"]) is not str or type(message["content"]) is not str:
            return False
    return bool(prompt.messages)


def plain_renderer(hf: Any) -> PlainRenderer | None:
    """Renderer for the template of a transformers tokenizer; None if its text differs from the library's."""
    from transformers import PreTrainedTokenizerBase  # as in `Tokenizer.load`
    from transformers.utils import chat_template_utils

    if type(hf).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    try:
        compiled = chat_template_utils._compile_jinja_template(hf.get_chat_template())
        given = {"tools": None, "documents": None, "add_generation_prompt": True}
        renderer = PlainRenderer(compiled, {**given, **hf.special_tokens_map})
        for messages in _PROBES:
            expected = hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            if renderer.render(ChatPrompt(tuple(messages))) != expected:
                return None
    except Exception:  # another version of the library, or a template that refuses the probes
        return None
    return renderer
