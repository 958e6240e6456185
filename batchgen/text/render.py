"""Many conversations of plain messages through the model's template, without what the library prepares for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.prompts import ChatPrompt

__all__ = ["PlainRenderer", "plain_renderer"]

_KEYS = {"role", "content"}
_PROBES = (
    [{"role": "user", "content": "One {{ 1 }} <two>\n"}],
    [{"role": "user", "content": " One"}, {"role": "assistant", "content": "Two"}, {"role": "user", "content": ""}],
)
"""Conversations that any template takes."""


class PlainRenderer:
    """A compiled template, called with what the library calls it with.

    The library copies every message, so that a template sees values of plain types only, and jinja gathers the
    globals anew for every conversation: both take longer than most templates do.
    """

    def __init__(self, template: Any, variables: Mapping[str, Any]) -> None:
        """`template`: as the library compiled it. `variables`: what it names beside the messages."""
        self._template = template
        self._globals = dict(template.globals)
        self._variables = {**self._globals, **variables}

    def render(self, prompt: ChatPrompt) -> str | None:
        """The text of a conversation; None for one that is not plain, or that the template refuses."""
        if not _is_plain_text(prompt):
            return None
        template = self._template
        seen = {**self._variables, "messages": list(prompt.messages)}
        # What the template's own `render` does, but for its globals.
        context = template.environment.context_class(
            template.environment, seen, template.name, template.blocks, globals=self._globals
        )
        try:
            return str(template.environment.concat(template.root_render_func(context)))
        except Exception:  # a template may raise anything; the library's call says what it was
            return None


def _is_plain_text(prompt: ChatPrompt) -> bool:
    """Whether a conversation has no settings, and messages of a role and a string alone: the library copies no more."""
    if prompt.tools or prompt.template_kwargs or not prompt.add_generation_prompt or prompt.continue_final_message:
        return False
    for message in prompt.messages:
        if message.keys() != _KEYS or type(message["role"]) is not str or type(message["content"]) is not str:
            return False
    return bool(prompt.messages)


def plain_renderer(hf: Any) -> PlainRenderer | None:
    """One for the template of a transformers tokenizer; None where the library itself renders differently, or might."""
    from transformers import PreTrainedTokenizerBase  # as in `Tokenizer.load`
    from transformers.utils import chat_template_utils

    if type(hf).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    try:
        compiled = chat_template_utils._compile_jinja_template(hf.get_chat_template())
        given = {"tools": None, "documents": None, "add_generation_prompt": True}
        renderer = PlainRenderer(compiled, {**given, **hf.special_tokens_map})
        for messages in _PROBES:
            theirs = hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            if renderer.render(ChatPrompt(tuple(messages))) != theirs:
                return None
    except Exception:  # another version of the library, or a template that refuses even these
        return None
    return renderer
